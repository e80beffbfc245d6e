"""A scaling study as text for people."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from hvdtrain.measure.predict import Forecast
from hvdtrain.measure.problem import UNKNOWN_ERROR
from hvdtrain.measure.records import SPLIT, STRONG
from hvdtrain.measure.study import LeftOut, Size, Study
from hvdtrain.timeline.units import duration, size, table

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Header and rows."""

WIDTH = 100
LIMITS = {
    "latency": "latency",
    "bandwidth": "bandwidth",
    "fixed": "computing that more ranks do not shrink",
    "": "computing",
}


def study_text(study: Study) -> str:
    """The whole report."""
    sections = [
        textwrap.fill(title(study), WIDTH),
        table(*size_table(study.sizes)),
        table(*split) if (split := step_table(study.sizes)) else "",
        textwrap.fill(notes(study), WIDTH),
        *forecast(study),
    ]
    return "\n\n".join(section for section in sections if section)


def title(study: Study) -> str:
    """What was measured, in a line; in parts that are known."""
    first = study.runs[0]
    told = first.summary
    what = " ".join(str(told[key]) for key in ("workload", "model") if told.get(key))
    how = " over ".join(str(told[key]) for key in ("framework", "strategy") if told.get(key))
    batch = first.batch if study.scaling == STRONG or not first.batch else first.batch / first.ranks
    whose = "of all ranks" if study.scaling == STRONG else "of a rank"
    repeats = max(size.point.rate.count for size in study.sizes)
    threads = f", {first.threads} thread{_s(first.threads)} a rank" if first.threads else ""
    parts = [
        what,
        how,
        str(told.get("precision") or ""),
        f"{study.scaling} scaling" + (f", batch {batch:g} {whose}" if batch else ""),
        f"{repeats} run{_s(repeats)} a size",
        f"{first.machine}{threads}",
    ]
    return "; ".join(part for part in parts if part)


def size_table(sizes: Sequence[Size]) -> Table:
    """Throughput: a row for each number of ranks."""
    return _known(
        {
            "ranks": [f"{one.ranks}{'*' if one.crowded else ''}" for one in sizes],
            "hosts": [str(one.hosts or "-") for one in sizes],
            "images/s": [number(one.point.rate.mean) for one in sizes],
            "±": [_or_dash(one.point.rate.deviation, number) for one in sizes],
            "95 % interval": [_interval(one.point.rate.interval, number) for one in sizes],
            "speed-up": [f"{one.point.speedup:.2f}" for one in sizes],
            "efficiency": [percent(one.point.efficiency) for one in sizes],
            "95 %": [_interval(one.point.interval, lambda x: f"{100 * x:.1f}") for one in sizes],
        }
    )


def step_table(sizes: Sequence[Size]) -> Table | None:
    """Where a step goes: a row for each number of ranks; None where that is not known."""
    if not any(one.split for one in sizes):
        return None
    return _known(
        {
            "ranks": [f"{one.ranks}{'*' if one.crowded else ''}" for one in sizes],
            "a step": [_or_dash(one.seconds, duration) for one in sizes],
            **{part: [_or_dash(one.split.get(part), duration) for one in sizes] for part in SPLIT},
            "last to come": [_slowest(one.slowest) for one in sizes],
        }
    )


def _known(columns: dict[str, list[str]]) -> Table:
    """The table less the columns of which nothing is known."""
    known = {name: cells for name, cells in columns.items() if set(cells) != {"-"}}
    return list(known), list(zip(*known.values(), strict=True))


def _slowest(value: tuple[int, float] | None) -> str:
    return "-" if value is None else f"rank {value[0]} in {100 * value[1]:.0f} %"


def _or_dash(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)


