"""Write the page of a report: results as tables and plots, with the template ``report.html``."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.commands.compare import plot as compare_plot
from hvdtrain.commands.compare import table as compare_table
from hvdtrain.commands.compare.methods import Trial
from hvdtrain.commands.report import curve_plot
from hvdtrain.commands.report.find import DirectoryResults
from hvdtrain.commands.scaling import plot, report
from hvdtrain.commands.scaling.batches import BatchRun
from hvdtrain.commands.scaling.results import Study, title
from hvdtrain.commands.scaling.runs import SPLIT
from hvdtrain.commands.study.curves import TrainingCurves
from hvdtrain.commands.study.run import CURVES, SUMMARY, file_path, run_stem
from hvdtrain.commands.timeline import report as timeline_report
from hvdtrain.commands.timeline.facts import TimelineFacts
from hvdtrain.steps.summary import Summary, unit_of
from hvdtrain.system.output import page, plots
from hvdtrain.system.output.tables import Column, Table, tabulate
from hvdtrain.system.output.text import duration, number, printable, size

TEMPLATE = Path(__file__).with_name("report.html")
SECONDS = ("stopped", "waited", "cost", "longest")  # of ``Saves``
MAX_SECTIONS = 3  # maximum number of runs with separate sections

Rows = list[tuple[str, str]]


def render(contents: DirectoryResults) -> str:
    """Return the HTML of the page."""
    folder, summaries, trials = contents.folder, contents.summaries, contents.comparison
    shown = curve_plot.first(contents.curves)
    few, count = len(summaries) <= MAX_SECTIONS, len(contents.curves)
    unit, most = unit_of(summaries.values()), curve_plot.MAX_RUNS
    return page.render(
        TEMPLATE,
        title=_title(contents),
        subject=folder.resolve().name,
        runs=_runs(contents) if few else [],
        run_table=None if few else _run_table(summaries, unit),
        common=[] if few else _common(summaries),
        study=_study(contents.study) if contents.study else None,
        comparison=_comparison(trials, folder) if trials else None,
        curves=_inlined(curve_plot.figures(shown, unit, _methods(contents))),
        curve_note=f"The first {most} of {count} runs." if count > most else "",
        timelines=[_timeline(path, facts) for path, facts in contents.timelines.items()],
        checkpoints=tabulate(CHECKPOINT_COLUMNS, list(contents.checkpoints.items())),
        pictures=[(path.stem, _inline(folder / path)) for path in contents.pictures],
        notes=contents.notes,
    )


def _inlined(figures: Iterable[tuple[str, Any]]) -> list[tuple[str, str]]:
    return [(name, plots.inline(figure)) for name, figure in figures]


def _inline(path: Path) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _title(contents: DirectoryResults) -> str:
    if contents.study:
        return "Scaling study"
    if contents.comparison:
        return "Comparison of methods"
    names = {
        " ".join(name for name in dict.fromkeys((summary.workload, summary.model)) if name)
        for summary in contents.summaries.values()
    }
    return f"Training: {names.pop()}" if len(names) == 1 else "Training"


def _methods(contents: DirectoryResults) -> dict[Path, str]:
    """Return the labels of the runs of a comparison or of a batch-size study, by their paths."""
    labels = compare_plot.names([trial.method for trial in contents.comparison])
    labels += [run.setting.title for run in contents.batches]
    runs: list[Trial | BatchRun] = [*contents.comparison, *contents.batches]
    return {
        file_path(run_stem(Path(), run.variant, run.repeat), suffix): label
        for run, label in zip(runs, labels, strict=True)
        for suffix in (CURVES, SUMMARY)
    }


def _runs(contents: DirectoryResults) -> list[dict[str, object]]:
    """Return the sections of runs: from their summaries, or from their curves without these."""
    summaries, all_curves = contents.summaries, contents.curves
    if not summaries and not contents.study and len(all_curves) <= MAX_SECTIONS:
        labels = curve_plot.names([curves.path for curves in all_curves], _methods(contents))
        return [
            {"name": label, "tiles": [_evaluation(None, curves)], "tables": []}
            for label, curves in zip(labels, all_curves, strict=True)
        ]
    single = all_curves[0] if len(all_curves) == len(summaries) == 1 else None
    labels = curve_plot.names(list(summaries), _methods(contents))
    runs = zip(labels, summaries.values(), strict=True)
    return [_run(label, summary, single) for label, summary in runs]


def _run(name: str, summary: Summary, curves: TrainingCurves | None) -> dict[str, object]:
    """Return the section of a run; ``curves``: the curves of the same run, if known."""
    tables = (
        ("Result", _result(summary)),
        ("Options", _flat(summary.options)),
        ("Environment", _flat(summary.environment)),
    )
    return {
        "name": name,
        "tiles": _tiles(summary, curves),
        "tables": [(title, rows) for title, rows in tables if rows],
    }


def _tiles(summary: Summary, curves: TrainingCurves | None) -> Rows:
    """Return the key figures of a run."""
    rate, seconds = summary.images_per_second_mean, summary.seconds_total
    tiles = [("ranks", f"{summary.world_size}")]
    tiles += [(f"{unit_of([summary])}/s", number(rate))] if rate else []
    metric = next(iter((summary.eval_metrics or {}).items()), None)
    if metric and summary.eval_accuracy is None:
        tiles += [(f"test {metric[0]}", _plain(metric[1]))]
    else:
        tiles += [_evaluation(summary.eval_accuracy, curves)]
    return tiles + ([("total time", duration(seconds))] if seconds else [])


def _evaluation(accuracy: float | None, curves: TrainingCurves | None) -> tuple[str, str]:
    """Return the test accuracy: the final one, or that of the last evaluated epoch, if any."""
    if accuracy is not None:
        return "test accuracy", _accuracy(accuracy)
    for record in reversed(curves.epochs if curves else []):
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
            shown[label] = f"{value['count']}, {size(value['bytes'])} in total"
        elif key == "eval_metrics":
            shown |= {f"evaluation: {name}": _plain(metric) for name, metric in value.items()}
        elif isinstance(value, dict):
            for name, entry in value.items():
                if entry is not None:
                    show = duration if name in SECONDS else _plain
                    shown[f"{label}: {name.replace('_', ' ')}"] = show(entry)
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
    """Return a table with a row per run."""
    columns = [
        Column("run", lambda run: printable(run[0])),
        Column("ranks", lambda run: run[1].world_size, _plain),
        Column("hosts", lambda run: run[1].hosts, _plain),
        Column("global batch", lambda run: run[1].global_batch_size, _plain),
        Column("steps", lambda run: run[1].steps_completed, _plain),
        Column(f"{unit}/s", lambda run: run[1].images_per_second_mean or None, number),
        Column("test accuracy", lambda run: run[1].eval_accuracy, _accuracy),
        Column("time", lambda run: run[1].seconds_total or None, duration),
    ]
    return tabulate(columns, list(summaries.items()))


def _accuracy(value: float) -> str:
    return f"{100 * value:.2f} %"


def _common(summaries: Mapping[Path, Summary]) -> list[tuple[str, Rows]]:
    """Return the options and environment that are the same for all runs."""
    tables = []
    for name in ("options", "environment"):
        by_run = [_flat(getattr(summary, name)) for summary in summaries.values()]
        rows = [row for row in by_run[0] if all(row in run_rows for run_rows in by_run)]
        tables += [(f"{name.capitalize()} of all runs", rows)] if rows else []
    return tables


def _study(study: Study) -> dict[str, object]:
    measured, predicted = report.study_tables(study)
    return {
        "title": title(study),
        "plots": _inlined(plot.panel_figures(study)),
        "tables": [*measured, *predicted],
        "notes": [report.notes(study), report.fit_text(study), report.uncertain_text(study)],
        "limit": report.limit_text(study),
    }


def _comparison(trials: Sequence[Trial], folder: Path) -> dict[str, object]:
    rows = compare_table.make_rows(trials, curves=compare_table.read_all_curves(trials, folder))
    unit = unit_of(trial.summary for trial in trials)
    shown = compare_table.figures(rows, unit)
    return {
        "title": compare_table.headline(trials),
        "plots": _inlined(compare_plot.panel_figures(rows, unit)),
        "table": shown if shown.rows else None,
        "unavailable": compare_table.unavailable(rows),
    }


CHECKPOINT_COLUMNS = (
    Column("checkpoint", lambda entry: printable(entry[0])),
    Column("step", lambda entry: entry[1].step, _plain),
    Column("completed epochs", lambda entry: entry[1].epoch, _plain),
    Column("test accuracy", lambda entry: entry[1].accuracy, _accuracy),
    Column("size", lambda entry: size(entry[1].bytes)),
)


def _timeline(path: Path, facts: TimelineFacts) -> dict[str, object]:
    """Return heading, verdict and tables of a timeline.

    With its response cache enabled, Horovod records lateness only in the first steps, which start
    late and are not representative.
    """
    tables = [timeline_report.states(facts)]
    tables += [timeline_report.lateness(facts)] if facts.lateness.recorded else []
    return {
        "path": printable(path),
        "head": timeline_report.head(facts),
        "verdict": facts.verdict,
        "tables": tables,
    }
