"""Read and write the runs of a study, as JSON Lines or as a CSV table.

A line of ``results.jsonl`` has ``ranks``, ``repeat`` (from 1), ``scaling`` (weak or strong), the
``command`` as typed, ``machine`` and ``cores`` of the host that started it, the ``threads`` per
rank (null: chosen by the program), the ``room`` (number of ranks that share the cores of a host),
and the complete ``summary`` of the run.
"""

from __future__ import annotations

import csv
import io
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.commands.runs import json_lines
from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import Summary

LINES, TABLE = "results.jsonl", "results.csv"  # all runs, and their table
OUT = Path("scaling")  # default directory
WEAK, STRONG = "weak", "strong"
MOST = sys.maxsize  # largest number in a table: sums and squares of larger ones overflow
SHOWN = 20  # characters of a wrong value in a message
SPLIT = ("data", "compute", "communication", "waiting", "undivided")  # parts of a step
RUN_COLUMNS = ("ranks", "repeat", "scaling", "machine", "cores", "threads")  # fields of a run
TEXT_COLUMNS = ("workload", "framework", "strategy", "model", "precision")  # of a summary
COLUMNS = (
    *("ranks", "repeat", "images_per_second", "images_per_second_std", "step_seconds"),
    *(f"{part}_seconds" for part in SPLIT),
    *("messages", "gradient_bytes", "scaling", *TEXT_COLUMNS, "global_batch_size", "hosts"),
    *("machine", "cores", "threads", "room", "timeline"),
)


@dataclass(frozen=True)
class Run:
    """One measured run."""

    ranks: int
    repeat: int  # from 1
    summary: Summary  # written by the trainer, or from the columns of a table
    scaling: str = WEAK
    command: tuple[str, ...] = ()
    machine: str = ""  # processor and cores, or GPUs, of a host
    cores: int | None = None  # of a host; None if unknown, or if GPUs are used
    threads: int | None = None  # per rank, if set by the sweep
    ranks_per_host: int | None = None  # that share a host's cores; None: those that run

    @property
    def name(self) -> str:
        """Ranks and repeat, as in the names of its files: ``4-1``."""
        return f"{self.ranks}-{self.repeat}"

    @property
    def rate(self) -> float:
        """Images per second over all ranks; 0 before the run."""
        return float(self.summary.images_per_second_mean or 0)

    @property
    def batch(self) -> int | None:
        """Images per step over all ranks, if known."""
        return self.summary.global_batch_size

    @property
    def split(self) -> dict[str, float]:
        """Seconds per step by part; only the parts that the trainer measured."""
        parts = {part: getattr(self.summary.step_split, part, None) for part in SPLIT}
        return {part: seconds for part, seconds in parts.items() if seconds is not None}

    def check(self) -> None:
        """Raise ValueError if the throughput is missing or not positive."""
        if not (self.ranks >= 1 and math.isfinite(self.rate) and self.rate > 0):
            raise ValueError(f"{self.rate} images/s on {self.ranks} ranks")


def read_lines(path: Path) -> list[Run]:
    """Return the runs in a JSON Lines file; see ``json_lines.read``."""
    return json_lines.read(path, _run, "sweep")


def _run(content: dict[str, Any]) -> Run:
    summary = Summary.from_json(content["summary"])
    fields = {**content, "command": tuple(content["command"]), "summary": summary}
    fields["ranks_per_host"] = fields.pop("room", None)
    machine = str(fields.get("machine", ""))
    fields["machine"] = machine.replace(" a host", " per host")  # as written by older versions
    run = Run(**fields)
    run.check()
    return run


def append_line(path: Path, run: Run) -> None:
    """Append a run to a JSON Lines file."""
    content = {**vars(run), "summary": run.summary.to_json()}
    content["room"] = content.pop("ranks_per_host")
    json_lines.append(path, content, _run)


