"""Report a comparison: as text, as JSON, and as files in its directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdtrain.commands.compare import plot
from hvdtrain.commands.compare.methods import Method
from hvdtrain.commands.compare.table import (
    KINDS,
    Row,
    csv_text,
    evaluated,
    figures,
    headline,
    make_rows,
    notes,
    unavailable,
)
from hvdtrain.commands.compare.trials import LINES, read_trials
from hvdtrain.commands.runs.target import Target
from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import nan_to_null, unit_of
from hvdtrain.system.files import replacing
from hvdtrain.system.output.tables import entry, message, table

STEM = "compare"  # of the table and the plot


def report(
    folder: Path,
    methods: Sequence[Method] | None = None,
    price: float | None = None,
    copy: Path | None = None,
    target: Target | None = None,
) -> tuple[dict[str, Any], str]:
    """Return a comparison as JSON and as text; write its table and plots.

    Args:
        folder: the directory of its runs.
        methods: the requested rows; None: all.
        price: of one node-hour.
        copy: another file to write the CSV table to.
        target: the metric value to report the time to, if any.

    Raises:
        UsageError: there are no runs, or a file cannot be written.
    """
    trials = read_trials(folder)
    if not trials:
        raise UsageError(
            f"no results in {folder} ({LINES}): use a command after --, or the --out of a previous "
            "comparison"
        )
    if methods is not None:
        trials = [trial for trial in trials if trial.method in methods]
    rows = make_rows(trials, methods, folder, price, target)
    files = [folder / f"{STEM}.csv", *([copy] if copy else [])]
    for file in files:
        with replacing(file) as out:
            out.write(csv_text(rows).encode())
    lines = evaluated(trials, folder, target) if target else []
    unit = unit_of(trial.summary for trial in trials)
    files += plot.draw(rows, folder / STEM, lines, target, unit)
    row_data = [nan_to_null(asdict(row)) for row in rows]
    data = {"ok": True, "rows": row_data, "files": list(map(str, files))}
    head = headline(trials) + (f", target {target}" if target else "")
    return data, text(head, rows, files, unit)


def text(head: str, rows: Sequence[Row], files: Sequence[Path], unit: str = "images") -> str:
    """Return the report: the table, the meaning of its columns, and the unavailable methods."""
    header, cells = figures(rows, unit)
    parts = [message(head)]
    if cells:
        parts.append(table(header, cells, names=1 + sum(kind in header for kind in KINDS)))
        parts.append("\n".join(entry("  ", f"{name}: {text}") for name, text in notes(header)))
    parts.append("\n".join(map(message, unavailable(rows))))
    parts.append(message("written: " + ", ".join(map(str, files))))
    return "\n\n".join(part for part in parts if part)