def _interval(value: tuple[float, float] | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else " to ".join(map(show, value))


def number(value: float) -> str:
    """Images per second, with as many digits as count."""
    return f"{value:,.{0 if abs(value) >= 10_000 else 1 if abs(value) >= 1000 else 2}f}"


def percent(value: float) -> str:
    """Such as ``61.3 %``."""
    return f"{100 * value:.1f} %"


def notes(study: Study) -> str:
    """What a reader of the table must know."""
    found = []
    base = study.sizes[0].ranks
    if base > 1:
        found.append(f"Speed-up and efficiency are relative to {base} ranks, the fewest measured.")
    if any(one.crowded for one in study.sizes):
        found.append(
            "* more threads than cores: these ranks shared cores, so their efficiency says nothing "
            "about more hardware. They are left out of the prediction."
        )
    if all(one.point.rate.deviation is None for one in study.sizes):
        found.append(
            "Each size ran once, so the errors are not known (--repeat 3 tells them); the "
            f"prediction assumes {100 * UNKNOWN_ERROR:.0f} %."
        )
    if any(one.split for one in study.sizes):
        found.append(
            "A step is the sum of its parts: data (waiting for the next batch), compute (all that "
            "is not one of the others), communication (waiting for sums of gradients once the own "
            "ones are there, as long as the last rank to arrive waits) and waiting (what the other "
            "ranks wait longer, for the last one); means over ranks, steps and runs."
        )
    if any("undivided" in one.split for one in study.sizes):
        found.append("undivided: compute, communication and waiting, not told apart here.")
    return " ".join(found)


def forecast(study: Study) -> list[str]:
    """The prediction: what was fitted, what it expects, what would help."""
    sections = [textwrap.fill(fit_text(study), WIDTH)]
    if study.left_out:
        sections.append(left_out_text(study.left_out))
    if study.predictions:
        expected, changed = table(*prediction_table(study)), table(*remedy_table(study))
        sections += [
            f"Efficiency to expect, with the shares of a step:\n{expected}",
            f"{limit_text(study)} Efficiency after a change:\n{changed}",
            "\n".join(f"  {one.name:<21} {one.what}" for one in study.remedies),
        ]
    return sections


def left_out_text(left: LeftOut) -> str:
    """A measured size held against the fit that has not seen it."""
    low, middle, high = left.predicted.low, left.predicted.middle, left.predicted.high
    return (
        f"Left out of the fit: {left.ranks} ranks, {number(middle)} images/s predicted "
        f"({number(low)} to {number(high)}), {number(left.measured)} measured: "
        f"{100 * (middle / left.measured - 1):+.1f} %"
    )


def limit_text(study: Study) -> str:
    """What limits the largest size that is foretold."""
    last = study.predictions[-1]
    return f"At {last.ranks} ranks {LIMITS[last.limit]} limits it."


def prediction_table(study: Study) -> Table:
    """What the fit expects, size by size."""
    header = ["ranks", "efficiency", "95 %", "compute", "latency", "bandwidth", "limited by"]
    rows = []
    for one in study.predictions:
        shares = (one.parts.compute, one.parts.latency, one.parts.transfer)
        rows.append(
            [
                str(one.ranks),
                percent(one.efficiency.middle),
                _span(one.efficiency),
                *(f"{100 * share / one.parts.total:.0f} %" for share in shares),
                LIMITS[one.limit],
            ]
        )
    return header, rows


def remedy_table(study: Study) -> Table:
    """What could be changed, and the efficiency then."""
    header = ["change", *(f"at {ranks}" for ranks in study.remedies_at)]
    now = [e for ranks in study.remedies_at for e in study.predictions if e.ranks == ranks]
    rows = [["as it is", *(percent(one.efficiency.middle) for one in now)]]
    for one in study.remedies:
        rows.append([one.name, *(percent(expected.middle) for expected in one.efficiencies)])
    return header, rows


def _span(value: Forecast) -> str:
    return f"{100 * value.low:.1f} to {100 * value.high:.1f}"


def fit_text(study: Study) -> str:
    """What was fitted, and what to keep in mind about it."""
    if study.fit is None:
        return f"No prediction: {study.why_no_fit}."
    fit, costs = study.fit, study.fit.best.costs
    laws = " or ".join(f"{one.law.name} ({100 * one.weight:.0f} %)" for one in fit.candidates)
    known = study.runs[0].batch is not None
    words = [
        f"Prediction, for an allreduce by {laws}: computing takes {duration(costs.compute)} "
        f"{'a step' if known else 'an image'}"
    ]
    if study.traffic:
        messages, nbytes = study.traffic.messages, study.traffic.nbytes
        words.append(
            f"a step sums {size(nbytes)} in {messages} message{_s(messages)}, "
            f"{duration(costs.latency / messages)} a hop and message, "
            f"{nbytes / costs.transfer / 1e9:.2g} GB/s"
        )
    else:
        words.append(
            f"latency {duration(costs.latency)} a hop, sending the gradients once "
            f"{duration(costs.transfer)}"
        )
    words.append(
        f"{percent(costs.overlap)} of the reduction is hidden behind computing"
        if costs.overlap
        else "latency and bandwidth are what computing does not hide"
    )
    text = "; ".join(words) + "."
    if fit.misfit > 1:
        text += f" The points scatter {fit.misfit:.1f} times as much as their errors allow."
    if fit.base != study.sizes[0].ranks:
        text += f" Efficiency is relative to {fit.base} ranks, the fewest that were fitted."
    if all(one.hosts == 1 for one in study.sizes):
        text += " All was measured on one host: no network between hosts is in it."
    return text


def _s(count: int | None) -> str:
    return "" if count == 1 else "s"
