"""Draw a comparison: throughput as bars, and memory against speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.commands.compare.methods import Method
from hvdtrain.commands.compare.table import MethodResult
from hvdtrain.commands.study.curves import Evaluation, Target, draw_evaluations
from hvdtrain.system.output import plots
from hvdtrain.system.output.text import printable

WIDTH = 5.4  # of a panel, inches
BAR = 0.34  # height of a row of bars, inches
MARKER = 60  # area, points squared
GIB = 2**30
SERIES = len(plots.COLOURS)


def draw(
    rows: Sequence[MethodResult],
    stem: Path,
    lines: Sequence[tuple[str, Sequence[Evaluation]]] = (),
    target: Target | None = None,
    unit: str = "images",
) -> list[Path]:
    """Write the plot as PDF and PNG; return the files, none if there is nothing to draw.

    Args:
        rows: the rows of the table.
        stem: the path without suffix.
        lines: the evaluations of each method, drawn over seconds.
        target: the metric value to reach.
        unit: unit of the samples, in the plural.
    """
    panels = _panels(rows, unit)
    if not panels:
        return []
    if target and (timed := [line for line in lines if line[1]]):
        panels[f"Time to {target}"] = partial(
            draw_evaluations, lines=timed, target=target, over="seconds"
        )
    figure = plots.figure_of(panels, (WIDTH, 1.6 + _bars(rows)))
    for axes, title in zip(figure.axes, panels, strict=True):
        axes.set_title(title, loc="left")
    return plots.save(figure, stem)


def panel_figures(rows: Sequence[MethodResult], unit: str = "images") -> Iterator[tuple[str, Any]]:
    """Return each panel as (title, figure); the caller closes the figures."""
    return plots.figures_of(_panels(rows, unit), (WIDTH, 1.4 + _bars(rows)))


def _panels(rows: Sequence[MethodResult], unit: str) -> dict[str, Callable[[Any], None]]:
    speed = [row for row in rows if row.images_per_second]
    memory = [row for row in speed if row.peak_memory_bytes]
    panels = {"Throughput": (_throughput, speed), "Memory and speed": (_memory, memory)}
    return {
        name: partial(draw_panel, rows=panel_rows, unit=unit)
        for name, (draw_panel, panel_rows) in panels.items()
        if panel_rows
    }


def _bars(rows: Sequence[MethodResult]) -> float:
    """Return the height of the rows of bars, in inches."""
    return BAR * max(6, sum(bool(row.images_per_second) for row in rows))


def names(rows: Sequence[MethodResult] | Sequence[Method]) -> list[str]:
    """Return the names of the rows, with framework and precision if these differ."""
    labels = []
    several = [len({getattr(row, key) for row in rows}) > 1 for key in ("framework", "precision")]
    for row in rows:
        kinds = zip((row.framework, row.precision or ""), several, strict=True)
        words = [row.label, *(kind for kind, differs in kinds if differs)]
        labels.append(printable(" ".join(words)))  # matplotlib draws no other text
    return labels


def _throughput(axes: Any, rows: Sequence[MethodResult], unit: str) -> None:
    kinds = list(dict.fromkeys((row.framework, row.precision) for row in rows))  # a colour for each
    rates = [row.images_per_second or 0.0 for row in rows]
    pairs = list(zip(rates, rows, strict=True))
    low = [rate - (row.images_per_second_lowest or rate) for rate, row in pairs]
    high = [(row.images_per_second_highest or rate) - rate for rate, row in pairs]
    positions = range(len(rows))
    colours = [plots.COLOURS[kinds.index((row.framework, row.precision)) % SERIES] for row in rows]
    bars = (low, high) if any(row.repeats > 1 for row in rows) else None
    axes.set_axisbelow(True)
    axes.barh(positions, rates, 0.7, xerr=bars, color=colours, ecolor=plots.GREY, capsize=2)
    for position, (rate, above, row) in enumerate(zip(rates, high, rows, strict=True)):
        text = "" if row.speedup is None else f" {row.speedup:.2f} x"
        axes.annotate(text, (rate + above, position), va="center", fontsize="small")
    axes.set_yticks(positions, names(rows))
    axes.invert_yaxis()  # as in the table
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.14)
    axes.set_xlim(left=0)
    compared = any(row.speedup is not None for row in rows)
    axes.set_xlabel(f"{unit}/s" + ("; speed-up over one process" if compared else ""))


def _memory(axes: Any, rows: Sequence[MethodResult], unit: str) -> None:
    points = [(row.images_per_second or 0.0, (row.peak_memory_bytes or 0) / GIB) for row in rows]
    for number, (point, name) in enumerate(zip(points, names(rows), strict=True)):
        marker = plots.MARKERS[(number + number // SERIES) % SERIES]  # as the colours repeat
        style = {"color": plots.COLOURS[number % SERIES], "marker": marker}
        axes.scatter(*point, s=MARKER, label=name, zorder=3, **style)
    right, top = (1.1 * max(values) for values in zip(*points, strict=True))
    axes.set_xlim(0, right)
    axes.set_ylim(0, top)
    axes.set_xlabel(f"{unit}/s")
    axes.set_ylabel("peak memory of a rank, GiB")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
