"""Result of a training, written to ``--summary`` and read by the commands.

A field is None if it is unknown: no evaluation, or a file of another version. docs/training.md
explains how seconds and samples are counted.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import msgspec

from hvdtrain.errors import UsageError
from hvdtrain.system.files import read_regular

MAX_BYTES = 2**20  # maximum bytes of a file; a summary is far smaller
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # others are no measurement
# Keys that are omitted if their value is None.
MAY_LACK = ("joules_per_image", "steps_skipped", "saves")
Kind = TypeVar("Kind")


class Stopped(StrEnum):
    """Reason why a training stopped."""

    FINISHED = "finished"
    STEPS = "steps"
    PREEMPTED = "preempted"
    DIVERGED = "diverged"


@dataclass(frozen=True)
class StepSplit:
    """Seconds of the mean step by part, see ``training/throughput.py``."""

    steps: Count | None = None  # number of steps averaged
    data: float | None = None
    compute: float | None = None
    communication: float | None = None
    waiting: float | None = None
    undivided: float | None = None  # compute, communication and waiting, if not measured separately
    slowest_rank: Count | None = None  # the rank that was last most often
    slowest_share: float | None = None  # share of steps in which it was last


@dataclass(frozen=True)
class GradientMessages:
    """Messages in which the gradients of a step are reduced."""

    count: Count
    bytes: Count


@dataclass(frozen=True)
class Saves:
    """Saves of checkpoints, in seconds of rank 0."""

    count: Count = 0
    stopped: float = 0.0
    """Total in which the training stood still."""
    waited: float = 0.0
    """Of these, until an earlier save was complete."""
    cost: float | None = None
    """Mean in which a save stopped the training; the last, waited for, counts only if alone."""
    longest: float = 0.0
    """Maximum from the call until a checkpoint was complete."""
    every: Count | None = None
    """Updates between two saves."""


@dataclass(frozen=True)
class Summary:
    """A training run; throughput and seconds are of this process, counts include resumed runs."""

    workload: str | None = None
    framework: str | None = None
    strategy: str | None = None
    model: str | None = None
    world_size: Count | None = None
    """Number of ranks."""
    devices: Count | None = None
    """Over all ranks; more than the ranks only with ``data-parallel``."""
    hosts: Count | None = None
    """Number of hosts."""
    precision: str | None = None
    """Of the forward pass."""
    compression: str | None = None
    """Type in which gradients were sent."""
    global_batch_size: Count | None = None
    """Samples per update; None if nothing was trained."""
    epochs_completed: Count | None = None
    steps_completed: Count | None = None
    samples_trained: Count | None = None
    """Over all ranks."""
    training_samples: Count | None = None
    """Of an epoch."""
    unit: str | None = None
    """Plural noun of the samples, e.g. ``images``."""
    train_loss: float | None = None
    """Mean over the samples of the last epoch, or of its part that was trained."""
    eval_loss: float | None = None
    """Mean over the samples of the last evaluation."""
    eval_accuracy: float | None = None
    """A fraction."""
    eval_metrics: Mapping[str, float | None] | None = None
    """Metrics of the task except the loss, by name."""
    eval_samples: Count | None = None
    """Number of samples of the last evaluation, each counted once."""
    images_per_second_mean: float | None = None
    """Over all ranks, after the first min(5, steps // 5) steps."""
    images_per_second_std: float | None = None
    """Over those steps."""
    step_seconds_median: float | None = None
    """Of those steps."""
    seconds_total: float | None = None
    seconds_to_first_step: float | None = None
    """Until the first update was done."""
    step_split: StepSplit | None = None
    """Parts of the mean step."""
    gradient_messages: GradientMessages | None = None
    """Messages and bytes in which the gradients of a step are reduced."""
    peak_memory_bytes: Count | None = None
    """Maximum over the ranks: on the GPU, else resident."""
    utilisation_mean: float | None = None
    """Of the cores of a rank, or of its GPU, a fraction; over the ranks."""
    utilisation_lowest: float | None = None
    """Minimum over the ranks."""
    joules_per_image: float | None = None
    """Energy of all GPUs since step 2; None if unknown."""
    parameter_norm: float | None = None
    """L2 norm over all trainable parameters, in float64."""
    steps_skipped: Count | None = None
    """Updates skipped by ``--on-nan skip``; None if there were none."""
    saves: Saves | None = None
    """Of this run; None if there were none."""
    stopped: Stopped | None = None
    """``finished``, ``steps``, ``preempted`` or ``diverged``."""
    checkpoint: str | None = None
    """Path of the newest one, or of the one that was evaluated."""
    timeline: str | None = None
    """Path, if one was recorded."""
    profile: str | None = None
    """Directory of the traces, if updates were profiled."""
    options: Mapping[str, Any] | None = None
    """Options that differ from their default."""
    environment: Mapping[str, Any] | None = None
    """Software, machine and tuning of rank 0."""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of ``--summary``; null for NaN and infinity."""
        content = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if value is not None or name not in MAY_LACK
        }
        return nan_to_null(content)

    @classmethod
    def from_json(cls, content: Any, *, needed: Sequence[str] = ()) -> Self:
        """Return the summary in a JSON object; unknown keys are ignored.

        Args:
            content: result of ``json.loads``.
            needed: keys that must exist and not be null.

        Raises:
            ValueError: naming a key that is missing or has a value of the wrong type.
        """
        summary = typed(cls, content)
        for key in needed:
            if getattr(summary, key) is None:
                raise ValueError(f"there is no {key}")
        return summary

    @classmethod
    def read(cls, path: Path, *, needed: Sequence[str] = ()) -> Self:
        """Read a file of ``--summary``; ``needed`` as in ``from_json``.

        Raises:
            UsageError: naming the file, and a wrong key.
        """
        try:
            return cls.from_json(json.loads(read_regular(path, MAX_BYTES)), needed=needed)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"{path} is not a summary of a training: {reason}") from error


def unit_of(summaries: Iterable[Summary | None]) -> str:
    """Return the common unit of the samples, else ``samples``; a table of images has none."""
    units = {summary.unit or "images" for summary in summaries if summary} or {"images"}
    return units.pop() if len(units) == 1 else "samples"


def nan_to_null(value: Any) -> Any:
    """Return ``value`` with NaN and infinity, which JSON lacks, replaced by None, recursively."""
    if isinstance(value, Mapping):
        return {name: nan_to_null(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def typed(kind: type[Kind], value: Any) -> Kind:
    """Return a JSON value as ``kind``, a dataclass; unknown keys are ignored.

    Raises:
        ValueError: naming the key that is missing, or whose value is of another type.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text, _, key = str(error).partition(" - at `$.")
        text = text[0].lower() + text[1:]
        raise ValueError(f"{key.rstrip('`')}: {text}" if key else text) from error
