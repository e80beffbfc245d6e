"""The plot of a scaling study: throughput with the ideal line, efficiency, parts of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib import ticker

from hvdtrain.measure import plots
from hvdtrain.measure.efficiency import Point
from hvdtrain.measure.predict import efficiency_at
from hvdtrain.measure.records import SPLIT
from hvdtrain.measure.sizes import Size
from hvdtrain.measure.study import Study
from hvdtrain.measure.text import title

HATCHES = ("xxxx", "", "////", "....", "\\\\")  # legible in grey
SHADE = "#DDDDDD"
TICKS = 5  # ranks that an axis names


def draw(study: Study, stem: Path) -> list[Path]:
    """Write the plot as PDF and PNG; the files."""
    plots.style()
    return plots.save(make(study), stem)


def make(study: Study) -> Any:
    """The plot, a matplotlib figure."""
    panels = _panels(study)
    figure, axes = plt.subplots(1, len(panels), figsize=(3.3 * len(panels), 3.8))
    for one, draw_panel in zip(axes, panels.values(), strict=True):
        draw_panel(one)
    figure.suptitle(title(study).replace("; ", ", "), fontsize="small", wrap=True)
    return figure


def apart(study: Study) -> Iterator[tuple[str, Any]]:
    """Give each panel of the plot as a figure of its own, with its title."""
    for name, draw_panel in _panels(study).items():
        figure, axes = plt.subplots(figsize=(5.2, 3.6))
        draw_panel(axes)
        yield name, figure


def _panels(study: Study) -> dict[str, Callable[[Any], None]]:
    """What draws each panel into its axes, by title."""
    panels: dict[str, Callable[[Any], None]] = {
        "Throughput": partial(_throughput, study),
        "Efficiency": partial(_efficiency, study),
    }
    if split := [size for size in study.sizes if size.split]:
        panels["Parts of a step"] = partial(_steps, split)
    return panels


def _legend(axes: Any, columns: int = 2) -> None:
    """Above the plot, where it covers nothing."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        fontsize="small",
        columnspacing=1,
        borderaxespad=0.2,
    )


def _throughput(study: Study, axes: Any) -> None:
    points = [size.point for size in study.sizes]
    base = points[0]
    ends = [base.ranks, points[-1].ranks]
    ideal = [base.rate.mean * ranks / base.ranks for ranks in ends]
    axes.plot(ends, ideal, color=plots.GREY, linestyle="--", linewidth=1, label="ideal")
    rates = [point.rate.mean for point in points]
    bounds = [point.rate.interval for point in points]
    axes.errorbar(
        [point.ranks for point in points],
        rates,
        yerr=_bars(rates, bounds),
        color="C0",
        marker="o",
        capsize=3,
        label="measured" + (", 95 %" if any(bounds) else ""),
    )
    _mark_crowded(axes, study, lambda point: point.rate.mean)
    _ranks_axis(axes, [point.ranks for point in points])
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.minorticks_off()
    axes.set_ylabel("throughput, images/s")
    _legend(axes)


def _efficiency(study: Study, axes: Any) -> None:
    points = [size.point for size in study.sizes]
    axes.axhline(100, color=plots.GREY, linestyle="--", linewidth=1)
    values = [100 * point.efficiency for point in points]
    bounds = [_percent(point) for point in points]
    axes.errorbar(
        [point.ranks for point in points],
        values,
        yerr=_bars(values, bounds),
        color="C0",
        marker="o",
        capsize=3,
        label="measured",
    )
    _mark_crowded(axes, study, lambda point: 100 * point.efficiency)
    ranks = [point.ranks for point in points] + [one.ranks for one in study.shown]
    if study.fit:
        fit, start = study.fit, study.fit.base
        if fit.best.costs.slowdown:  # fitted at the last size, so it holds from there on
            start = max(size.ranks for size in study.sizes if not size.crowded)
        seen = sorted({fit.base, *(number for number in ranks if number >= start)})
        expected = [efficiency_at(fit, number) for number in seen]
        low, high = [100 * one.low for one in expected], [100 * one.high for one in expected]
        axes.fill_between(seen, low, high, color=SHADE, linewidth=0, label="model, 95 %")
        middle = [100 * one.middle for one in expected]
        axes.plot(seen, middle, color="C1", linestyle=":", label="model")
    _ranks_axis(axes, ranks)
    axes.set_ylim(0, 5 + max(100, *values))
    axes.set_ylabel(f"efficiency, % of {points[0].ranks} rank{'s' * (points[0].ranks > 1)}")
    _legend(axes)


def _mark_crowded(axes: Any, study: Study, value: Callable[[Point], float]) -> None:
    """Open markers where ranks shared cores: such points tell nothing of the hardware."""
    crowded = [size.point for size in study.sizes if size.crowded]
    if crowded:
        axes.plot(
            [point.ranks for point in crowded],
            [value(point) for point in crowded],
            linestyle="none",
            marker="o",
            markerfacecolor="white",
            markeredgecolor="C0",
            zorder=5,
            label="sharing cores",
        )


def _steps(sizes: Sequence[Size], axes: Any) -> None:
    axes.set_axisbelow(True)  # the grid behind the bars
    places = range(len(sizes))
    bottom = [0.0] * len(sizes)
    for number, part in enumerate(SPLIT):
        if not any(part in size.split for size in sizes):
            continue
        heights = [1000 * size.split.get(part, 0.0) for size in sizes]
        axes.bar(
            places,
            heights,
            0.6,
            bottom=bottom,
            color=f"C{number}",
            hatch=HATCHES[number],
            edgecolor="white",
            linewidth=0.5,
            label=part,
        )
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(places, [str(size.ranks) for size in sizes])
    axes.set_xlabel("ranks")
    axes.set_ylabel("a step, ms")
    _legend(axes)


def _percent(point: Point) -> tuple[float, float] | None:
    return point.interval and (100 * point.interval[0], 100 * point.interval[1])


def _bars(
    values: Sequence[float], bounds: Sequence[tuple[float, float] | None]
) -> list[list[float]] | None:
    """Lengths of the error bars below and above; nothing where none is known."""
    if not any(bounds):
        return None
    pairs = [bound or (value, value) for value, bound in zip(values, bounds, strict=True)]
    below = [value - low for value, (low, _) in zip(values, pairs, strict=True)]
    above = [high - value for value, (_, high) in zip(values, pairs, strict=True)]
    return [below, above]


def _ranks_axis(axes: Any, ranks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    few = sorted(set(ranks))[:: -(-len(ranks) // TICKS)]
    axes.set_xticks(few, [str(number) for number in few])
    axes.minorticks_off()
    axes.set_xlabel("ranks")
