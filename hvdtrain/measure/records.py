"""The runs of a scaling study: one line of JSON each, or rows of a table; read, written, compared.

A line of ``results.jsonl`` holds ``ranks``, ``repeat`` (from 1), ``scaling`` (weak or strong), the
``command`` as the user gave it, ``machine`` and ``cores`` of the host that started it, the
``threads`` that each rank was given (null: its own choice), the ``room`` (ranks that each host was
shared out among), and the whole ``summary`` of the run.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.measure.cells import Cells

log = logging.getLogger(__name__)

LINES = "results.jsonl"
WEAK, STRONG = "weak", "strong"
NO_RUN = (ValueError, KeyError, TypeError, OverflowError)  # what reading a broken line raises
SPLIT = ("data", "compute", "communication", "waiting", "undivided")  # parts of a step
COLUMNS = (
    "ranks",
    "repeat",
    "images_per_second",
    "images_per_second_std",
    "step_seconds",
    *(f"{part}_seconds" for part in SPLIT),
    "messages",
    "gradient_bytes",
    "scaling",
    "workload",
    "framework",
    "strategy",
    "model",
    "precision",
    "global_batch_size",
    "hosts",
    "machine",
    "cores",
    "threads",
    "room",
    "timeline",
)


@dataclass(frozen=True)
class Run:
    """One measured run."""

    ranks: int
    repeat: int
    """Counted from 1."""
    summary: Mapping[str, Any]
    """What the trainer wrote; of a table's row, the keys that its columns tell."""
    scaling: str = WEAK
    command: tuple[str, ...] = ()
    machine: str = ""
    """Processor and cores, or GPUs, of a host."""
    cores: int | None = None
    """Of a host; None where not known, or where GPUs compute."""
    threads: int | None = None
    """Of a rank, if the ladder fixed them."""
    room: int | None = None
    """Ranks that each host was shared out among, also where there were fewer; None: as many."""

    @property
    def name(self) -> str:
        """Ranks and repeat, as its files are called: ``4-1``."""
        return f"{self.ranks}-{self.repeat}"

    @property
    def rate(self) -> float:
        """Images per second over all ranks."""
        return float(self.summary["images_per_second_mean"])

    @property
    def batch(self) -> int | None:
        """Images a step over all ranks, if known."""
        return self.summary.get("global_batch_size")

    @property
    def split(self) -> Mapping[str, Any]:
        """Seconds a step by part, as far as the trainer could tell them apart."""
        return self.summary.get("step_split") or {}


def read_lines(path: Path) -> list[Run]:
    """The runs in a file of lines; none where it is not there.

    A last line that is cut, as a crash leaves it, is passed over: that run is not done.

    Raises:
        UsageError: it cannot be read, or another line is no run.
    """
    try:
        lines = path.read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    runs = []
    for number, line in enumerate(lines, 1):
        try:
            runs.append(_run(json.loads(line)))
        except NO_RUN as error:
            if number == len(lines) and not line.endswith("\n"):
                log.warning("%s: the last line is cut, so its run is repeated", path)
                break
            raise UsageError(
                f"{path}, line {number}: not a run of a ladder ({error!r}); remove the line, and "
                "the ladder repeats its run"
            ) from error
    return runs


def _run(content: dict[str, Any]) -> Run:
    run = Run(**{**content, "command": tuple(content["command"])})
    if not (run.ranks >= 1 and math.isfinite(run.rate) and run.rate > 0):
        raise ValueError(f"{run.rate} images/s on {run.ranks} ranks")
    return run


def append_line(path: Path, run: Run) -> None:
    """Add a run to a file of lines; what a crash cut off at its end goes, if it is no run."""
    with path.open("a+b") as file:
        file.seek(0)
        lines = file.read().splitlines(keepends=True)
        line = json.dumps(asdict(run)).encode() + b"\n"
        if lines and not lines[-1].endswith(b"\n"):
            try:
                _run(json.loads(lines[-1]))  # as read_lines counts it
                line = b"\n" + line
            except NO_RUN:
                file.truncate(sum(map(len, lines[:-1])))
        file.write(line)


def table_text(runs: Sequence[Run]) -> str:
    """The runs as CSV; ``--from`` takes it."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for run in sorted(runs, key=lambda run: (run.ranks, run.repeat)):
        traffic = run.summary.get("gradient_messages") or {}
        writer.writerow(
            {
                **{key: run.summary.get(key) for key in COLUMNS},
                "ranks": run.ranks,
                "repeat": run.repeat,
                "images_per_second": run.rate,
                "step_seconds": run.batch / run.rate if run.batch else None,
                **{f"{part}_seconds": run.split.get(part) for part in SPLIT},
                "messages": traffic.get("count"),
                "gradient_bytes": traffic.get("bytes"),
                "scaling": run.scaling,
                "machine": run.machine,
                "cores": run.cores,
                "threads": run.threads,
                "room": run.room,
            }
        )
    return out.getvalue()


def read_table(path: Path) -> list[Run]:
    """The runs in a CSV with the columns ranks and images_per_second; others of ours are heeded.

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
    for number, row in enumerate(rows, 2):
        values = {(k or "").strip(): v.strip() for k, v in row.items() if isinstance(v, str)}
        cell = Cells(path, number, values)
        ranks, rate = cell.number("ranks", int), cell.number("images_per_second", float)
        if ranks is None or rate is None:
            raise UsageError(f"--from {path}, line {number}: ranks or images_per_second is empty")
        seen[ranks] += 1
        runs.append(_row(cell, ranks, seen[ranks], rate))
    return runs


def _row(cell: Cells, ranks: int, repeat: int, rate: float) -> Run:
    words = {
        key: cell.values.get(key) or None
        for key in ("workload", "framework", "strategy", "model", "precision", "timeline")
    }
    split = {part: cell.number(f"{part}_seconds", float) for part in SPLIT}
    messages, nbytes = cell.number("messages", int), cell.number("gradient_bytes", int)
    summary = {
        **words,
        "world_size": ranks,
        "images_per_second_mean": rate,
        "global_batch_size": cell.number("global_batch_size", int),
        "hosts": cell.number("hosts", int),
        "step_split": split if any(value is not None for value in split.values()) else None,
        "gradient_messages": {"count": messages, "bytes": nbytes} if messages and nbytes else None,
    }
    return Run(
        ranks,
        repeat,
        summary,
        scaling=cell.values.get("scaling") or "",
        machine=cell.values.get("machine") or "",
        cores=cell.number("cores", int),
        threads=cell.number("threads", int),
        room=cell.number("room", int),
    )
