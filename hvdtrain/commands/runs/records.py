"""The runs of a study: one line of JSON each, or rows of a table; read and written.

A line of ``results.jsonl`` holds ``ranks``, ``repeat`` (from 1), ``scaling`` (weak or strong), the
``command`` as the user gave it, ``machine`` and ``cores`` of the host that started it, the
``threads`` per rank (null: its own choice), the ``room`` (ranks that each host was shared out
among), and the whole ``summary`` of the run.
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

from hvdtrain.commands.runs import lines
from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import Summary

LINES, TABLE = "results.jsonl", "results.csv"  # every run, and the columns of a table
OUT = Path("scaling")  # the directory that they are in, unless another was named
WEAK, STRONG = "weak", "strong"
MOST = sys.maxsize  # of anything: sums and squares of more overflow
SHOWN = 20  # characters of a wrong value
SPLIT = ("data", "compute", "communication", "waiting", "undivided")  # parts of a step
OWN = ("ranks", "repeat", "scaling", "machine", "cores", "threads")  # of a run, not its summary
WORDS = ("workload", "framework", "strategy", "model", "precision")
COLUMNS = (
    *("ranks", "repeat", "images_per_second", "images_per_second_std", "step_seconds"),
    *(f"{part}_seconds" for part in SPLIT),
    *("messages", "gradient_bytes", "scaling", *WORDS, "global_batch_size", "hosts"),
    *("machine", "cores", "threads", "room", "timeline"),
)


@dataclass(frozen=True)
class Run:
    """One measured run."""

    ranks: int
    repeat: int  # from 1
    summary: Summary  # what the trainer wrote; of a table's row, what its columns hold
    scaling: str = WEAK
    command: tuple[str, ...] = ()
    machine: str = ""  # processor and cores, or GPUs, of a host
    cores: int | None = None  # of a host; None where not known, or where GPUs compute
    threads: int | None = None  # per rank, if the ladder fixed them
    ranks_per_host: int | None = None  # that a host was shared out among; None: as many as ran

    @property
    def name(self) -> str:
        """Ranks and repeat, as its files are called: ``4-1``."""
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
        """Seconds per step by part, as far as the trainer could tell them apart."""
        parts = {part: getattr(self.summary.step_split, part, None) for part in SPLIT}
        return {part: seconds for part, seconds in parts.items() if seconds is not None}

    def check(self) -> None:
        """Raise ValueError if this measures no throughput."""
        if not (self.ranks >= 1 and math.isfinite(self.rate) and self.rate > 0):
            raise ValueError(f"{self.rate} images/s on {self.ranks} ranks")


def read_lines(path: Path) -> list[Run]:
    """Return the runs in a file of lines; see ``lines.read``."""
    return lines.read(path, _run, "ladder")


def _run(content: dict[str, Any]) -> Run:
    summary = Summary.from_json(content["summary"])
    fields = {**content, "command": tuple(content["command"]), "summary": summary}
    fields["ranks_per_host"] = fields.pop("room", None)
    machine = str(fields.get("machine", ""))
    fields["machine"] = machine.replace(" a host", " per host")  # as ladders said it once
    run = Run(**fields)
    run.check()
    return run


def append_line(path: Path, run: Run) -> None:
    """Add a run to a file of lines."""
    content = {**vars(run), "summary": run.summary.to_json()}
    content["room"] = content.pop("ranks_per_host")
    lines.append(path, content, _run)


def table_text(runs: Sequence[Run]) -> str:
    """Return the runs as CSV; ``--from`` takes it."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for run in sorted(runs, key=lambda run: (run.ranks, run.repeat)):
        traffic = run.summary.gradient_messages
        writer.writerow(
            {
                **{key: getattr(run.summary, key, None) for key in COLUMNS},
                **{key: getattr(run, key) for key in OWN},
                "images_per_second": run.rate,
                "step_seconds": run.batch / run.rate if run.batch else None,
                **{f"{part}_seconds": run.split.get(part) for part in SPLIT},
                "messages": traffic and traffic.count,
                "gradient_bytes": traffic and traffic.bytes,
                "room": run.ranks_per_host,
            }
        )
    return out.getvalue()


def read_table(path: Path) -> list[Run]:
    """Return the runs in a CSV with the columns ranks, images_per_second, and others of ours.

    Raises:
        UsageError: it cannot be read, a column is missing, or a value is no number.
    """
    try:
        reader = csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines())
        rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"--from {path} cannot be read: {error}") from error
    names = {name.strip() for name in reader.fieldnames or ()}
    if missing := [name for name in ("ranks", "images_per_second") if name not in names]:
        raise UsageError(
            f"--from {path}: no column {' and '.join(missing)}; the first line names the columns: "
            "ranks,images_per_second"
        )
    if not rows:
        raise UsageError(f"--from {path}: no rows: nothing stands under the names of the columns")
    seen: Counter[int] = Counter()
    runs = []
    for number, cells in enumerate(rows, 2):
        values = {(k or "").strip(): v.strip() for k, v in cells.items() if isinstance(v, str)}
        row = _Row(path, number, values)
        ranks, rate = row.number("ranks", int), row.number("images_per_second", float)
        if ranks is None or rate is None:
            raise UsageError(f"--from {path}, line {number}: ranks or images_per_second is empty")
        seen[ranks] += 1
        runs.append(_from_row(row, ranks, seen[ranks], rate))
    return runs


@dataclass(frozen=True)
class _Row:
    """A row of a table that a user made: numbers are checked, and reported by file and line."""

    path: Path
    line: int
    values: Mapping[str, str]

    def number(self, name: str, kind: Callable[[str], Any]) -> Any:
        """Return the number in a column; None where it is empty or absent."""
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
            sort = "a whole number of 1 or more" if kind is int else "a number above 0"
            raise UsageError(
                f"--from {self.path}, line {self.line}: {name} {shown} is not {sort} that "
                "could have been measured"
            )
        return value


def _from_row(row: _Row, ranks: int, repeat: int, rate: float) -> Run:
    split = {part: row.number(f"{part}_seconds", float) for part in SPLIT}
    messages, nbytes = row.number("messages", int), row.number("gradient_bytes", int)
    summary = {
        **{key: row.values.get(key) or None for key in (*WORDS, "timeline")},
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
    """Return the runs in a study's directory, and in those of its sizes that were jobs.

    Raises:
        UsageError: there are none.
    """
    files = [folder / LINES, *sorted(folder.glob(f"ranks-*/{LINES}"))]
    runs = [run for file in files for run in read_lines(file)]
    if not runs:
        raise UsageError(
            f"no results in {folder} ({LINES}): give --ranks and a command after --, the --out of "
            "a ladder, or --from FILE.csv"
        )
    return runs
