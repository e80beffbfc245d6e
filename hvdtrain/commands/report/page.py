"""Write the page of a report: the facts as tables, laid out by ``report.html``."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from hvdtrain import __version__
from hvdtrain.commands.compare import plot as compare_plot
from hvdtrain.commands.compare import table as compare_table
from hvdtrain.commands.compare.trials import Trial, run_stem
from hvdtrain.commands.report import curves
from hvdtrain.commands.report.find import Found
from hvdtrain.commands.runs.course import Course, Record
from hvdtrain.commands.runs.records import SPLIT
from hvdtrain.commands.runs.start import COURSE, file_of
from hvdtrain.commands.scaling import plot, report
from hvdtrain.commands.scaling.study import Study, title
from hvdtrain.steps.summary import Summary, unit_of
from hvdtrain.system.files import replacing
from hvdtrain.system.output import plots
from hvdtrain.system.output.tables import Table
from hvdtrain.system.output.text import duration, number, percent, printable, size

FEW = 3  # runs that each get a section of their own

Rows = list[tuple[str, str]]


def write(target: Path, found: Found) -> None:
    """Write the page, complete or not at all.

    Raises:
        UsageError, HvdtrainError: it cannot be written.
    """
    with replacing(target) as file:
        # Half of a surrogate pair, in a name of a file or a text in it, cannot be encoded.
        file.write(render(found).encode(errors="replace"))


def render(found: Found) -> str:
    """Return the text of the page; whatever stands in the files is escaped."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(
        (files("hvdtrain.commands.report") / "report.html").read_text()
    )
    single, count = len(found.summaries) <= FEW, len(found.courses)
    unit = unit_of(found.summaries.values())
    return template.render(
        title=_title(found),
        folder=found.folder.resolve().name,
        made=time.strftime("%d %B %Y, %H:%M"),
        version=__version__,
        runs=_runs(found) if single else [],
        run_table=None if single else _run_table(found.summaries, unit),
        common=[] if single else _common(found.summaries),
        study=_study(found.study) if found.study else None,
        comparison=_comparison(found.comparison, found.folder) if found.comparison else None,
        curves=curves.curves(found.courses, unit, _methods(found)),
        curve_note=f"The first {curves.MOST} of {count} runs." if count > curves.MOST else "",
        timelines=[_timeline(path, facts) for path, facts in found.timelines.items()],
        checkpoints=_checkpoints(found.checkpoints),
        pictures=[(path.stem, _inline(found.folder / path)) for path in found.pictures],
        notes=found.notes,
    )


def _inline(path: Path) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _title(found: Found) -> str:
    if found.study:
        return "Scaling study"
    if found.comparison:
        return "Comparison of methods"
    names = {
        " ".join(name for name in dict.fromkeys((one.workload, one.model)) if name)
        for one in found.summaries.values()
    }
    return f"Training: {names.pop()}" if len(names) == 1 else "Training"


def _methods(found: Found) -> dict[Path, str]:
    """Return what the runs of a comparison are called in its table, by the paths of their files."""
    called = compare_plot.names([trial.method for trial in found.comparison])
    return {
        file_of(run_stem(Path(), trial.method, trial.repeat), COURSE): name
        for trial, name in zip(found.comparison, called, strict=True)
    }


def _runs(found: Found) -> list[dict[str, Any]]:
    """Return the few runs that each get a section: by their summary, else by their course."""
    if not found.summaries and not found.study and len(found.courses) <= FEW:
        called = curves.names([one.path for one in found.courses])
        return [
            {"name": name, "tiles": [_evaluation(None, one)], "tables": []}
            for name, one in zip(called, found.courses, strict=True)
        ]
    single = found.courses[0] if len(found.courses) == len(found.summaries) == 1 else None
    called = curves.names(list(found.summaries))
    runs = zip(called, found.summaries.values(), strict=True)
    return [_run(name, summary, single) for name, summary in runs]


def _run(name: str, summary: Summary, course: Course | None) -> dict[str, Any]:
    """Return a run with its tables; ``course`` is its own, where that is known."""
    tables = (
        ("Result", _result(summary)),
        ("Options", _flat(summary.options)),
        ("Environment", _flat(summary.environment)),
    )
    return {
        "name": name,
        "tiles": _tiles(summary, course),
        "tables": [(name, rows) for name, rows in tables if rows],
    }


def _tiles(summary: Summary, course: Course | None) -> Rows:
    """Return the few numbers that one looks for first."""
    rate, seconds = summary.images_per_second_mean, summary.seconds_total
    tiles = [("ranks", f"{summary.world_size}")]
    tiles += [(f"{unit_of([summary])}/s", number(rate))] if rate else []
    metric = next(iter((summary.eval_metrics or {}).items()), None)
    if metric and summary.eval_accuracy is None:
        tiles += [(f"test {metric[0]}", _plain(metric[1]))]
    else:
        tiles += [_evaluation(summary.eval_accuracy, course)]
    return tiles + ([("in all", duration(seconds))] if seconds else [])


def _evaluation(accuracy: float | None, course: Course | None) -> tuple[str, str]:
    """Return the test accuracy: the last one, else that of the last epoch evaluated, else none."""
    if accuracy is not None:
        return "test accuracy", _accuracy(accuracy)
    for record in reversed(course.epochs if course else []):
        if record.get("eval_accuracy") is not None:
            return f"test accuracy, step {record['step']}", _accuracy(record["eval_accuracy"])
    return "test accuracy", "not evaluated"


