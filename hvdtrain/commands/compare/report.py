"""Report a comparison: the table with its notes, the JSON, and the files beside the runs."""

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
        folder: where its runs are.
        methods: the rows that are asked for; None: all that there are.
        price: of an hour of a node.
        copy: a file that gets the table as CSV, too.
        target: how good an evaluation has to be, where the time until then counts.

    Raises:
        UsageError: there are no runs, or a file cannot be written.
    """
    trials = read_trials(folder)
    if not trials:
        raise UsageError(
            f"no results in {folder} ({LINES}): give a command after --, or the --out of a "
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
    told = [nan_to_null(asdict(row)) for row in rows]
    data = {"ok": True, "rows": told, "files": list(map(str, files))}
    head = headline(trials) + (f", target {target}" if target else "")
    return data, text(head, rows, files, unit)


def text(head: str, rows: Sequence[Row], files: Sequence[Path], unit: str = "images") -> str:
    """Return the whole report: the table, what its columns mean, and the rows without figures."""
    header, cells = figures(rows, unit)
    parts = [message(head)]
    if cells:
        parts.append(table(header, cells, names=1 + sum(kind in header for kind in KINDS)))
        parts.append("\n".join(entry("  ", f"{name}: {text}") for name, text in notes(header)))
    parts.append("\n".join(map(message, unavailable(rows))))
    parts.append(message("written: " + ", ".join(map(str, files))))
    return "\n\n".join(part for part in parts if part)
