"""Report a scaling study: as text, as JSON, as a CSV table and as plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.commands.scaling import plot
from hvdtrain.commands.scaling.cost_model import (
    MIN_PART,
    UNKNOWN_ERROR,
    Fit,
    Forecast,
    Prediction,
    read_reductions,
)
from hvdtrain.commands.scaling.results import (
    WIDEST,
    RankResult,
    SampleMean,
    Study,
    make_study,
    title,
)
from hvdtrain.commands.scaling.runs import (
    SPLIT,
    STRONG,
    TABLE,
    WEAK,
    MeasuredRun,
    check_comparable,
    read_evaluations,
    write_table,
)
from hvdtrain.commands.scaling.sweep import ScalingOptions
from hvdtrain.commands.study import curves
from hvdtrain.commands.study.run import make_folder
from hvdtrain.system.output import Report, plots
from hvdtrain.system.output.tables import Column, Table, message, paragraph, tabulate
from hvdtrain.system.output.text import bandwidth, duration, number, plural, size

PLOT = "scaling"  # the stem of its files
NOTABLE = 0.02  # smallest slowdown that is reported
LIMITS = {
    "latency": "latency",
    "bandwidth": "bandwidth",
    "slowdown": "slower computing",
    "fixed": "computing that does not shrink with more ranks",
    "": "computing",
}


def report(
    runs: Sequence[MeasuredRun], source: Path, options: ScalingOptions, folder: Path | None
) -> Report:
    """Evaluate ``runs``, and write table and plots if a folder is given.

    Args:
        runs: one or more.
        source: their file or directory, for messages.
        options: those of the report; without --weak and --strong the scaling is that of the runs.
        folder: for table and plots; None: nothing is written.

    Raises:
        UsageError: the runs are not comparable, or a table or the folder cannot be used.
    """
    requested = options.scaling if options.weak or options.strong else runs[0].scaling
    scaling = requested or WEAK
    check_comparable(runs, scaling, str(source))
    study = make_study(
        runs,
        scaling,
        ranks=options.predict,
        reductions=read_reductions(options.allreduce, runs[0].summary.strategy),
    )
    data, sections = study_data(study), [study_text(study)]
    if folder is not None:
        make_folder(folder)
        write_table(folder / TABLE, runs)
        files = [folder / TABLE, *plots.save(plot.make_figure(study), folder / PLOT)]
        data["files"] = list(map(str, files))
        if target := options.target:
            evaluated = read_evaluations(runs, folder, target.metric)
            times = curves.target_results(evaluated, folder, target)
            data["target"] = curves.target_data(times, target)
            sections.append(curves.target_text(times, target))
            data["files"] += map(str, curves.draw_target(times, target, folder))
        sections.append(message("written: " + ", ".join(data["files"])))
    return Report("\n\n".join(sections), data)


def study_data(study: Study) -> dict[str, Any]:
    """Return the study as JSON: fractions, seconds, images per second."""
    fit, traffic = study.fit, study.traffic
    return {
        "ok": True,
        "scaling": study.scaling,
        "sizes": [_size_data(size) for size in study.sizes],
        "runs": len(study.runs),
        "fit": fit
        and {
            "base": fit.base,
            "misfit": fit.misfit,
            "costs": asdict(fit.costs),
            "traffic": traffic and {"messages": traffic.count, "nbytes": traffic.bytes},
        },
        "no_fit_reason": study.no_fit_reason or None,
        "predictions": [asdict(prediction) for prediction in study.predictions],
        "not_predicted": list(study.not_predicted),
    }


def _size_data(size: RankResult) -> dict[str, object]:
    rate, slowest = size.rate, size.slowest
    return {
        "ranks": size.ranks,
        "hosts": size.hosts,
        "runs": rate.count,
        "images_per_second_mean": rate.mean,
        "images_per_second_std": rate.deviation,
        "images_per_second_interval": rate.interval,
        "speedup": size.speedup,
        "efficiency": size.efficiency,
        "efficiency_interval": size.interval,
        "step_seconds": size.seconds,
        "step_split": dict(size.split) or None,
        "slowest": dict(zip(("rank", "share"), slowest, strict=True)) if slowest else None,
        "shares_cores": size.oversubscribed,
    }


def study_text(study: Study) -> str:
    """Return the report: the headline, the measurements, and the prediction."""
    measured, predicted = study_tables(study)
    sections = [
        paragraph(headline(study)),
        paragraph(title(study)),
        *(shown.body for shown in measured),
        *map(paragraph, (notes(study), fit_text(study), not_predicted_text(study))),
        paragraph(uncertain_text(study)),
        *(f"{shown.title}:\n{shown.body}" for shown in predicted),
        limit_text(study),
    ]
    return "\n\n".join(section for section in sections if section)


def headline(study: Study) -> str:
    """Return the efficiency of the largest size without oversubscription; empty for one size."""
    exclusive = [size for size in study.sizes if not size.oversubscribed]
    base, last = study.sizes[0], (exclusive if len(exclusive) > 1 else study.sizes)[-1]
    if base is last:
        return ""
    return (
        f"Efficiency on {plural(last.ranks, 'rank')}: {100 * last.efficiency:.1f} % "
        f"({last.speedup:.2f} times the {study.unit}/s of {plural(base.ranks, 'rank')})"
    )


def study_tables(study: Study) -> tuple[list[Table], list[Table]]:
    """Return the measurements, and the prediction if there is one: a row per number of ranks."""
    measured = [tabulate(_size_columns(study.unit), study.sizes, "Throughput", known=True)]
    if any(size.split for size in study.sizes):
        measured.append(tabulate(STEP_COLUMNS, study.sizes, "Parts of a step", known=True))
    title = "Predicted efficiency, with the shares of a step"
    predicted = tabulate(PREDICTION_COLUMNS, study.shown, title, known=True)
    return measured, [predicted] if study.shown else []


def _size_columns(unit: str) -> list[Column]:
    def spread(rate: SampleMean) -> str | None:
        return None if rate.deviation is None else number(rate.deviation, rate.mean)

    return [
        NAME,
        Column("hosts", lambda size: size.hosts or None),
        Column(f"{unit}/s", lambda size: number(size.rate.mean)),
        Column("±", lambda size: spread(size.rate), joined=True),
        Column("95 % interval", lambda size: size.rate.interval, _interval, joined=True),
        Column("speed-up", lambda size: f"{size.speedup:.2f}"),
        Column("efficiency", lambda size: f"{100 * size.efficiency:.1f} %"),
        Column("95 %", lambda size: size.interval, _percentages, joined=True),
    ]


def _interval(value: tuple[float, float]) -> str:
    return " to ".join(map(number, value))


def _percentages(value: tuple[float, float]) -> str:
    return " to ".join(f"{100 * end:.1f}" for end in value)


def _part(part: str, size: RankResult) -> float | None:
    return size.split.get(part)


NAME = Column("ranks", lambda size: f"{size.ranks}{'*' * size.oversubscribed}")
STEP_COLUMNS = (
    NAME,
    Column("step", "seconds", duration),
    *(Column(part, partial(_part, part), duration) for part in SPLIT),
    Column(
        "slowest rank",
        "slowest",
        lambda slowest: f"rank {slowest[0]} in {100 * slowest[1]:.0f} %",
    ),
)


def notes(study: Study) -> str:
    """Return the notes to the tables."""
    texts = []
    predicted = study.fit is not None
    base = study.sizes[0].ranks
    if base > 1:
        texts.append(f"Speed-up and efficiency are relative to {base} ranks, the smallest size.")
    if any(size.oversubscribed for size in study.sizes):
        texts.append(
            "* oversubscribed (more threads than cores): not representative of more hardware"
            f"{', so excluded from the prediction' * predicted}."
        )
    if all(size.rate.deviation is None for size in study.sizes):
        assumed = f"; the prediction assumes {100 * UNKNOWN_ERROR:.0f} %" * predicted
        texts.append(
            "Each size ran once, so the errors are unknown (use --repeat 3 to measure them)"
            f"{assumed}."
        )
    if any(size.split for size in study.sizes):
        texts.append(
            "Parts of a step: data (waiting for the next batch), compute (the rest of the step), "
            "communication (in allreduce after all ranks arrived), waiting (for the slowest "
            "rank to arrive); means over ranks, steps and runs."
        )
    if any("undivided" in size.split for size in study.sizes):
        texts.append("undivided: compute, communication and waiting together.")
    return " ".join(texts)


def not_predicted_text(study: Study) -> str:
    """Return the requested numbers of ranks that are not predicted, and why; empty if none."""
    if not study.not_predicted:
        return ""
    ranks = ", ".join(map(str, study.not_predicted))
    text = f"Not predicted: {ranks} ranks. The largest size measured has {study.sizes[-1].ranks}"
    if study.scaling == STRONG and (batch := study.runs[0].batch):
        return f"{text}, and more than {batch} would be more ranks than samples."
    return f"{text}; only larger sizes are predicted."


def uncertain_text(study: Study) -> str:
    """Return the numbers of ranks whose prediction is too uncertain; empty if none."""
    uncertain = [str(p.ranks) for p in study.predictions if p not in study.shown]
    if not uncertain:
        return ""
    return (
        f"Not predicted: {', '.join(uncertain)} ranks. Their efficiency is uncertain by more than "
        f"{100 * WIDEST:.0f} percentage points (95 %); larger sizes, more repeats or --allreduce "
        "reduce the uncertainty."
    )


def limit_text(study: Study) -> str:
    """Return the limit of the largest predicted size; empty if none is predicted."""
    if not study.shown:
        return ""
    last = study.shown[-1]
    return f"At {last.ranks} ranks {LIMITS[last.limit]} is the limit."


def _share(part: str, prediction: Prediction) -> str | None:
    seconds = getattr(prediction.parts, part)
    return f"{100 * seconds / prediction.parts.total:.0f} %" if seconds else None


def _digits(value: Forecast) -> int:
    """Return the decimals of a percentage: one if the range is narrower than two points."""
    return int(value.high - value.low < 0.02)


def _significant(value: Forecast) -> str:
    return f"{100 * value.middle:.{_digits(value)}f} %"


def _range(value: Forecast) -> str:
    digits = _digits(value)
    return f"{100 * value.low:.{digits}f} to {100 * value.high:.{digits}f}"


PREDICTION_COLUMNS = (
    Column("ranks", "ranks"),
    Column("efficiency", "efficiency", _significant),
    Column("95 %", "efficiency", _range, joined=True),
    Column("compute", partial(_share, "compute")),
    Column("slowdown", partial(_share, "slowdown")),
    Column("latency", partial(_share, "latency")),
    Column("bandwidth", partial(_share, "transfer")),
    Column("limited by", lambda prediction: LIMITS[prediction.limit]),
)


def fit_text(study: Study) -> str:
    """Return the fitted model and its limitations, or the reason for not fitting."""
    if study.fit is None:
        return f"No prediction: {study.no_fit_reason}."
    fit = study.fit
    text = f"Prediction, for a ring allreduce: {'; '.join(_costs(study, fit))}."
    if fit.misfit > 1:
        text += f" The points scatter {fit.misfit:.1f} times as much as their errors allow."
    if all(size.hosts == 1 for size in study.sizes):
        text += " All runs were on one host: no network between hosts is included."
    return text


def _costs(study: Study, fit: Fit) -> list[str]:
    """Return a description of the fit, as phrases."""
    costs, batch = fit.costs, study.runs[0].batch
    sample = "step" if batch else study.unit[:-1]
    phrases = [f"computing takes {duration(costs.compute)} per {sample}"]
    if costs.slowdown >= NOTABLE:
        phrases.append(
            f"on several ranks it takes {100 * costs.slowdown:.0f} % longer (shared memory and "
            "caches, waiting for the slowest rank)"
        )
    phrases += _link(study, fit)
    hidden = "latency and bandwidth exclude the time overlapped with computing"
    if costs.overlap:
        hidden = f"{100 * costs.overlap:.0f} % of the reduction is overlapped with computing"
    return [*phrases, hidden]


def _link(study: Study, fit: Fit) -> list[str]:
    """Return latency and bandwidth of the fit, as phrases, if the runs determine them."""
    costs, traffic = fit.costs, study.traffic
    largest = max(size.ranks for size in study.sizes if not size.oversubscribed)
    parts = fit.parts(largest)
    latency, transfer, least = parts.latency, parts.transfer, MIN_PART * parts.total
    if costs.overlap:  # fitted to a table of allreduce times, which determines them
        latency, transfer, least = costs.latency, costs.transfer, 0.0
    phrases = []
    if traffic:
        messages = plural(traffic.count, "message")
        phrases.append(f"a step sums {size(traffic.bytes)} in {messages}")
    if latency <= least:
        phrases.append("latency: too small a part of a step to measure")
    elif traffic:
        phrases.append(f"{duration(costs.latency / traffic.count)} per hop and message")
    else:
        phrases.append(f"latency {duration(costs.latency)} per hop")
    if transfer <= least:
        phrases.append("bandwidth: too small a part of a step to measure")
    elif traffic:
        phrases.append(bandwidth(traffic.bytes / costs.transfer))
    else:
        phrases.append(f"sending the gradients once takes {duration(costs.transfer)}")
    return phrases
