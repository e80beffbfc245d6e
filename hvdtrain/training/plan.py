"""What options, workload and world make of a training: every default filled in, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.steps.world import World
from hvdtrain.training.options import Options
from hvdtrain.workloads.base import Task, TaskOptions


@dataclass(frozen=True)
class Recipe:
    """The defaults of a workload, measured to keep its accuracy at any number of ranks.

    Attributes:
        batch_size: samples a rank and step.
        lr: learning rate for one rank.
        epochs: length of the training.
        warmup_epochs: length of the warm-up, in epochs.
        lr_schedule: what follows it.
        weight_decay: L2 penalty.
    """

    batch_size: int
    lr: float
    epochs: int
    warmup_epochs: float
    lr_schedule: str
    weight_decay: float


@dataclass(frozen=True)
class Workload:
    """A trainer's subject.

    Attributes:
        name: as in ``python -m hvdtrain.NAME``.
        models: names of its networks, the default first.
        recipe: its defaults, given the options.
        build: makes the task of a framework: (options, task options) -> task.
        short_steps: steps take milliseconds, so Horovod should look for work more often.
        prefers_bf16: measured to be faster in bf16 where the device has it.
        default_steps: updates where the data has no end (synthetic); None: all epochs.
    """

    name: str
    models: tuple[str, ...]
    recipe: Callable[[Options], Recipe]
    build: Callable[[Options, TaskOptions], Task]
    short_steps: Callable[[str], bool]
    prefers_bf16: Callable[[str], bool]
    default_steps: Callable[[Options], int | None] = lambda options: None


@dataclass(frozen=True)
class Plan:
    """A training with every default filled in; equal on all ranks.

    Attributes:
        model: name of the network.
        global_batch: samples a step over all ranks.
        epochs: length of the schedule.
        num_steps: updates after which it stops before that; None: at the end.
        lr_scaling: rule of growth with the world size.
        lr: for one rank.
        schedule: the other arguments of ``scale_learning_rate``.
        weight_decay: L2 penalty.
    """

    model: str
    global_batch: int
    epochs: int
    num_steps: int | None
    lr_scaling: str
    lr: float
    schedule: dict[str, Any]
    weight_decay: float


def make_plan(workload: Workload, options: Options, world: World) -> Plan:
    """Fill in the defaults.

    Raises:
        UsageError: an unknown model.
    """
    model = choose_model(workload, options)
    recipe = workload.recipe(options)

    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    epochs = given(options.epochs, recipe.epochs)
    # A run shorter than the recipe's gets a warm-up shorter in proportion, but the first updates
    # of a fresh network need one: an epoch, or half of what there is.
    share = recipe.warmup_epochs * epochs / recipe.epochs
    warmup = min(recipe.warmup_epochs, max(share, min(1.0, epochs / 2)))
    return Plan(
        model=model,
        global_batch=given(
            options.global_batch_size, given(options.batch_size, recipe.batch_size) * world.size
        ),
        epochs=epochs,
        num_steps=given(options.num_steps, workload.default_steps(options)),
        # Whoever fixes the global batch wants the same training at any world size.
        lr_scaling=given(options.lr_scaling, "none" if options.global_batch_size else "linear"),
        lr=given(options.lr, recipe.lr),
        schedule={
            "epochs": epochs,
            "warmup_epochs": given(options.warmup_epochs, warmup),
            "schedule": given(options.lr_schedule, recipe.lr_schedule),
            "milestones": given(options.lr_milestones, ()),
            "decay": options.lr_decay,
        },
        weight_decay=given(options.weight_decay, recipe.weight_decay),
    )


def choose_model(workload: Workload, options: Options) -> str:
    """The name of the network.

    Raises:
        UsageError: it is none of the workload's.
    """
    model = options.model or workload.models[0]
    if model not in workload.models:
        raise UsageError(f"--model {model}: choose one of {', '.join(workload.models)}")
    return model
