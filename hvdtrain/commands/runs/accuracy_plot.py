"""Draw the evaluations of trainings, over epochs or over seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.commands.runs.target import Evaluation, Target
from hvdtrain.system.output import plots

Line = tuple[str, Sequence[Evaluation]]  # the label of a run, and its evaluations
OVER: dict[str, Callable[[Evaluation], float]] = {
    "epochs": lambda evaluation: evaluation.epochs,
    "seconds": lambda evaluation: evaluation.seconds,
}


def draw(axes: Any, lines: Sequence[Line], target: Target, over: str) -> None:
    """Draw a line per run, and the target as a horizontal line, over ``epochs`` or ``seconds``."""
    axes.axhline(target.value, color=plots.GREY, linestyle="--", linewidth=1)
    for number, (name, evaluations) in enumerate(lines):
        x = [OVER[over](evaluation) for evaluation in evaluations]
        y = [evaluation.value for evaluation in evaluations]
        axes.plot(x, y, label=name, **plots.series(number))
    axes.set_xlim(left=0)
    axes.set_xlabel(over)
    axes.set_ylabel(f"{target.metric} (dashed: {target.value:g})")
    axes.legend(fontsize="small")
