"""``--target accuracy=0.985``: the seconds until an evaluation first reached the value.

As in MLPerf: from the start of the first update to the end of the evaluation that reached it,
including evaluations. Source: Mattson et al., "MLPerf Training Benchmark", 2020.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvdtrain.commands.runs.curves import TrainingCurves

LOSS = "loss"  # lower is better; for other metrics higher is better, unless specified


class Evaluation(NamedTuple):
    """The result of one evaluation during a training."""

    epochs: int  # completed
    seconds: float  # since the start of the first update
    value: float


@dataclass(frozen=True)
class Target:
    """A metric, by its name in ``eval_NAME``, and the value to reach."""

    metric: str
    value: float
    falls: bool = False  # lower is better

    def __str__(self) -> str:
        return f"{self.metric} {self.value:g}"

    def is_reached(self, value: float) -> bool:
        """Return whether ``value`` is at least as good as the target."""
        return value <= self.value if self.falls else value >= self.value


def read_target(text: str) -> Target:
    """Return the target in ``NAME=VALUE``; with ``NAME<=VALUE`` lower is better.

    Raises:
        argparse.ArgumentTypeError: the text has another form.
    """
    left, _, value = text.partition("=")
    name = left.removesuffix("<").strip().removeprefix("eval_")
    try:
        target = Target(name, float(value), falls=left.endswith("<") or name == LOSS)
    except ValueError:
        target = Target("", 0.0)
    if not target.metric:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=VALUE, e.g. accuracy=0.985, or NAME<=VALUE"
        )
    return target


def evaluations(curves: TrainingCurves, metric: str) -> list[Evaluation]:
    """Return the evaluations that have ``metric`` and their time."""
    key = f"eval_{metric}"
    return [
        Evaluation(int(record["epoch"]) + 1, float(record["elapsed"]), float(record[key]))
        for record in curves.epochs
        if record.get("elapsed") is not None and record.get(key) is not None
    ]


def seconds_to(target: Target, curve: Sequence[Evaluation]) -> float | None:
    """Return the seconds until the target was first reached; None if it was not."""
    return next((point.seconds for point in curve if target.is_reached(point.value)), None)
