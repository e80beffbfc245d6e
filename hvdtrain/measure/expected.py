"""What a scaling study expects at more ranks, as text for people."""

from __future__ import annotations

import textwrap

from hvdtrain.measure.cost import Parts
from hvdtrain.measure.fit import Fit
from hvdtrain.measure.predict import NOTABLE, Forecast
from hvdtrain.measure.records import STRONG
from hvdtrain.measure.study import WIDEST, LeftOut, Study
from hvdtrain.measure.tables import WIDTH, Table, known, number, percent
from hvdtrain.timeline.units import duration, size, table

LIMITS = {
    "latency": "latency",
    "bandwidth": "bandwidth",
    "slowdown": "slower computing",
    "fixed": "computing that more ranks do not shrink",
    "": "computing",
}


def forecast(study: Study) -> list[str]:
    """The prediction: what was fitted, what it expects, what would help."""
    sections = [textwrap.fill(fit_text(study), WIDTH)]
    if study.left_out:
        sections.append(left_out_text(study.left_out))
    if study.passed_over:
        sections.append(textwrap.fill(passed_over_text(study), WIDTH))
    if uncertain := uncertain_text(study):
        sections.append(textwrap.fill(uncertain, WIDTH))
    if study.shown:
        expected, changed = table(*prediction_table(study)), table(*remedy_table(study))
        sections += [
            f"Predicted efficiency, with the shares of a step:\n{expected}",
            f"{limit_text(study)} Efficiency after a change:\n{changed}",
            "\n".join(f"  {one.name:<27} {one.what}" for one in study.remedies),
        ]
    return sections


def left_out_text(left: LeftOut) -> str:
    """A measured size held against the fit that has not seen it."""
    low, middle, high = left.predicted.low, left.predicted.middle, left.predicted.high
    ranks = f"{left.ranks} rank{'s' * (left.ranks > 1)}"
    return (
        f"Left out of the fit: {ranks}, {number(middle)} images/s predicted "
        f"({number(low)} to {number(high)}), {number(left.measured)} measured: "
        f"{100 * (middle / left.measured - 1):+.1f} %"
    )


def passed_over_text(study: Study) -> str:
    """Which numbers of ranks are not predicted, and why."""
    ranks = ", ".join(map(str, study.passed_over))
    text = f"Not predicted: {ranks} ranks. The largest size measured has {study.sizes[-1].ranks}"
    if study.scaling == STRONG and (batch := study.runs[0].batch):
        return f"{text}, and more than {batch} would be more ranks than samples."
    return f"{text}; a prediction is for more ranks."


def uncertain_text(study: Study) -> str:
    """Of which numbers of ranks the measured points say too little; nothing where of none."""
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
    """What limits the largest size that is foretold."""
    last = study.shown[-1]
    return f"At {last.ranks} ranks {LIMITS[last.limit]} is the limit."


def prediction_table(study: Study) -> Table:
    """What the fit expects, size by size."""
    shown = {"compute": "compute", "slowdown": "slowdown", "latency": "latency"}
    shown |= {"bandwidth": "transfer"}
    predicted = study.shown
    return known(
        {
            "ranks": [str(one.ranks) for one in predicted],
            "efficiency": [_known_digits(one.efficiency) for one in predicted],
            "95 %": [_span(one.efficiency) for one in predicted],
            **{name: [_share(one.parts, key) for one in predicted] for name, key in shown.items()},
            "limited by": [LIMITS[one.limit] for one in predicted],
        }
    )


def _share(parts: Parts, name: str) -> str:
    share = getattr(parts, name) / parts.total
    return f"{100 * share:.0f} %" if share else "-"


def remedy_table(study: Study) -> Table:
    """What could be changed, and the efficiency then."""
    header = ["change", *(f"at {ranks}" for ranks in study.remedies_at)]
    now = [e for ranks in study.remedies_at for e in study.shown if e.ranks == ranks]
    rows = [["as it is", *(_known_digits(one.efficiency) for one in now)]]
    for one in study.remedies:
        rows.append([one.name, *(_known_digits(expected) for expected in one.efficiencies)])
    return header, rows


def _digits(value: Forecast) -> int:
    """A decimal of a per cent only where the range is no wider than two of them."""
    return int(value.high - value.low < 0.02)


def _known_digits(value: Forecast) -> str:
    return f"{100 * value.middle:.{_digits(value)}f} %"


def _span(value: Forecast) -> str:
    digits = _digits(value)
    return f"{100 * value.low:.{digits}f} to {100 * value.high:.{digits}f}"


def fit_text(study: Study) -> str:
    """What was fitted, and what to keep in mind about it."""
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
            f"measured efficiency, {percent(fit.at_base)}."
        )
    if all(one.hosts == 1 for one in study.sizes):
        text += " All runs were on one host: no network between hosts is in it."
    return text


def _costs(study: Study, fit: Fit) -> list[str]:
    """The best fit in words."""
    costs, batch = fit.best.costs, study.runs[0].batch
    words = [f"computing takes {duration(costs.compute)} {'a step' if batch else 'an image'}"]
    if costs.slowdown >= NOTABLE:
        words.append(
            f"with other ranks it takes {100 * costs.slowdown:.0f} % longer (they share memory and "
            "caches, and wait for the slowest)"
        )
    if study.traffic:
        messages, nbytes = study.traffic.messages, study.traffic.nbytes
        words += [
            f"a step sums {size(nbytes)} in {messages} message{'s' if messages > 1 else ''}",
            f"{duration(costs.latency / messages)} a hop and message",
            f"{nbytes / costs.transfer / 1e9:.2g} GB/s",
        ]
    else:
        words += [
            f"latency {duration(costs.latency)} a hop",
            f"sending the gradients once takes {duration(costs.transfer)}",
        ]
    if costs.overlap:
        return [*words, f"{percent(costs.overlap)} of the reduction is hidden behind computing"]
    return [*words, "latency and bandwidth are effective ones: of what computing does not hide"]
