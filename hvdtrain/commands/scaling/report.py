"""Report what the runs of a study say: as text, as data, as a table and as plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.commands.runs.comparable import check_comparable
from hvdtrain.commands.runs.records import SPLIT, STRONG, TABLE, WEAK, Run, table_text
from hvdtrain.commands.runs.target import Target
from hvdtrain.commands.scaling import plot
from hvdtrain.commands.scaling import target as time_to
from hvdtrain.commands.scaling.fit import UNKNOWN_ERROR, read_reductions
from hvdtrain.commands.scaling.model import NOTABLE, Fit, Forecast, Parts
from hvdtrain.commands.scaling.results import RankResult
from hvdtrain.commands.scaling.study import WIDEST, LeftOut, Study, make_study, study_data, title
from hvdtrain.errors import UsageError
from hvdtrain.system.files import replacing
from hvdtrain.system.output.result import Report
from hvdtrain.system.output.tables import Table, entry, known, message, paragraph, table
from hvdtrain.system.output.text import duration, number, plural, size

PLOT = "scaling"  # the stem of its files
ENOUGH = 3  # sizes, from which computing, latency and bandwidth can be told apart
TOO_FEW = (
    f"No prediction from fewer than {ENOUGH} sizes, unless it is asked for: --predict 8,16 adds it."
)
SPREAD = ("±", "95 % interval", "95 %")  # columns that tell of the one before them
LIMITS = {
    "latency": "latency",
    "bandwidth": "bandwidth",
    "slowdown": "slower computing",
    "fixed": "computing that more ranks do not shrink",
    "": "computing",
}


def report(
    runs: Sequence[Run],
    source: Path,
    *,
    scaling: str | None = None,
    folder: Path | None = None,
    tables: Sequence[Path] = (),
    target: Target | None = None,
    **asked: Any,
) -> Report:
    """Evaluate ``runs``, and write table and plots where there is a folder for them.

    Args:
        runs: one or more.
        source: where they come from, for messages.
        scaling: ``weak`` or ``strong``; None: as the runs say, else weak.
        folder: for table and plots; None: nothing is written.
        tables: files with allreduce times.
        target: how good an evaluation has to be, where the time until then is asked for.
        asked: ``ranks`` to predict and the size to ``leave_out``, see ``make_study``.

    Raises:
        UsageError: the runs do not belong together, or a table or the folder cannot be used.
    """
    scaling = scaling or runs[0].scaling or WEAK
    check_comparable(runs, scaling, str(source))
    reductions = read_reductions(tables, runs[0].summary.strategy)
    study = make_study(runs, scaling, reductions=reductions, **asked)
    wanted = any((asked.get("ranks"), asked.get("leave_out"), tables))
    predicted = wanted or sum(not one.oversubscribed for one in study.sizes) >= ENOUGH
    data, lines = study_data(study), [study_text(study, predicted=predicted)]
    if folder is not None:
        data["files"] = [str(file) for file in write(study, folder)]
        if target is not None:
            found = time_to.results(runs, folder, target)
            data["target"] = time_to.data(found, target)
            lines.append(time_to.text(found, target))
            data["files"] += map(str, time_to.draw(found, target, folder))
        lines.append(message("written: " + ", ".join(data["files"])))
    return Report("\n\n".join(lines), data)


def write(study: Study, folder: Path) -> list[Path]:
    """Write table and plots; return the files.

    Raises:
        UsageError: they cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        table = folder / TABLE
        with replacing(table, "--out") as file:
            file.write(table_text(study.runs).encode())
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}") from error
    return [table, *plot.draw(study, folder / PLOT)]


def study_text(study: Study, *, predicted: bool = True) -> str:
    """Return the whole report: the answer, what was measured, and the prediction if wanted."""
    sections = [
        paragraph(answer(study)),
        paragraph(title(study)),
        table(*size_table(study.sizes, study.unit), joined=SPREAD),
        table(*split) if (split := step_table(study.sizes)) else "",
        paragraph(notes(study, predicted=predicted)),
        *(_prediction(study) if predicted or study.fit is None else [paragraph(TOO_FEW)]),
    ]
    return "\n\n".join(section for section in sections if section)


def answer(study: Study) -> str:
    """Return the efficiency of the largest size that has its cores; nothing of one size alone."""
    whole = [one for one in study.sizes if not one.oversubscribed]
    base, last = study.sizes[0], (whole if len(whole) > 1 else study.sizes)[-1]
    if base is last:
        return ""
    return (
        f"Efficiency on {plural(last.ranks, 'rank')}: {100 * last.efficiency:.1f} % "
        f"({last.speedup:.2f} times the {study.unit}/s of {plural(base.ranks, 'rank')})"
    )


