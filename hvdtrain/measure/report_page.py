"""The page of a report: the facts as tables, laid out by ``report.html``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from hvdtrain import __version__
from hvdtrain.files import replacing
from hvdtrain.measure import expected, figure, plots, report_curves, text
from hvdtrain.measure.report_find import Course, Found, Record
from hvdtrain.measure.report_timeline import timeline
from hvdtrain.measure.study import Study
from hvdtrain.measure.tables import Table, number
from hvdtrain.timeline.units import duration, printable, size

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
    """The text of the page; whatever stands in the files is escaped."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string((files("hvdtrain.measure") / "report.html").read_text())
    single = len(found.summaries) <= FEW
    return template.render(
        title=_title(found),
        folder=found.folder.resolve().name,
        made=time.strftime("%d %B %Y, %H:%M"),
        version=__version__,
        runs=_runs(found) if single else [],
        run_table=None if single else _run_table(found.summaries),
        common=[] if single else _common(found.summaries),
        study=_study(found.study) if found.study else None,
        curves=report_curves.curves(found.courses),
        curve_note=_curve_note(found),
        timelines=[timeline(path, facts) for path, facts in found.timelines.items()],
        checkpoints=_checkpoints(found.checkpoints),
        notes=found.notes,
    )


def _title(found: Found) -> str:
    if found.study:
        return "Scaling study"
    names = {
        " ".join(str(one.get(key, "")) for key in ("workload", "model"))
        for one in found.summaries.values()
    }
    return f"Training: {names.pop()}" if len(names) == 1 else "Training"


def _runs(found: Found) -> list[dict[str, Any]]:
    """The few runs that each get a section: by their summary, else by their course."""
    if not found.summaries and not found.study and len(found.courses) <= FEW:
        return [
            {"path": printable(one.path), "tiles": [_evaluation(None, one)], "tables": []}
            for one in found.courses
        ]
    single = found.courses[0] if len(found.courses) == len(found.summaries) == 1 else None
    return [_run(path, summary, single) for path, summary in found.summaries.items()]


def _run(path: Path, summary: Record, course: Course | None) -> dict[str, Any]:
    """A run with its tables; ``course`` is its own, where that is known."""
    rows = _result(summary)
    return {
        "path": printable(path),
        "tiles": _tiles(summary, course),
        "tables": [
            (name, some)
            for name, some in (
                ("Result", rows),
                ("Options", _flat(summary.get("options"))),
                ("Environment", _flat(summary.get("environment"))),
            )
            if some
        ],
    }


def _tiles(summary: Record, course: Course | None) -> Rows:
    """The few numbers that one looks for first."""
    rate, seconds = summary.get("images_per_second_mean"), summary.get("seconds_total")
    tiles = [("ranks", f"{summary['world_size']}")]
    tiles += [("images/s", number(rate))] if rate else []
    tiles += [_evaluation(summary.get("eval_accuracy"), course)]
    return tiles + ([("in all", duration(seconds))] if seconds else [])


def _evaluation(accuracy: float | None, course: Course | None) -> tuple[str, str]:
    """The test accuracy: of the end, else of the last epoch that was evaluated, else none."""
    if accuracy is not None:
        return "test accuracy", f"{100 * accuracy:.2f} %"
    for record in reversed(course.epochs if course else []):
        if record.get("eval_accuracy") is not None:
            return f"test accuracy, step {record['step']}", f"{100 * record['eval_accuracy']:.2f} %"
    return "test accuracy", "not evaluated"


def _result(summary: Record) -> Rows:
    shown: dict[str, str] = {}
    for key, value in summary.items():
        if key in ("options", "environment") or value is None:
            continue
        label = key.replace("_", " ")
        if key == "step_split":
            shown |= {f"step: {part}": duration(value[part]) for part in _parts(value)}
        elif key == "gradient_messages":
            shown[label] = f"{value['count']}, together {size(value['bytes'])}"
        elif "seconds" in key and isinstance(value, int | float):
            shown[label] = duration(value)
        else:
            shown[label] = _plain(value)
    return list(shown.items())


def _parts(split: Mapping[str, Any]) -> list[str]:
    names = ("data", "compute", "communication", "waiting", "undivided")
    return [part for part in names if split.get(part) is not None]


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


def _flat(value: Any, prefix: str = "") -> Rows:
    """A nested object as rows."""
    rows: Rows = []
    for name, entry in value.items() if isinstance(value, dict) else ():
        if isinstance(entry, dict):
            rows += _flat(entry, f"{prefix}{name}: ")
        elif isinstance(entry, list):
            rows.append((f"{prefix}{name}", ", ".join(map(str, entry))))
        else:
            rows.append((f"{prefix}{name}", _plain(entry) if entry != "" else "(empty)"))
    return rows


def _run_table(summaries: Mapping[Path, Record]) -> Table:
    """Many runs: a row for each."""
    header = ["run", "ranks", "hosts", "global batch", "steps", "images/s", "test accuracy", "time"]
    rows = []
    for path, one in summaries.items():
        accuracy, rate = one.get("eval_accuracy"), one.get("images_per_second_mean")
        rows.append(
            [
                printable(path),
                *(_plain(one.get(key)) for key in ("world_size", "hosts", "global_batch_size")),
                _plain(one.get("steps_completed")),
                number(rate) if rate else "-",
                "-" if accuracy is None else f"{100 * accuracy:.2f} %",
                duration(one["seconds_total"]) if one.get("seconds_total") else "-",
            ]
        )
    return header, rows


def _common(summaries: Mapping[Path, Record]) -> list[tuple[str, Rows]]:
    """Options and environment as far as they are the same for all runs."""
    tables = []
    for name in ("options", "environment"):
        some = [_flat(one.get(name)) for one in summaries.values()]
        rows = [row for row in some[0] if all(row in other for other in some)]
        tables += [(f"{name.capitalize()} of all runs", rows)] if rows else []
    return tables


def _study(study: Study) -> dict[str, Any]:
    plots.style()
    split = text.step_table(study.sizes)
    tables = [("Throughput", text.size_table(study.sizes))]
    tables += [("Where a step goes", split)] if split else []
    if study.shown:
        tables += [
            ("Predicted efficiency, with the shares of a step", expected.prediction_table(study)),
            ("Efficiency after a change", expected.remedy_table(study)),
        ]
    return {
        "title": text.title(study),
        "plots": [(name, report_curves.inline(plot)) for name, plot in figure.apart(study)],
        "tables": tables,
        "notes": [text.notes(study), expected.fit_text(study), expected.uncertain_text(study)],
        "limit": expected.limit_text(study) if study.shown else "",
        "remedies": [(one.name, one.what) for one in study.remedies],
    }


def _curve_note(found: Found) -> str:
    count = len(found.courses)
    if count > report_curves.MOST:
        return f"The first {report_curves.MOST} of {count} runs."
    return ""


def _checkpoints(found: Mapping[Path, Record]) -> Table | None:
    if not found:
        return None
    rows = [
        [
            printable(path),
            _plain(one["step"]),
            _plain(one["epoch"]),
            "-" if one["accuracy"] is None else f"{100 * one['accuracy']:.2f} %",
            size(one["bytes"]),
        ]
        for path, one in found.items()
    ]
    return ["checkpoint", "step", "whole epochs", "test accuracy", "size"], rows
