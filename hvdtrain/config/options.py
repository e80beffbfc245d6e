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
    """Read a whole number of 0 or more; ``5e9`` is taken."""
    return _whole(value, 0)


def positive(value: str | int | float) -> int:
    """Read a whole number of 1 or more."""
    return _whole(value, 1)


def _whole(value: str | int | float, least: int) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) <= MOST_DIGITS:
        found = int(value)  # exact where a float is not
    else:
        real = number(value)
        if real >= 10**MOST_DIGITS:
            raise ValueError(f"{value} is larger than any count")
        found = int(real) if real.is_integer() else -1
    if found < least:
        raise ValueError(f"{value} is not a whole number of {least} or more")
    return found


def batch(value: str | int | float) -> int:
    """Read how many samples or passes there are in a batch."""
    if positive(value) > MOST_IN_BATCH:
        raise ValueError(f"{value} is more than {MOST_IN_BATCH:,}")
    return positive(value)


def random_seed(value: str | int | float) -> int:
    """Read the seed of a generator of random numbers, of 64 bits."""
    if count(value) >= 2**64:
        raise ValueError(f"{value} is no seed: give a whole number below 2^64")
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
    """Read ``A:B``: two whole numbers, the second one larger; either may be left out."""
    first, colon, end = value.partition(":")
    try:
        span = count(first or 0), count(end) if end else None
    except ValueError:
        colon, span = "", (0, 0)
    if not colon or (span[1] is not None and span[1] <= span[0]):
        raise ValueError(f"{value} is not A:B, such as 10:20 (in a YAML file: in quotes)")
    return span


def local_folder(value: str | Path) -> Path:
    """Read a folder of this host, in which ``$NAME`` stands for a variable of this process."""
    path = os.path.expandvars(os.fspath(value))
    if unset := re.search(r"\$\{?\w+", path):
        raise ValueError(f"{value}: {unset[0]} is not set on this host")
    if not path:
        raise ValueError("it is empty")
    return Path(path)