def size_table(sizes: Sequence[RankResult], unit: str) -> Table:
    """Return the throughput: a row per number of ranks."""
    return known(
        {
            "ranks": _names(sizes),
            "hosts": [str(one.hosts or "-") for one in sizes],
            f"{unit}/s": [number(one.rate.mean) for one in sizes],
            "±": [_or_dash(one.rate.deviation, number, one.rate.mean) for one in sizes],
            "95 % interval": [_interval(one.rate.interval, number) for one in sizes],
            "speed-up": [f"{one.speedup:.2f}" for one in sizes],
            "efficiency": [f"{100 * one.efficiency:.1f} %" for one in sizes],
            "95 %": [_interval(one.interval, lambda x: f"{100 * x:.1f}") for one in sizes],
        }
    )


def step_table(sizes: Sequence[RankResult]) -> Table | None:
    """Return where a step goes: a row per number of ranks; None where that is not known."""
    if not any(one.split for one in sizes):
        return None
    return known(
        {
            "ranks": _names(sizes),
            "step": [_or_dash(one.seconds, duration) for one in sizes],
            **{part: [_or_dash(one.split.get(part), duration) for one in sizes] for part in SPLIT},
            "slowest rank": [_slowest(one.slowest) for one in sizes],
        }
    )


def _names(sizes: Sequence[RankResult]) -> list[str]:
    return [f"{one.ranks}{'*' * one.oversubscribed}" for one in sizes]


def _slowest(value: tuple[int, float] | None) -> str:
    return "-" if value is None else f"rank {value[0]} in {100 * value[1]:.0f} %"


def _or_dash(value: float | None, show: Callable[..., str], *more: float) -> str:
    return "-" if value is None else show(value, *more)