def _result(summary: Summary) -> Rows:
    shown: dict[str, str] = {}
    for key, value in summary.to_json().items():
        if key in ("options", "environment") or value is None:
            continue
        label = key.replace("_", " ").replace("images", unit_of([summary]))
        if key == "step_split":
            parts = {part: value[part] for part in SPLIT if value[part] is not None}
            shown |= {f"step: {part}": duration(seconds) for part, seconds in parts.items()}
        elif key == "gradient_messages":
            shown[label] = f"{value['count']}, together {size(value['bytes'])}"
        elif key == "eval_metrics":
            shown |= {f"evaluation: {name}": _plain(one) for name, one in value.items()}
        elif key.endswith("_bytes"):
            shown[label] = size(value)
        elif "seconds" in key:
            shown[label] = duration(value)
        else:
            shown[label] = _plain(value)
    return list(shown.items())


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


def _flat(value: Any, prefix: str = "") -> Rows:
    """Return a nested object as rows."""
    rows: Rows = []
    for name, entry in value.items() if isinstance(value, dict) else ():
        if isinstance(entry, dict):
            rows += _flat(entry, f"{prefix}{name}: ")
        elif isinstance(entry, list):
            rows.append((f"{prefix}{name}", ", ".join(map(str, entry))))
        else:
            rows.append((f"{prefix}{name}", _plain(entry) if entry != "" else "(empty)"))
    return rows


def _run_table(summaries: Mapping[Path, Summary], unit: str) -> Table:
    """Return a row per run, where there are many."""
    counted = ["run", "ranks", "hosts", "global batch", "steps", f"{unit}/s"]
    header = [*counted, "test accuracy", "time"]
    rows = []
    for path, one in summaries.items():
        rate, seconds = one.images_per_second_mean, one.seconds_total
        counts = (one.world_size, one.hosts, one.global_batch_size, one.steps_completed)
        speed, time = number(rate) if rate else "-", duration(seconds) if seconds else "-"
        result = [speed, _accuracy(one.eval_accuracy), time]
        rows.append([printable(path), *map(_plain, counts), *result])
    return header, rows


def _accuracy(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def _common(summaries: Mapping[Path, Summary]) -> list[tuple[str, Rows]]:
    """Return options and environment as far as they are the same for all runs."""
    tables = []
    for name in ("options", "environment"):
        some = [_flat(getattr(one, name)) for one in summaries.values()]
        rows = [row for row in some[0] if all(row in other for other in some)]
        tables += [(f"{name.capitalize()} of all runs", rows)] if rows else []
    return tables


def _study(study: Study) -> dict[str, Any]:
    plots.style()
    split = report.step_table(study.sizes)
    tables = [("Throughput", report.size_table(study.sizes, study.unit))]
    tables += [("Where a step goes", split)] if split else []
    if study.shown:
        tables += [
            ("Predicted efficiency, with the shares of a step", report.prediction_table(study)),
            ("Efficiency after a change", report.remedy_table(study)),
        ]
    return {
        "title": title(study),
        "plots": [(name, plots.inline(figure)) for name, figure in plot.apart(study)],
        "tables": tables,
        "notes": [report.notes(study), report.fit_text(study), report.uncertain_text(study)],
        "limit": report.limit_text(study) if study.shown else "",
        "remedies": [(one.name, one.what) for one in study.remedies],
    }


def _comparison(trials: Sequence[Trial], folder: Path) -> dict[str, Any]:
    rows = compare_table.make_rows(trials, folder=folder)
    unit = unit_of(trial.summary for trial in trials)
    header, cells = compare_table.figures(rows, unit)
    return {
        "title": compare_table.headline(trials),
        "plots": [(name, plots.inline(figure)) for name, figure in compare_plot.apart(rows, unit)],
        "table": (header, cells) if cells else None,
        "meanings": compare_table.notes(header),
        "unavailable": compare_table.unavailable(rows),
    }


def _checkpoints(found: Mapping[Path, Record]) -> Table | None:
    if not found:
        return None
    rows = []
    for path, one in found.items():
        counts = [_plain(one["step"]), _plain(one["epoch"])]
        rows.append([printable(path), *counts, _accuracy(one["accuracy"]), size(one["bytes"])])
    return ["checkpoint", "step", "whole epochs", "test accuracy", "size"], rows


def _timeline(path: Path, facts: Record) -> dict[str, Any]:
    """Return head, verdict and tables of a timeline."""
    file, steps = facts["file"], facts["steps"]
    head = f"{file['events']:,} events in {duration(facts['seconds'])}"
    states: Table | None = None
    if steps:
        head += f", {steps['whole']:,} whole steps, {duration(steps['seconds']['median'])} each"
        names = {"neither": "neither: computing, data"}
        rows = [
            [names.get(name, name), duration(one["median"]), percent(one["share"])]
            for name, one in steps["states"].items()
        ]
        states = ["seen from rank 0", "of a step, median", "share"], rows
    return {
        "path": printable(path),
        "head": head,
        "verdict": [(one["text"], one["advice"]) for one in facts["verdict"]],
        "tables": [table for table in (states, _lateness(facts["lateness"])) if table],
    }


def _lateness(lateness: Record) -> Table | None:
    """Return who was late; None where the file does not show it for most steps.

    With its cache of responses on Horovod notes it in the first steps alone, which start late
    and say nothing about the others.
    """
    if not lateness["told"]:
        return None
    rows = [
        [
            str(row["rank"]),
            percent(row["late_steps_share"]) + " of steps",
            duration(row["late_in_step_seconds"]["median"]),
            duration(row["cost_seconds"]),
        ]
        for row in lateness["ranks"]
    ]
    return ["rank", "last to be ready", "then late by", "costs in all"], rows
