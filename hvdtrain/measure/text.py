"""A scaling study as text for people."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from hvdtrain.measure.efficiency import Estimate
from hvdtrain.measure.expected import forecast
from hvdtrain.measure.problem import UNKNOWN_ERROR
from hvdtrain.measure.records import SPLIT, STRONG
from hvdtrain.measure.sizes import Size
from hvdtrain.measure.study import Study
from hvdtrain.measure.tables import WIDTH, Table, known, number, percent
from hvdtrain.timeline.units import duration, table


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
    whose = "of all ranks" if study.scaling == STRONG else "per rank"
    repeats = max(size.point.rate.count for size in study.sizes)
    threads = f", {first.threads} thread{_s(first.threads)} per rank" if first.threads else ""
    parts = [
        what,
        how,
        str(told.get("precision") or ""),
        f"{study.scaling} scaling" + (f", batch {batch:g} {whose}" if batch else ""),
        f"{repeats} run{_s(repeats)} per size",
        f"{first.machine}{threads}",
    ]
    return "; ".join(part for part in parts if part)


def size_table(sizes: Sequence[Size]) -> Table:
    """Throughput: a row for each number of ranks."""
    return known(
        {
            "ranks": [f"{one.ranks}{'*' if one.crowded else ''}" for one in sizes],
            "hosts": [str(one.hosts or "-") for one in sizes],
            "images/s": [number(one.point.rate.mean) for one in sizes],
            "±": [_deviation(one.point.rate) for one in sizes],
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
    return known(
        {
            "ranks": [f"{one.ranks}{'*' if one.crowded else ''}" for one in sizes],
            "a step": [_or_dash(one.seconds, duration) for one in sizes],
            **{part: [_or_dash(one.split.get(part), duration) for one in sizes] for part in SPLIT},
            "slowest rank": [_slowest(one.slowest) for one in sizes],
        }
    )


def _deviation(rate: Estimate) -> str:
    return "-" if rate.deviation is None else number(rate.deviation, rate.mean)


def _slowest(value: tuple[int, float] | None) -> str:
    return "-" if value is None else f"rank {value[0]} in {100 * value[1]:.0f} %"


def _or_dash(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)


def _interval(value: tuple[float, float] | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else " to ".join(map(show, value))


def notes(study: Study) -> str:
    """What a reader of the table must know."""
    found = []
    base = study.sizes[0].ranks
    if base > 1:
        found.append(f"Speed-up and efficiency are relative to {base} ranks, the fewest measured.")
    if any(one.crowded for one in study.sizes):
        found.append(
            "* oversubscribed (more threads than cores): their efficiency says nothing about more "
            "hardware, so the prediction leaves them out."
        )
    if all(one.point.rate.deviation is None for one in study.sizes):
        found.append(
            "Each size ran once, so the errors are not known (--repeat 3 measures them); the "
            f"prediction assumes {100 * UNKNOWN_ERROR:.0f} %."
        )
    if any(one.split for one in study.sizes):
        found.append(
            "Parts of a step: data (waiting for the next batch), compute (everything not named "
            "here), communication (in allreduce after all ranks arrived), waiting (for the slowest "
            "rank to arrive); means over ranks, steps and runs."
        )
    if any("undivided" in one.split for one in study.sizes):
        found.append("undivided: compute, communication and waiting, not told apart here.")
    return " ".join(found)


def _s(count: int | None) -> str:
    return "" if count == 1 else "s"