def _interval(value: tuple[float, float] | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else " to ".join(map(show, value))


def notes(study: Study, *, predicted: bool = True) -> str:
    """Return what a reader of the table must know."""
    found = []
    base = study.sizes[0].ranks
    if base > 1:
        found.append(f"Speed-up and efficiency are relative to {base} ranks, the fewest measured.")
    if any(one.oversubscribed for one in study.sizes):
        found.append(
            "* oversubscribed (more threads than cores): their efficiency says nothing about more "
            f"hardware{', so the prediction leaves them out' * predicted}."
        )
    if all(one.rate.deviation is None for one in study.sizes):
        found.append(
            "Each size ran once, so the errors are not known (--repeat 3 measures them)"
            + f"; the prediction assumes {100 * UNKNOWN_ERROR:.0f} %" * predicted
            + "."
        )
    if any(one.split for one in study.sizes):
        found.append(
            "Parts of a step: data (waiting for the next batch), compute (everything not named "
            "here), communication (in allreduce after all ranks arrived), waiting (for the slowest "
            "rank to arrive); means over ranks, steps and runs."
        )
    if any("undivided" in one.split for one in study.sizes):
        found.append("undivided: compute, communication and waiting together.")
    return " ".join(found)


def _prediction(study: Study) -> list[str]:
    """Return the prediction: what was fitted, what follows from it, what would help."""
    sections = [paragraph(fit_text(study))]
    if study.left_out:
        sections.append(message(left_out_text(study.left_out, study.unit)))
    if study.passed_over:
        sections.append(paragraph(passed_over_text(study)))
    if uncertain := uncertain_text(study):
        sections.append(paragraph(uncertain))
    if study.shown:
        expected, changed = (
            table(*prediction_table(study), joined=SPREAD),
            table(*remedy_table(study)),
        )
        sections += [
            f"Predicted efficiency, with the shares of a step:\n{expected}",
            f"{paragraph(f'{limit_text(study)} Efficiency after a change:')}\n{changed}",
            "\n".join(entry(f"  {one.name:<27} ", one.what) for one in study.remedies),
        ]
    return sections


def left_out_text(left: LeftOut, unit: str) -> str:
    """Return a measured size beside the prediction of the fit that has not seen it."""
    low, middle, high = left.predicted.low, left.predicted.middle, left.predicted.high
    return (
        f"Left out of the fit: {plural(left.ranks, 'rank')}, {number(middle)} {unit}/s predicted "
        f"({number(low)} to {number(high)}), {number(left.measured)} measured: "
        f"{100 * (middle / left.measured - 1):+.1f} %"
    )


def passed_over_text(study: Study) -> str:
    """Return which numbers of ranks are not predicted, and why."""
    ranks = ", ".join(map(str, study.passed_over))
    text = f"Not predicted: {ranks} ranks. The largest size measured has {study.sizes[-1].ranks}"
    if study.scaling == STRONG and (batch := study.runs[0].batch):
        return f"{text}, and more than {batch} would be more ranks than samples."
    return f"{text}; a prediction is for more ranks."


def uncertain_text(study: Study) -> str:
    """Return for which numbers of ranks the points say too little; nothing where for none."""
    shown = study.shown
    left = [str(one.ranks) for one in study.predictions if one not in shown]
    if not left:
        return ""
    return (
        f"Not predicted: {', '.join(left)} ranks. From these sizes the efficiency there is known "
        f"to no better than {100 * WIDEST:.0f} points (95 %); larger sizes, more repeats or "
        "--allreduce narrow it."
    )


def limit_text(study: Study) -> str:
    """Return what limits the largest size that is predicted."""
    last = study.shown[-1]
    return f"At {last.ranks} ranks {LIMITS[last.limit]} is the limit."


def prediction_table(study: Study) -> Table:
    """Return what the fit predicts, size by size."""
    shown = study.shown
    steps = [one.parts for one in shown]
    return known(
        {
            "ranks": [str(one.ranks) for one in shown],
            "efficiency": [_known_digits(one.efficiency) for one in shown],
            "95 %": [_span(one.efficiency) for one in shown],
            "compute": [_share(one.compute, one) for one in steps],
            "slowdown": [_share(one.slowdown, one) for one in steps],
            "latency": [_share(one.latency, one) for one in steps],
            "bandwidth": [_share(one.transfer, one) for one in steps],
            "limited by": [LIMITS[one.limit] for one in shown],
        }
    )


def _share(seconds: float, step: Parts) -> str:
    return f"{100 * seconds / step.total:.0f} %" if seconds else "-"


def remedy_table(study: Study) -> Table:
    """Return what could be changed, and the efficiency then."""
    header = ["change", *(f"at {ranks}" for ranks in study.remedies_at)]
    now = {one.ranks: one.efficiency for one in study.shown}
    changes = [("as it is", [now[ranks] for ranks in study.remedies_at])]
    changes += [(one.name, [*one.efficiencies]) for one in study.remedies]
    return header, [[name, *map(_known_digits, expected)] for name, expected in changes]


def _digits(value: Forecast) -> int:
    """Return the decimals of a per cent: one where the range is no wider than two per cent."""
    return int(value.high - value.low < 0.02)


def _known_digits(value: Forecast) -> str:
    return f"{100 * value.middle:.{_digits(value)}f} %"


def _span(value: Forecast) -> str:
    digits = _digits(value)
    return f"{100 * value.low:.{digits}f} to {100 * value.high:.{digits}f}"


def fit_text(study: Study) -> str:
    """Return what was fitted, and what to keep in mind about it."""
    if study.fit is None:
        return f"No prediction: {study.why_no_fit}."
    fit = study.fit
    laws = " or ".join(f"{one.law.name} ({100 * one.weight:.0f} %)" for one in fit.candidates)
    text = f"Prediction, for an allreduce by {laws}: {'; '.join(_costs(study, fit))}."
    if fit.misfit > 1:
        text += f" The points scatter {fit.misfit:.1f} times as much as their errors allow."
    if fit.base != study.sizes[0].ranks:
        text += (
            f" The smallest size fitted has {fit.base} ranks; the prediction starts from its "
            f"measured efficiency, {100 * fit.at_base:.1f} %."
        )
    if all(one.hosts == 1 for one in study.sizes):
        text += " All runs were on one host: no network between hosts is in it."
    return text


def _costs(study: Study, fit: Fit) -> list[str]:
    """Return the best fit in words."""
    costs, batch = fit.best.costs, study.runs[0].batch
    words = [
        f"computing takes {duration(costs.compute)} per {'step' if batch else study.unit[:-1]}"
    ]
    if costs.slowdown >= NOTABLE:
        words.append(
            f"with other ranks it takes {100 * costs.slowdown:.0f} % longer (they share memory and "
            "caches, and wait for the slowest)"
        )
    if study.traffic:
        messages, nbytes = study.traffic.messages, study.traffic.nbytes
        words += [
            f"a step sums {size(nbytes)} in {plural(messages, 'message')}",
            f"{duration(costs.latency / messages)} per hop and message",
            f"{nbytes / costs.transfer / 1e9:.2g} GB/s",
        ]
    else:
        words += [
            f"latency {duration(costs.latency)} per hop",
            f"sending the gradients once takes {duration(costs.transfer)}",
        ]
    if costs.overlap:
        return [*words, f"{100 * costs.overlap:.0f} % of the reduction is hidden behind computing"]
    return [*words, "latency and bandwidth are effective ones: of what computing does not hide"]
