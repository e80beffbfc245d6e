"""The plan of a training: options with every default filled in from workload and world."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.config.options import LAYERWISE, Options
from hvdtrain.steps.learning_rate import scale_factor
from hvdtrain.steps.world import World
from hvdtrain.system.machine.limits import CPUINFO, cpu_flags
from hvdtrain.system.output.text import plural
from hvdtrain.tasks.task import Recipe, Task, Workload

BENCHMARK_STEPS = 100  # also on random samples
EMA = "--ema"  # in the name of an optimizer in a checkpoint
MIN_UPDATES = 30  # of a training whose number of epochs the user has set
LARGE_BATCH_WARMUP = 1 / 6  # share of the epochs, with LARS and LAMB


class Schedule(TypedDict):
    """Arguments of ``scale_learning_rate`` and ``LearningRate``."""

    epochs: int
    warmup_epochs: float
    schedule: str
    milestones: tuple[float, ...]
    decay: float


@dataclass(frozen=True)
class TrainingPlan:
    """A training with every default filled in; equal on all ranks."""

    model: str  # name of the network
    global_batch: int  # samples per step over all ranks
    epochs: int  # length of the schedule
    num_steps: int | None  # number of updates after which it stops earlier; None: no limit
    lr_scaling: str  # scaling rule of the learning rate with the world size
    lr: float  # before the scaling by the number of ranks
    schedule: Schedule  # see ``schedule_over``
    weight_decay: float  # L2 penalty
    warmup_steps: int | None = None  # in updates; None: the warm-up of ``schedule``
    lr_from: tuple[float, int] | None = None  # rate and global batch from which ``lr`` was scaled

    def schedule_over(self, samples: int) -> Schedule:
        """Return the arguments of ``scale_learning_rate`` for epochs of ``samples``."""
        if self.warmup_steps is None:
            return self.schedule
        epochs, steps = divmod(self.warmup_steps, math.ceil(samples / self.global_batch))
        return {**self.schedule, "warmup_epochs": epochs + steps * self.global_batch / samples}


@dataclass(frozen=True)
class Session:
    """The parts of a training or an evaluation on this rank, created by ``trainer.train``."""

    workload: Workload
    options: Options  # the user's
    plan: TrainingPlan
    adapter: CommonAdapter
    task: Task


def make_plan(workload: Workload, options: Options, world: World) -> TrainingPlan:
    """Fill in the defaults."""
    model = choose_model(workload, options)
    recipe = workload.recipe(options)
    epochs = _or_default(options.epochs, recipe.epochs)
    batch = _or_default(options.batch_size, recipe.batch_size)
    all_ranks = batch * world.devices * options.accumulate_steps
    global_batch = _or_default(options.global_batch_size, all_ranks)
    # LARS and LAMB bound each update by the norm of its weight, so their rate grows more slowly.
    layerwise = options.optimizer in LAYERWISE
    scaling = options.lr_scaling or ("sqrt" if layerwise else "linear")
    lr = base_lr = _or_default(options.lr, recipe.lr.of(options.optimizer))
    base_batch = _base_batch(options, recipe)
    if base_batch:
        lr *= scale_factor(scaling, global_batch / base_batch)
    # A fixed global batch means the same training at any world size.
    fixed = options.global_batch_size or recipe.lr_base_batch
    is_random = workload.random_without_data and options.data is None and options.epochs is None
    steps = BENCHMARK_STEPS if options.benchmark or is_random else None
    large = bool(layerwise and base_batch and global_batch > base_batch)
    return TrainingPlan(
        model=model,
        global_batch=global_batch,
        epochs=epochs,
        num_steps=_or_default(options.num_steps, steps),
        lr_scaling="none" if base_batch or (fixed and options.lr_scaling is None) else scaling,
        lr=lr,
        schedule=_schedule(options, recipe, epochs, large=large),
        weight_decay=_or_default(options.weight_decay, recipe.weight_decay),
        warmup_steps=options.warmup_steps,
        lr_from=(base_lr, base_batch) if base_batch else None,
    )


def _schedule(options: Options, recipe: Recipe, epochs: int, *, large: bool) -> Schedule:
    """Return the schedule of the learning rate; ``large``: of a large batch with LARS or LAMB."""
    # A run shorter than the recipe's has a proportionally shorter warm-up, but at least an epoch
    # or half of the training: the first updates of a new network need one.
    share = recipe.warmup_epochs * epochs / recipe.epochs
    warmup = min(recipe.warmup_epochs, max(share, min(1.0, epochs / 2)))
    if large:
        warmup = max(warmup, LARGE_BATCH_WARMUP * epochs)
    milestones = tuple(epoch * epochs / recipe.epochs for epoch in recipe.lr_milestones)
    return {
        "epochs": epochs,
        "warmup_epochs": _or_default(options.warmup_epochs, warmup),
        "schedule": _or_default(options.lr_schedule, recipe.lr_schedule),
        "milestones": _or_default(options.lr_milestones, milestones),
        "decay": options.lr_decay,
    }


def _base_batch(options: Options, recipe: Recipe) -> int | None:
    """Return the global batch from which the learning rate is scaled; None: by the ranks.

    A recipe's for LARS and LAMB follows the global batch, however that is set.
    """
    if options.lr_base_batch or options.lr_scaling:
        return options.lr_base_batch
    of_batch = options.optimizer in LAYERWISE and options.lr is None
    return recipe.lr_base_batch or (recipe.batch_size if of_batch else None)


def origin_of(workload: Workload, options: Options, plan: TrainingPlan) -> dict[str, object]:
    """Return the values of a checkpoint's ``origin`` that a run must have to load it.

    A training needs the optimizer, named with the options that determine what its state contains;
    an evaluation only the model, and with ``--ema`` the optimizer: the moving average is part of
    its state, in the order of its parameters.
    """
    origin = {"framework": options.framework, "workload": workload.name, "model": plan.model}
    if options.evaluates_only and not options.ema:
        return {**origin}
    kind = [options.optimizer]
    if options.no_decay_on_norm and options.optimizer not in LAYERWISE:
        kind.append("--no-decay-on-norm")
    if options.ema:
        kind.append(EMA)
    seed = {} if options.evaluates_only else {"seed": options.seed}
    return {**origin, "optimizer": " ".join(kind), **seed}


def has_average(state: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint with the ``state`` has a moving average of the weights."""
    origin = state.get("origin")
    return isinstance(origin, dict) and EMA in str(origin.get("optimizer")).split()


