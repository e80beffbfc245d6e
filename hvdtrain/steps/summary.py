"""The result of a training: what the loop writes to ``--summary`` and the commands read again.

A field is None where it is not known: no evaluation, or a file of another version. The contract of
the keys stands in docs/training.md.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from hvdtrain.errors import UsageError
from hvdtrain.system.files import read_regular

MOST = 2**20  # bytes of a file; a summary is far smaller
LARGEST = 2**63  # of whole numbers: a larger one is no measurement, and too large for a float
# Keys that most runs do not have.
MAY_LACK = ("bubble", "joules_per_image", "steps_skipped", "rollbacks")
SHOWN = 40  # characters of a wrong value


class Stopped(StrEnum):
    """Why a training stopped."""

    FINISHED = "finished"
    STEPS = "steps"
    PREEMPTED = "preempted"
    DIVERGED = "diverged"


@dataclass(frozen=True)
class StepSplit:
    """Seconds of the mean step by part, as ``training/throughput.py`` divides it."""

    steps: int | None = None  # how many it is the mean of
    data: float | None = None
    compute: float | None = None
    communication: float | None = None
    waiting: float | None = None
    undivided: float | None = None  # compute, communication and waiting, where not told apart
    slowest_rank: int | None = None  # the rank that came last most often
    slowest_share: float | None = None  # in what share of the steps


@dataclass(frozen=True)
class GradientMessages:
    """The messages in which the gradients of one step are summed."""

    count: int
    bytes: int


@dataclass(frozen=True)
class Bubble:
    """The share of a step in which a stage of a pipeline waits for the others."""

    stages: int
    micro_batches: int  # of a pass, at most
    formula: float  # (stages - 1) / (micro_batches + stages - 1)
    measured: float | None = None  # in the mean step, over all ranks


@dataclass(frozen=True)
class Summary:
    """One training run; throughput and seconds are of this process, counts include resumed runs."""

    workload: str | None = None
    framework: str | None = None
    strategy: str | None = None
    model: str | None = None
    world_size: int | None = None
    devices: int | None = None
    """Over all ranks; more than ranks with ``data-parallel`` alone."""
    hosts: int | None = None
    precision: str | None = None
    compression: str | None = None
    reduction: str | None = None
    global_batch_size: int | None = None
    epochs_completed: int | None = None
    steps_completed: int | None = None
    samples_trained: int | None = None
    training_samples: int | None = None
    """Of an epoch."""
    unit: str | None = None
    """What the samples are, in the plural: ``images``."""
    train_loss: float | None = None
    eval_loss: float | None = None
    eval_accuracy: float | None = None
    """A fraction."""
    eval_metrics: Mapping[str, float | None] | None = None
    """What the task measures besides the loss, by name."""
    eval_samples: int | None = None
    images_per_second_mean: float | None = None
    """Over all ranks, after the first min(5, steps // 5) steps."""
    images_per_second_std: float | None = None
    """Over those steps."""
    step_seconds_median: float | None = None
    """Of those steps."""
    seconds_total: float | None = None
    seconds_to_first_step: float | None = None
    step_split: StepSplit | None = None
    bubble: Bubble | None = None
    """Of a pipeline."""
    gradient_messages: GradientMessages | None = None
    peak_memory_bytes: int | None = None
    """Of the rank that took most: on its GPU, else resident."""
    utilisation_mean: float | None = None
    """Of the cores of a rank, or of its GPU, a fraction; over the ranks."""
    utilisation_lowest: float | None = None
    joules_per_image: float | None = None
    """Energy of all GPUs since they were pinned; None where it is not known."""
    parameter_norm: float | None = None
    steps_skipped: int | None = None
    """Updates that ``--on-nan skip`` left out; None where there was none."""
    rollbacks: int | None = None
    """Of ``--on-nan rollback``; None where there was none."""
    stopped: Stopped | None = None
    checkpoint: str | None = None
    timeline: str | None = None
    options: Mapping[str, Any] | None = None
    """Those that were not at their default."""
    environment: Mapping[str, Any] | None = None
    """Software, machine and tuning of rank 0."""

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--summary`` writes; null for nan and infinity."""
        content = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if value is not None or name not in MAY_LACK
        }
        return nan_to_null(content)

    @classmethod
    def from_json(cls, content: Any, *, needed: Sequence[str] = ()) -> Self:
        """Return the summary that a JSON object holds; keys that it does not know are left out.

        Args:
            content: what ``json.loads`` returned.
            needed: keys that must be there, and not null.

        Raises:
            ValueError: naming the key that is missing, or whose value is of another type.
        """
        if not isinstance(content, dict):
            raise ValueError("no JSON object, so no summary of a training")
        summary: Self = typed(cls, content, "")
        for key in needed:
            if getattr(summary, key) is None:
                raise ValueError(f"there is no {key}")
        return summary

    @classmethod
    def read(cls, path: Path, *, needed: Sequence[str] = ()) -> Self:
        """Read a file of ``--summary``; for ``needed`` see ``from_json``.

        Raises:
            UsageError: naming the file, and the key if it is one.
        """
        try:
            return cls.from_json(json.loads(read_regular(path, MOST)), needed=needed)
        except (OSError, ValueError, RecursionError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"{path} is no summary of a training: {why}") from error


def unit_of(summaries: Iterable[Summary | None]) -> str:
    """Return what the samples of trainings are, in the plural; older files do not say it."""
    units = {one.unit or "images" for one in summaries if one} or {"images"}
    return units.pop() if len(units) == 1 else "samples"


def nan_to_null(value: Any) -> Any:
    """Return ``value`` with None for nan and infinity, which JSON does not have, however deep."""
    if isinstance(value, Mapping):
        return {name: nan_to_null(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def typed(kind: Any, value: Any, key: str = "") -> Any:
    """Return a JSON value as the type ``kind``; ``key`` is its name, for the errors.

    Raises:
        ValueError: it is of another type, or has too little in it.
    """
    if typing.get_origin(kind) is types.UnionType:  # X | None
        return None if value is None else typed(typing.get_args(kind)[0], value, key)
    if kind in (int, float):
        # A float may have been written as a whole number; true and false are numbers to Python.
        whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST
        if not (whole or (kind is float and isinstance(value, float))):
            raise ValueError(f"{key} is {_shown(value)}, no {'whole ' * (kind is int)}number")
        return value
    if kind is str and not isinstance(value, str):
        raise ValueError(f"{key} is {_shown(value)}, no text")
    if kind is Stopped:
        if value not in list(Stopped):
            raise ValueError(f"{key} is {_shown(value)}, none of {', '.join(Stopped)}")
        return Stopped(value)
    if kind in (str, Any):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"{key} is {_shown(value)}, no object")
    if dataclasses.is_dataclass(kind):
        hints, start = typing.get_type_hints(kind), f"{key}." if key else ""
        fields = {
            name: typed(hint, value[name], start + name)
            for name, hint in hints.items()
            if name in value
        }
        required = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]
        for name in required:
            if name not in fields:
                raise ValueError(f"{key} has no {name}")
        return kind(**fields)  # type: ignore[operator]  # a class, not an instance
    entry = typing.get_args(kind)[1]
    return {name: typed(entry, one, f"{key}.{name}") for name, one in value.items()}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