def table_text(runs: Sequence[Run]) -> str:
    """Return the runs as CSV, readable by ``--from``."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for run in sorted(runs, key=lambda run: (run.ranks, run.repeat)):
        traffic = run.summary.gradient_messages
        writer.writerow(
            {
                **{key: getattr(run.summary, key, None) for key in COLUMNS},
                **{key: getattr(run, key) for key in RUN_COLUMNS},
                "images_per_second": run.rate,
                "step_seconds": run.batch / run.rate if run.batch else None,
                **{f"{part}_seconds": run.split.get(part) for part in SPLIT},
                "messages": traffic and traffic.count,
                "gradient_bytes": traffic and traffic.bytes,
                "room": run.ranks_per_host,
            }
        )
    return text.getvalue()


def read_table(path: Path) -> list[Run]:
    """Return the runs in a CSV with the columns ranks, images_per_second, and any of ``COLUMNS``.

    Raises:
        UsageError: it cannot be read, a column is missing, or a value is not a number.
    """
    try:
        reader = csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines())
        rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"--from {path} cannot be read: {error}") from error
    names = {name.strip() for name in reader.fieldnames or ()}
    if missing := [name for name in ("ranks", "images_per_second") if name not in names]:
        raise UsageError(
            f"--from {path}: no column {' and '.join(missing)}; the first line must name the "
            "columns, e.g. ranks,images_per_second"
        )
    if not rows:
        raise UsageError(f"--from {path}: no rows after the line with the column names")
    repeats: Counter[int] = Counter()
    runs = []
    for number, cells in enumerate(rows, 2):
        values = {(k or "").strip(): v.strip() for k, v in cells.items() if isinstance(v, str)}
        row = _Row(path, number, values)
        ranks, rate = row.number("ranks", int), row.number("images_per_second", float)
        if ranks is None or rate is None:
            raise UsageError(f"--from {path}, line {number}: ranks or images_per_second is empty")
        repeats[ranks] += 1
        runs.append(_from_row(row, ranks, repeats[ranks], rate))
    return runs


@dataclass(frozen=True)
class _Row:
    """A row of a user's table; numbers are checked, with file and line in the message."""

    path: Path
    line: int
    values: Mapping[str, str]

    def number(self, name: str, kind: Callable[[str], Any]) -> Any:
        """Return the number in a column; None if it is empty or absent."""
        text = self.values.get(name, "")
        if not text:
            return None
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        least = 0 if name.endswith("_seconds") else 1 if kind is int else 1 / MOST
        if not least <= value <= MOST:
            shown = repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")
            valid = "a whole number of at least 1" if kind is int else "a positive number"
            raise UsageError(
                f"--from {self.path}, line {self.line}: {name} {shown} is not {valid} in the "
                "measurable range"
            )
        return value


def _from_row(row: _Row, ranks: int, repeat: int, rate: float) -> Run:
    split = {part: row.number(f"{part}_seconds", float) for part in SPLIT}
    messages, nbytes = row.number("messages", int), row.number("gradient_bytes", int)
    summary = {
        **{key: row.values.get(key) or None for key in (*TEXT_COLUMNS, "timeline")},
        **{key: row.number(key, int) for key in ("global_batch_size", "hosts")},
        "world_size": ranks,
        "images_per_second_mean": rate,
        "step_split": split,
        "gradient_messages": {"count": messages, "bytes": nbytes} if messages and nbytes else None,
    }
    return Run(
        ranks,
        repeat,
        Summary.from_json(summary),
        scaling=row.values.get("scaling", ""),
        machine=row.values.get("machine", ""),
        cores=row.number("cores", int),
        threads=row.number("threads", int),
        ranks_per_host=row.number("room", int),
    )


def read_folder(folder: Path) -> list[Run]:
    """Return the runs in a study's directory, and in the subdirectories of its jobs.

    Raises:
        UsageError: there are none.
    """
    files = [folder / LINES, *sorted(folder.glob(f"ranks-*/{LINES}"))]
    runs = [run for file in files for run in read_lines(file)]
    if not runs:
        raise UsageError(
            f"no results in {folder} ({LINES}): use --ranks and a command after --, the --out of "
            "a previous sweep, or --from FILE.csv"
        )
    return runs