def option(
    default: Any, text: str, kind: Callable[[Any], Any] = str, choices: Sequence[str] = ()
) -> Any:
    """Return a field with its help text, the function that reads it, and the valid names."""
    metadata = {"help": text, "kind": kind, "choices": tuple(choices)}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """What a user can say about a training; None means that workload or machine decide.

    A workload adds options of its own in a subclass; so does a file for ``hvdtrain.train``.
    """

    EITHER: ClassVar[tuple[tuple[str, str], ...]] = (
        ("batch_size", "global_batch_size"),
        ("checkpoint", "checkpoint_dir"),
        ("warmup_epochs", "warmup_steps"),
    )
    """Pairs of which one can be given."""
    ALIASES: ClassVar[Mapping[str, str]] = {}
    """Other spellings: ``--option``, or ``--option value``, and the words that stand for it."""

    framework: str = option("pytorch", "who computes", choices=("pytorch", "tensorflow"))
    strategy: str | None = option(
        None,
        "how ranks work together (default: horovod where installed)",
        choices=tuple(STRATEGIES),
    )
    data: Path | None = option(None, "directory of the dataset (see the end)", Path)
    stage: Path | None = option(
        None,
        "copy packed data (hvdtrain pack) to this directory of each host first, and read them "
        "there; '$TMPDIR' is each host's own",
        local_folder,
    )
    model: str = option("", "the network (see the end)")
    epochs: int | None = option(None, "passes over the data; the length of the schedule", positive)
    num_steps: int | None = option(
        None, "stop when this many updates are done, resumed ones included", count
    )
    batch_size: int | None = option(None, "samples per rank and step", batch)
    global_batch_size: int | None = option(
        None, "samples per step over all ranks, instead of --batch-size", batch
    )
    accumulate_steps: int = option(
        1, "forward and backward passes per update, each over a batch of --batch-size", batch
    )
    lr: float | None = option(None, "learning rate that is right for one rank", non_negative)
    lr_scaling: str | None = option(
        None, "growth with the world size (linear; none with --global-batch-size)", choices=SCALINGS
    )
    warmup_epochs: float | None = option(
        None, "epochs in which the learning rate climbs to its height", non_negative
    )
    warmup_steps: int | None = option(
        None, "the same in updates, instead of --warmup-epochs", count
    )
    lr_schedule: str | None = option(None, "what follows the warm-up", choices=SCHEDULES)
    lr_milestones: tuple[float, ...] | None = option(
        None, "multistep: epochs at which it falls, such as 30,60,80", numbers
    )
    lr_decay: float = option(0.1, "multistep: the factor at each milestone", non_negative)
    momentum: float = option(0.9, "of SGD", fraction)
    weight_decay: float | None = option(None, "L2 penalty on the parameters", non_negative)
    clip_norm: float = option(
        0.0, "scale the gradients of an update down to this L2 norm (0: never)", non_negative
    )
    compression: str = option(
        NONE, "the type in which gradients are sent and summed", choices=COMPRESSIONS
    )
    reduction: str = option(
        AVERAGE, "how the ranks' gradients become one; adasum: Horovod's", choices=REDUCTIONS
    )
    fusion_threshold_mb: float | None = option(
        None, "MiB of gradients that are summed at once (25; 0: each by itself)", non_negative
    )
    cycle_time_ms: float | None = option(
        None, "how often Horovod looks for gradients to sum", non_negative
    )
    hierarchical_allreduce: bool = option(
        False, "sum within each host first (Horovod with NCCL)", bool
    )
    autotune: bool = option(
        False, "let Horovod choose fusion and cycle by what it measures: no longer bit-equal", bool
    )
    stages: int | None = option(
        None, "ranks that hold one model, a part of it each (--strategy pipeline; all)", positive
    )
    micro_batches: int | None = option(
        None, "into how many a batch is cut that goes through them (4 for each stage)", positive
    )
    optimizer: str = option("sgd", "the update rule", choices=("sgd", "adam", "adamw"))
    precision: str = option(
        "auto", "of the forward pass", choices=("auto", "fp64", "fp32", "bf16", "fp16")
    )
    tf32: bool = option(
        False, "on a GPU, multiply fp32 in TF32: faster, with 10 bits of mantissa", bool
    )
    compile: bool = option(False, "let torch.compile make the model's kernels", bool)
    sync_batchnorm: bool = option(False, "BatchNorm over the global batch", bool)
    on_nan: str = option(
        "stop",
        "where gradients are not finite: end, leave that update out (at most 10 in a row), or go "
        "back to the newest checkpoint and leave that global batch out (at most 3 times)",
        choices=("stop", "skip", "rollback"),
    )
    check_replicas: int = option(
        1000,
        "compare parameters and optimizer state of all ranks before every update of which the "
        "number is a multiple of this, and end where they differ (0: only at each save)",
        count,
    )
    workers: int | None = option(
        None,
        "processes per rank that read images (0: the rank itself; default: 1, or on a GPU the "
        "rank's cores less one, 8 at most)",
        count,
    )
    seed: int = option(0, "of weights, order, dropout and augmentation", random_seed)
    deterministic: bool = option(False, "bit-equal from run to run at any number of ranks", bool)
    evaluate_epochs: tuple[int, ...] | None = option(
        None,
        "evaluate when so many epochs are done, such as 20,30,40, and at the end (default: after "
        "each)",
        counts,
    )
    benchmark: str = option(
        "",
        "measure speed alone: of the training, for 100 updates unless told otherwise, without an "
        "evaluation; or of the inference: an evaluation, for which no weights need be given",
        choices=("training", "inference"),
    )
    checkpoint_dir: Path | None = option(None, "where checkpoints are kept and resumed from", Path)
    checkpoint_every: int | None = option(
        None, "also save whenever this many updates are done (default: each epoch)", positive
    )
    keep: int = option(3, "how many of the newest checkpoints stay, besides the best", positive)
    resume: str = option("auto", "from --checkpoint-dir", choices=("auto", "never", "must"))
    evaluate_only: bool = option(False, "train nothing: evaluate a checkpoint and end", bool)
    predict: Path | None = option(
        None, "also write a line per sample to this file, as CSV; implies --evaluate-only", Path
    )
    checkpoint: Path | None = option(
        None,
        "what --evaluate-only takes: a checkpoint, or a directory of them (default: the newest of "
        "--checkpoint-dir)",
        Path,
    )
    summary: Path | None = option(None, "write the result to this file, as JSON", Path)
    metrics: Path | None = option(
        None, "write loss, learning rate and throughput to this file, as JSON Lines", Path
    )
    log_every: int | None = option(
        None, "updates between two lines of --metrics (default: 20 lines an epoch)", positive
    )
    tensorboard: Path | None = option(None, "write the training curves to this directory", Path)
    timeline: Path | None = option(
        None, "record Horovod's timeline in this file (see hvdtrain timeline)", Path
    )
    timeline_steps: tuple[int, int | None] | None = option(
        None, "A:B: only from when A updates are done until B are (default: all)", steps
    )
    spawn: int | None = option(
        None,
        "start N ranks on this host, without a launcher (--strategy ddp, zero, fsdp, pipeline)",
        positive,
    )
    local_rank: int | None = option(
        None, "as torch.distributed.launch passes it: checked against LOCAL_RANK", count
    )
    quiet: bool = option(False, "no progress, no table; errors only", bool)
    device: Any = "cpu"
    """Where to compute, in the framework's own words: no option, the trainer fills it in."""

    @property
    def evaluates_only(self) -> bool:
        """Whether nothing is trained: a checkpoint is evaluated."""
        return self.evaluate_only or self.predict is not None or self.benchmark == "inference"

    @property
    def levers(self) -> Levers:
        """How gradients travel between the ranks; what is at its default where there are none."""
        if self.evaluates_only:
            return Levers(stages=self.stages, micro_batches=self.micro_batches)
        return Levers(**{one.name: getattr(self, one.name) for one in dataclasses.fields(Levers)})


def declared(kind: type[Options]) -> list[dataclasses.Field[Any]]:
    """Return the fields that are options."""
    return [field for field in dataclasses.fields(kind) if "help" in field.metadata]
