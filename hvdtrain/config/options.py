"""The options of the trainers: one frozen dataclass; ``command_line`` reads it."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hvdtrain.config.levers import AVERAGE, COMPRESSIONS, NONE, REDUCTIONS, Levers
from hvdtrain.config.strategies import STRATEGIES
from hvdtrain.steps.learning_rate import SCALINGS, SCHEDULES


def number(value: str | float) -> float:
    """Read a number."""
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a number") from None


MOST_DIGITS = 30  # of a count
MOST_IN_BATCH = 2**31 - 1


def count(value: str | int | float) -> int:
    """Read a whole number of 0 or more; ``5e9`` is accepted."""
    return _whole(value, 0)


def positive(value: str | int | float) -> int:
    """Read a whole number of 1 or more."""
    return _whole(value, 1)


def _whole(value: str | int | float, least: int) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) <= MOST_DIGITS:
        whole = int(value)  # exact, unlike a float
    else:
        real = number(value)
        if real >= 10**MOST_DIGITS:
            raise ValueError(f"{value} is larger than any count")
        whole = int(real) if real.is_integer() else -1
    if whole < least:
        raise ValueError(f"{value} is not a whole number of {least} or more")
    return whole


def batch(value: str | int | float) -> int:
    """Read the number of samples or passes in a batch."""
    if positive(value) > MOST_IN_BATCH:
        raise ValueError(f"{value} is more than {MOST_IN_BATCH:,}")
    return positive(value)


def random_seed(value: str | int | float) -> int:
    """Read a 64-bit random seed."""
    if count(value) >= 2**64:
        raise ValueError(f"{value} is not a seed: must be a whole number below 2^64")
    return count(value)


def fraction(value: str | float) -> float:
    """Read a number from 0 up to, not including, 1."""
    if not 0 <= number(value) < 1:
        raise ValueError(f"{value} is not a fraction from 0 up to 1")
    return float(value)


def non_negative(value: str | float) -> float:
    """Read a finite number of 0 or more."""
    if not 0 <= number(value) < float("inf"):
        raise ValueError(f"{value} is not a number of 0 or more")
    return float(value)


def numbers(value: str | Sequence[float]) -> tuple[float, ...]:
    """Read numbers separated by commas."""
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(non_negative(part) for part in parts)


def counts(value: str | Sequence[int]) -> tuple[int, ...]:
    """Read whole numbers separated by commas."""
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(positive(part) for part in parts)


def steps(value: str) -> tuple[int, int | None]:
    """Read ``A:B``: two whole numbers, A < B; either may be omitted."""
    first, colon, end = value.partition(":")
    try:
        span = count(first or 0), count(end) if end else None
    except ValueError:
        colon, span = "", (0, 0)
    if not colon or (span[1] is not None and span[1] <= span[0]):
        raise ValueError(f"{value} is not A:B, such as 10:20 (in a YAML file: in quotes)")
    return span


def local_folder(value: str | Path) -> Path:
    """Read a directory of this host, and expand ``$NAME`` from the environment."""
    path = os.path.expandvars(os.fspath(value))
    if unset := re.search(r"\$\{?\w+", path):
        raise ValueError(f"{value}: {unset[0]} is not set on this host")
    if not path:
        raise ValueError("empty path")
    return Path(path)


def option(
    default: Any, text: str, kind: Callable[[Any], Any] = str, choices: Sequence[str] = ()
) -> Any:
    """Return a field with its help text, the function that reads it, and the valid names."""
    metadata = {"help": text, "kind": kind, "choices": tuple(choices)}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """Options of a training; None: the default depends on the workload or the machine.

    A workload adds its options in a subclass; so does a file for ``hvdtrain.train``.
    """

    EITHER: ClassVar[tuple[tuple[str, str], ...]] = (
        ("batch_size", "global_batch_size"),
        ("checkpoint", "checkpoint_dir"),
        ("warmup_epochs", "warmup_steps"),
    )
    """Pairs of mutually exclusive options."""
    ALIASES: ClassVar[Mapping[str, str]] = {}
    """Aliases: ``--option`` or ``--option value``, and the words that replace it."""

    GROUPS: ClassVar[Mapping[str, str]] = {
        "framework": "common options",
        "stage": "data",
        "global_batch_size": "optimization",
        "deterministic": "numerics and compilation",
        "spawn": "distribution",
        "evaluate_epochs": "evaluation",
        "checkpoint_every": "checkpoints",
        "metrics": "output",
    }
    """Groups of the help: the first option of each, and its title."""

    framework: str = option("pytorch", "deep-learning framework", choices=("pytorch", "tensorflow"))
    strategy: str | None = option(
        None,
        "how gradients are synchronized across ranks (default: horovod; for one process without it "
        "single)",
        choices=tuple(STRATEGIES),
    )
    data: Path | None = option(None, "directory of the dataset (see below)", Path)
    model: str = option("", "model to train (see below)")
    epochs: int | None = option(
        None, "number of epochs; length of the learning-rate schedule", positive
    )
    num_steps: int | None = option(
        None, "total number of updates after which to stop, counting those before a resume", count
    )
    batch_size: int | None = option(None, "number of samples per rank and forward pass", batch)
    lr: float | None = option(None, "learning rate for one rank", non_negative)
    optimizer: str = option("sgd", "optimizer", choices=("sgd", "adam", "adamw"))
    precision: str = option(
        "auto",
        "numeric precision of the forward pass",
        choices=("auto", "fp64", "fp32", "bf16", "fp16"),
    )
    checkpoint_dir: Path | None = option(
        None, "directory to save checkpoints in and resume from", Path
    )
    summary: Path | None = option(None, "JSON file for the result", Path)
    stage: Path | None = option(
        None,
        "node-local directory to which each host copies the packed dataset (hvdtrain pack) before "
        "training; '$TMPDIR' is expanded on each host",
        local_folder,
    )
    workers: int | None = option(
        None,
        "number of data-loading processes per rank; 0: load in the rank itself (default: 1; on a "
        "GPU the rank's cores minus one, at most 8)",
        count,
    )
    seed: int = option(
        0, "random seed for initialization, data order, dropout and augmentation", random_seed
    )
    global_batch_size: int | None = option(
        None, "number of samples per step over all ranks, instead of --batch-size", batch
    )
    accumulate_steps: int = option(
        1, "number of forward and backward passes per update, each over --batch-size samples", batch
    )
    lr_scaling: str | None = option(
        None,
        "scaling of the learning rate with the number of ranks (default: linear; with "
        "--global-batch-size none)",
        choices=SCALINGS,
    )
    warmup_epochs: float | None = option(None, "number of warm-up epochs", non_negative)
    warmup_steps: int | None = option(
        None, "number of warm-up updates, instead of --warmup-epochs", count
    )
    lr_schedule: str | None = option(
        None, "learning-rate schedule after warm-up", choices=SCHEDULES
    )
    lr_milestones: tuple[float, ...] | None = option(
        None, "epochs at which the multistep schedule decays, e.g. 30,60,80", numbers
    )
    lr_decay: float = option(
        0.1, "decay factor at each milestone of the multistep schedule", non_negative
    )
    momentum: float = option(0.9, "momentum of SGD", fraction)
    weight_decay: float | None = option(None, "weight decay (L2 penalty)", non_negative)
    clip_norm: float = option(
        0.0, "maximum L2 norm of the gradients of an update; 0: no clipping", non_negative
    )
    sync_batchnorm: bool = option(False, "compute BatchNorm over the global batch", bool)
    on_nan: str = option(
        "stop",
        "action if gradients are not finite: stop, skip the update (at most 10 in a row), or roll "
        "back to the newest checkpoint and skip that global batch (at most 3 times)",
        choices=("stop", "skip", "rollback"),
    )
    deterministic: bool = option(
        False, "make runs on the same number of ranks bit-equal to each other", bool
    )
    tf32: bool = option(
        False, "use TF32 (10-bit mantissa) for fp32 matrix products on a GPU: faster", bool
    )
    compile: bool = option(False, "compile the model with torch.compile", bool)
    spawn: int | None = option(
        None,
        "number of ranks to start on this host, without a launcher (--strategy ddp, zero, fsdp, "
        "pipeline)",
        positive,
    )
    local_rank: int | None = option(
        None, "local rank as passed by torch.distributed.launch; must equal LOCAL_RANK", count
    )
    compression: str = option(
        NONE, "numeric type in which gradients are sent and summed", choices=COMPRESSIONS
    )
    reduction: str = option(
        AVERAGE, "gradient reduction: average, or Horovod's Adasum", choices=REDUCTIONS
    )
    fusion_threshold_mb: float | None = option(
        None, "size of a gradient bucket in MiB; 0: no fusion (default: 25)", non_negative
    )
    cycle_time_ms: float | None = option(None, "Horovod's cycle time in milliseconds", non_negative)
    hierarchical_allreduce: bool = option(
        False, "sum within each host first, then across hosts (Horovod with NCCL)", bool
    )
    autotune: bool = option(
        False, "let Horovod tune fusion threshold and cycle time; results are not bit-equal", bool
    )
    stages: int | None = option(
        None, "number of pipeline stages (default: all ranks; --strategy pipeline)", positive
    )
    micro_batches: int | None = option(
        None,
        "number of micro-batches per batch (default: 4 per stage; --strategy pipeline)",
        positive,
    )
    check_replicas: int = option(
        1000,
        "number of updates between checks that parameters and optimizer state are equal on all "
        "ranks; 0: check only when saving",
        count,
    )
    evaluate_epochs: tuple[int, ...] | None = option(
        None,
        "epochs after which to evaluate, e.g. 20,30,40; the last is always evaluated (default: "
        "every epoch)",
        counts,
    )
    evaluate_only: bool = option(False, "evaluate a checkpoint without training", bool)
    checkpoint: Path | None = option(
        None,
        "checkpoint to evaluate, or a directory of checkpoints (default: the newest in "
        "--checkpoint-dir)",
        Path,
    )
    predict: Path | None = option(
        None, "CSV file for one prediction per sample; implies --evaluate-only", Path
    )
    benchmark: str = option(
        "",
        "measure throughput only: training (100 updates unless --num-steps is set, no evaluation) "
        "or inference (an evaluation; needs no checkpoint)",
        choices=("training", "inference"),
    )
    checkpoint_every: int | None = option(
        None, "number of updates between checkpoints, in addition to one per epoch", positive
    )
    keep: int = option(3, "number of recent checkpoints to keep, in addition to the best", positive)
    resume: str = option(
        "auto",
        "resume from --checkpoint-dir; auto: if it has a checkpoint, must: fail without one",
        choices=("auto", "never", "must"),
    )
    metrics: Path | None = option(
        None, "JSON Lines file for loss, learning rate and throughput", Path
    )
    log_every: int | None = option(
        None, "number of updates between lines of --metrics (default: 20 lines per epoch)", positive
    )
    tensorboard: Path | None = option(None, "directory for TensorBoard logs", Path)
    timeline: Path | None = option(
        None, "file for Horovod's timeline (see hvdtrain timeline)", Path
    )
    timeline_steps: tuple[int, int | None] | None = option(
        None, "window of --timeline: from after update A to update B (default: all)", steps
    )
    quiet: bool = option(False, "print errors only", bool)
    device: Any = "cpu"
    """Device in the framework's notation; not an option: set by the trainer."""

    @property
    def evaluates_only(self) -> bool:
        """Whether a checkpoint is evaluated, without training."""
        return self.evaluate_only or self.predict is not None or self.benchmark == "inference"

    @property
    def levers(self) -> Levers:
        """Communication options; an evaluation sends no gradients, so those keep their default."""
        if self.evaluates_only:
            return Levers(stages=self.stages, micro_batches=self.micro_batches)
        names = [field.name for field in dataclasses.fields(Levers)]
        return Levers(**{name: getattr(self, name) for name in names})


def declared(kind: type[Options]) -> list[dataclasses.Field[Any]]:
    """Return the fields that are options."""
    return [field for field in dataclasses.fields(kind) if "help" in field.metadata]
