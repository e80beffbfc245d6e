"""``--target accuracy=0.985``: the seconds until an evaluation first was that good.

As MLPerf counts it: from the start of the first update, evaluations on the way included, to the end
of the evaluation that reached it. Source: Mattson et al., "MLPerf Training Benchmark", 2020.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvdtrain.commands.runs.course import Course

LOSS = "loss"  # better the lower; every other metric the higher, unless it is said


class Evaluation(NamedTuple):
    """What one evaluation in a training gave."""

    epochs: int  # trained until then
    seconds: float  # since the start of the first update
    value: float


@dataclass(frozen=True)
class Target:
    """A metric, by its name in ``eval_NAME``, and how good it has to be."""

    metric: str
    value: float
    falls: bool = False  # better the lower

    def __str__(self) -> str:
        return f"{self.metric} {self.value:g}"

    def is_reached(self, value: float) -> bool:
        """Whether ``value`` is as good, or better."""
        return value <= self.value if self.falls else value >= self.value


def read_target(text: str) -> Target:
    """Return the target that ``NAME=VALUE`` spells; with ``NAME<=VALUE`` lower is better.

    Raises:
        argparse.ArgumentTypeError: it spells none.
    """
    left, _, value = text.partition("=")
    name = left.removesuffix("<").strip().removeprefix("eval_")
    try:
        target = Target(name, float(value), falls=left.endswith("<") or name == LOSS)
    except ValueError:
        target = Target("", 0.0)
    if not target.metric:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=VALUE, such as accuracy=0.985, or NAME<=VALUE"
        )
    return target


def evaluations(course: Course, metric: str) -> list[Evaluation]:
    """Return the evaluations of a training that know ``metric`` and when they were."""
    return [
        Evaluation(int(one["epoch"]) + 1, float(one["elapsed"]), float(one[f"eval_{metric}"]))
        for one in course.epochs
        if one.get("elapsed") is not None and one.get(f"eval_{metric}") is not None
    ]


def seconds_to(target: Target, found: Sequence[Evaluation]) -> float | None:
    """Return the seconds until the target was first reached; None where it was not."""
    return next((one.seconds for one in found if target.is_reached(one.value)), None)
