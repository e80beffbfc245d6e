"""Draw a scaling study: throughput with the ideal line, efficiency, parts of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from matplotlib import ticker

from hvdtrain.commands.scaling.results import RankResult, Study, title
from hvdtrain.commands.scaling.runs import SPLIT
from hvdtrain.system.output import plots
from hvdtrain.system.output.text import plural

HATCHES = ("xxxx", "", "////", "....", "\\\\")  # legible in grey
SHADE = "#DDDDDD"
TICKS = 5  # labelled ranks on an axis
Bounds = tuple[float, float]


def make_figure(study: Study) -> Any:
    """Return the plot, a matplotlib figure."""
    figure = plots.figure_of(_panels(study), (3.3, 3.8))
    figure.suptitle(title(study).replace("; ", ", "), fontsize="small", wrap=True)
    return figure


def panel_figures(study: Study) -> Iterator[tuple[str, Any]]:
    """Return each panel of the plot as (title, figure)."""
    return plots.figures_of(_panels(study), (5.2, 3.6))


def _panels(study: Study) -> plots.Panels:
    panels = {
        "Throughput": partial(_throughput, study),
        "Efficiency": partial(_efficiency, study),
    }
    if split := [size for size in study.sizes if size.split]:
        panels["Parts of a step"] = partial(_steps, split)
    return panels


def _legend(axes: Any) -> None:
    """Place the legend above the plot, outside the data."""
    style = {"ncols": 2, "fontsize": "small", "columnspacing": 1, "borderaxespad": 0.2}
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), **style)


def _throughput(study: Study, axes: Any) -> None:
    points = study.sizes
    base = points[0]
    ends = [base.ranks, points[-1].ranks]
    ideal = [base.rate.mean * ranks / base.ranks for ranks in ends]
    axes.plot(ends, ideal, color=plots.GREY, linestyle="--", linewidth=1, label="ideal")
    bounds = [point.rate.interval for point in points]
    label = "measured" + (", 95 %" if any(bounds) else "")
    _measured(axes, study, [point.rate.mean for point in points], bounds, label)
    _ranks_axis(axes, [point.ranks for point in points])
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.minorticks_off()
    axes.set_ylabel(f"throughput, {study.unit}/s")
    _legend(axes)


def _efficiency(study: Study, axes: Any) -> None:
    points = study.sizes
    axes.axhline(100, color=plots.GREY, linestyle="--", linewidth=1)
    values = [100 * point.efficiency for point in points]
    bounds = [p.interval and (100 * p.interval[0], 100 * p.interval[1]) for p in points]
    _measured(axes, study, values, bounds, "measured")
    ranks = [point.ranks for point in points] + [prediction.ranks for prediction in study.shown]
    if study.fit:
        fit, start = study.fit, study.fit.base
        if fit.costs.slowdown:  # fitted at the last size, so it is valid from there on
            start = max(size.ranks for size in study.sizes if not size.oversubscribed)
        fitted = sorted({fit.base, *(number for number in ranks if number >= start)})
        expected = [fit.efficiency(number) for number in fitted]
        low, high = [100 * value.low for value in expected], [100 * v.high for v in expected]
        axes.fill_between(fitted, low, high, color=SHADE, linewidth=0, label="model, 95 %")
        middle = [100 * value.middle for value in expected]
        axes.plot(fitted, middle, color="C1", linestyle=":", label="model")
    _ranks_axis(axes, ranks)
    axes.set_ylim(0, 5 + max(100, *values))
    axes.set_ylabel(f"efficiency, % of {plural(points[0].ranks, 'rank')}")
    _legend(axes)


def _measured(
    axes: Any, study: Study, values: Sequence[float], bounds: Sequence[Bounds | None], label: str
) -> None:
    """Draw a value per size, with error bars if known.

    Markers are open if ranks shared cores: such points do not measure the hardware.
    """
    ranks = [size.ranks for size in study.sizes]
    pairs = [bound or (value, value) for value, bound in zip(values, bounds, strict=True)]
    lengths = [(v - low, high - v) for v, (low, high) in zip(values, pairs, strict=True)]
    bars = list(zip(*lengths, strict=True)) if any(bounds) else None  # below and above
    axes.errorbar(ranks, values, yerr=bars, color="C0", marker="o", capsize=3, label=label)
    sizes = zip(study.sizes, values, strict=True)
    shared = [(size.ranks, value) for size, value in sizes if size.oversubscribed]
    if shared:
        style = {"markerfacecolor": "white", "markeredgecolor": "C0", "label": "oversubscribed"}
        axes.plot(*zip(*shared, strict=True), linestyle="none", marker="o", zorder=5, **style)


def _steps(sizes: Sequence[RankResult], axes: Any) -> None:
    axes.set_axisbelow(True)  # the grid behind the bars
    positions = range(len(sizes))
    bottom = [0.0] * len(sizes)
    for number, part in enumerate(SPLIT):
        if not any(part in size.split for size in sizes):
            continue
        heights = [1000 * size.split.get(part, 0.0) for size in sizes]
        style = {"color": f"C{number}", "hatch": HATCHES[number], "edgecolor": "white"}
        axes.bar(positions, heights, 0.6, bottom=bottom, linewidth=0.5, label=part, **style)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(positions, [str(size.ranks) for size in sizes])
    axes.set_xlabel("ranks")
    axes.set_ylabel("step, ms")
    _legend(axes)


def _ranks_axis(axes: Any, ranks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    ticks = sorted(set(ranks))[:: -(-len(ranks) // TICKS)]
    axes.set_xticks(ticks, [str(number) for number in ticks])
    axes.minorticks_off()
    axes.set_xlabel("ranks")
