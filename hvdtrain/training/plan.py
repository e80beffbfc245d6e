"""What options, workload and world make of a training: every default filled in, once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.config.levers import ADASUM
from hvdtrain.config.options import Options
from hvdtrain.errors import UsageError
from hvdtrain.steps.world import World
from hvdtrain.system.machine.limits import CPUINFO, cpu_flags
from hvdtrain.system.output.text import plural
from hvdtrain.workloads.task import Workload

BENCHMARK_STEPS = 100


@dataclass(frozen=True)
class TrainingPlan:
    """A training with every default filled in; equal on all ranks.

    Attributes:
        model: name of the network.
        global_batch: samples per step over all ranks.
        epochs: length of the schedule.
        num_steps: updates after which it stops before that; None: at the end.
        lr_scaling: rule of growth with the world size.
        lr: for one rank.
        schedule: the other arguments of ``scale_learning_rate``; see ``schedule_over``.
        warmup_steps: length of the warm-up, in updates; None: as ``schedule`` has it.
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
    warmup_steps: int | None = None

    def schedule_over(self, samples: int) -> dict[str, Any]:
        """Return the arguments of ``scale_learning_rate`` for epochs of ``samples``."""
        if self.warmup_steps is None:
            return self.schedule
        epochs, steps = divmod(self.warmup_steps, math.ceil(samples / self.global_batch))
        return {**self.schedule, "warmup_epochs": epochs + steps * self.global_batch / samples}


def make_plan(workload: Workload, options: Options, world: World) -> TrainingPlan:
    """Fill in the defaults.

    Raises:
        UsageError: an unknown model.
    """
    model = choose_model(workload, options)
    recipe = workload.recipe(options)
    epochs = _given(options.epochs, recipe.epochs)
    # A run shorter than the recipe's gets a warm-up shorter in proportion, but the first updates
    # of a fresh network need one: an epoch, or half of what there is.
    share = recipe.warmup_epochs * epochs / recipe.epochs
    warmup = min(recipe.warmup_epochs, max(share, min(1.0, epochs / 2)))
    global_batch = _given(
        options.global_batch_size,
        _given(options.batch_size, recipe.batch_size) * world.shares * options.accumulate_steps,
    )
    # Whoever fixes the global batch wants the same training at any world size, and Adasum chooses
    # the length of a step between the mean of the gradients and their sum.
    fixed = options.global_batch_size or recipe.lr_batch or options.reduction == ADASUM
    per_batch = recipe.lr_batch and options.lr_scaling is None and options.reduction != ADASUM
    lr = _given(options.lr, recipe.lr.of(options.optimizer))
    steps = BENCHMARK_STEPS if options.benchmark else workload.default_steps(options)
    return TrainingPlan(
        model=model,
        global_batch=global_batch,
        epochs=epochs,
        num_steps=_given(options.num_steps, steps),
        lr_scaling=_given(options.lr_scaling, "none" if fixed else "linear"),
        lr=lr * (global_batch / recipe.lr_batch if per_batch else 1),
        schedule={
            "epochs": epochs,
            "warmup_epochs": _given(options.warmup_epochs, warmup),
            "schedule": _given(options.lr_schedule, recipe.lr_schedule),
            "milestones": _given(
                options.lr_milestones,
                tuple(one * epochs / recipe.epochs for one in recipe.lr_milestones),
            ),
            "decay": options.lr_decay,
        },
        weight_decay=_given(options.weight_decay, recipe.weight_decay),
        warmup_steps=options.warmup_steps,
    )


def notes(options: Options, plan: TrainingPlan, samples: int) -> tuple[str, ...]:
    """Return lines on what was asked for and has no effect, or not the one that it seems to have.

    Args:
        options: as given.
        plan: made of them.
        samples: of an epoch.
    """
    lines = []
    epochs = plural(plan.epochs, "epoch")
    if plan.global_batch > samples:
        lines.append(
            f"the global batch of {plan.global_batch:,} is larger than the data: an epoch is one "
            f"update on all {samples:,}"
        )
    given = options.warmup_epochs is not None or options.warmup_steps is not None
    warmup = plan.schedule_over(samples)["warmup_epochs"]
    if given and warmup > plan.epochs:
        lines.append(
            f"the warm-up of {warmup:g} epochs is longer than the training of {epochs}: the "
            "learning rate does not reach its full height"
        )
    later = [str(one) for one in options.evaluate_epochs or () if one > plan.epochs]
    if later:
        lines.append(
            f"--evaluate-epochs {','.join(later)}: the training ends after {epochs}, and is "
            "evaluated then"
        )
    return tuple(lines)


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def choose_model(workload: Workload, options: Options) -> str:
    """Return the name of the network.

    Raises:
        UsageError: it is none of the workload's.
    """
    model = options.model or next(iter(workload.models), workload.name)
    if workload.models and model not in workload.models:
        raise UsageError(f"--model {model}: choose one of {', '.join(workload.models)}")
    return model


BF16_FLAGS = {"avx512_bf16", "amx_bf16"}


def processor_has_bf16(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether the processor multiplies bfloat16 by itself (Linux; elsewhere: no)."""
    return bool(BF16_FLAGS & cpu_flags(cpuinfo))


def check_tf32(asked: bool, *, gpu: bool) -> None:
    """Refuse ``--tf32`` on a CPU.

    Raises:
        UsageError: there is no GPU.
    """
    if asked and not gpu:
        raise UsageError("--tf32 is for GPUs, and this run computes on a CPU: leave it out")


def choose_precision(asked: str, *, prefers_bf16: bool, gpu: bool, has_bf16: bool) -> str:
    """Choose the precision of the forward pass.

    Args:
        asked: ``auto``, ``fp64``, ``fp32``, ``bf16`` or ``fp16``.
        prefers_bf16: the workload was measured to be faster with it.
        gpu: the device is a GPU.
        has_bf16: the device multiplies bfloat16 by itself.

    Raises:
        UsageError: fp16 on a CPU, where its range needs a loss scaling that nothing speeds up.
    """
    if asked == "fp16" and not gpu:
        raise UsageError("--precision fp16 needs a GPU: use bf16 or fp32 on a CPU")
    if asked == "auto":
        return "bf16" if prefers_bf16 and has_bf16 else "fp32"
    return asked


MOST_WORKERS = 8  # chosen without being asked: each keeps batches of its own in shared memory


def choose_workers(asked: int | None, *, gpu: bool, cores: int) -> int:
    """Choose how many processes read the samples of a rank.

    Args:
        asked: as the user did; None: not at all.
        gpu: the rank computes on one. On a CPU the training itself takes all cores.
        cores: of the rank; one of them is for its own process.
    """
    if asked is not None:
        return asked
    return max(1, min(cores - 1, MOST_WORKERS)) if gpu else 1
