"""Draw what the evaluations of trainings gave: over epochs, and over seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.commands.runs.target import Evaluation, Target
from hvdtrain.system.output import plots

Line = tuple[str, Sequence[Evaluation]]  # a run, as the legend calls it
OVER: dict[str, Callable[[Evaluation], float]] = {
    "epochs": lambda one: one.epochs,
    "seconds": lambda one: one.seconds,
}


def draw(axes: Any, lines: Sequence[Line], target: Target, over: str) -> None:
    """Draw a line per run, and the target as a level; ``over`` is ``epochs`` or ``seconds``."""
    axes.axhline(target.value, color=plots.GREY, linestyle="--", linewidth=1)
    for number, (name, found) in enumerate(lines):
        places = [OVER[over](one) for one in found]
        values = [one.value for one in found]
        axes.plot(places, values, label=name, **plots.series(number))
    axes.set_xlim(left=0)
    axes.set_xlabel(over)
    axes.set_ylabel(f"{target.metric} (dashed: {target.value:g})")
    axes.legend(fontsize="small")