def notes(options: Options, plan: TrainingPlan, samples: int) -> tuple[str, ...]:
    """Return lines on options without effect, or with an unexpected one, by samples per epoch."""
    lines = []
    epochs = plural(plan.epochs, "epoch")
    if plan.global_batch > samples:
        lines.append(
            f"the global batch of {plan.global_batch:,} is larger than the data: an epoch is one "
            f"update on {plural(samples, 'sample')}"
        )
    specified = options.warmup_epochs is not None or options.warmup_steps is not None
    warmup = plan.schedule_over(samples)["warmup_epochs"]
    lr, batch = plan.lr_from or (plan.lr, plan.global_batch)
    if batch != plan.global_batch and options.optimizer in LAYERWISE:
        lines.append(
            f"{options.optimizer}: learning rate {lr:g} for a batch of {batch:,}, {plan.lr:g} for "
            f"{plan.global_batch:,} (--lr-scaling {options.lr_scaling or 'sqrt'}); warm-up of "
            f"{warmup:g} epochs"
        )
    if specified and warmup > plan.epochs:
        lines.append(
            f"the warm-up of {warmup:g} epochs is longer than the training of {epochs}: the "
            "learning rate does not reach its maximum"
        )
    later = [str(epoch) for epoch in options.evaluate_epochs or () if epoch > plan.epochs]
    if later:
        lines.append(
            f"--evaluate-epochs {','.join(later)}: the training ends after {epochs}, and is "
            "evaluated then"
        )
    updates = plan.epochs * math.ceil(samples / plan.global_batch)
    if options.epochs and plan.num_steps is None and updates < MIN_UPDATES:
        lines.append(
            f"only {plural(updates, 'update')} in {epochs}, too few to learn much: use more "
            "--epochs or a smaller --batch-size"
        )
    return tuple(lines)


def _or_default(value: Any, default: Any) -> Any:
    return default if value is None else value


def choose_model(workload: Workload, options: Options) -> str:
    """Return the name of the network; by default the first of the workload."""
    return options.model or next(iter(workload.models), workload.name)


BF16_FLAGS = {"avx512_bf16", "amx_bf16"}


def processor_has_bf16(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether the processor has bfloat16 instructions (on Linux; elsewhere False)."""
    return bool(BF16_FLAGS & cpu_flags(cpuinfo))


def choose_precision(requested: str, *, prefers_bf16: bool, has_bf16: bool) -> str:
    """Return the precision of the forward pass; bf16 by default only if it was measured faster."""
    if requested == "auto":
        return "bf16" if prefers_bf16 and has_bf16 else "fp32"
    return requested


MAX_WORKERS = 8  # by default: each keeps batches in shared memory


def choose_workers(requested: int | None, *, gpu: bool, cores: int) -> int:
    """Return the number of processes that read the samples of a rank.

    By default one core is left for the training process; on a CPU it uses all of them.
    """
    if requested is not None:
        return requested
    return max(1, min(cores - 1, MAX_WORKERS)) if gpu else 1
