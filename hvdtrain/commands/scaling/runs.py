"""The runs of a scaling study, as JSON Lines or as a CSV table, and whether they are comparable.

A line of ``results.jsonl`` has ``ranks``, ``repeat`` (from 1), ``scaling`` (weak or strong), the
``command`` as typed, ``machine`` and ``cores`` of the host that started it, the ``threads`` per
rank (null: chosen by the program), ``ranks_per_host`` (those that share the cores of a host), and
the complete ``summary`` of the run.
"""

from __future__ import annotations

import csv
import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from hvdtrain.commands.study.curves import Evaluation, evaluations
from hvdtrain.commands.study.run import curves_of, read_records
from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import Stopped, Summary
from hvdtrain.system.files import read_regular
from hvdtrain.system.output.tables import write_csv

LINES, TABLE = "results.jsonl", "results.csv"  # all runs, and their table
OUT = Path("scaling")  # default directory
WEAK, STRONG = "weak", "strong"
SPLIT = ("data", "compute", "communication", "waiting", "undivided")  # parts of a step
TEXT_COLUMNS = ("workload", "framework", "strategy", "model", "precision")
# Columns of numbers, with their type and least value.
NUMBERS: dict[str, tuple[Callable[[str], Any], float]] = {
    "images_per_second": (float, 1e-9),
    **dict.fromkeys((f"{part}_seconds" for part in SPLIT), (float, 0)),
    **dict.fromkeys(
        ("ranks", "messages", "gradient_bytes", "global_batch_size", "hosts"), (int, 1)
    ),
    **dict.fromkeys(("cores", "threads", "ranks_per_host"), (int, 1)),
}
NAMED = 4  # maximum number of runs named in a message
ALWAYS = "OMP_"  # variables that also tune a single rank; those of MPI and Horovod need several
BY_LAUNCH = "OMPI_MCA_mpi_yield_when_idle"  # set by launch depending on the size


@dataclass(frozen=True)
class MeasuredRun:
    """One measured run."""

    ranks: int
    repeat: int  # from 1
    summary: Summary  # written by the trainer, or from the columns of a table
    scaling: str = WEAK
    command: tuple[str, ...] = ()
    machine: str = ""  # processor and cores, or GPUs, of a host
    cores: int | None = None  # of a host, for this job; None if unknown, or if GPUs are used
    threads: int | None = None  # per rank, if set by the sweep
    ranks_per_host: int | None = None  # that share a host's cores; None: those that run

    @property
    def variant(self) -> str:
        """The variant of the study: its number of ranks."""
        return str(self.ranks)

    @property
    def name(self) -> str:
        """Ranks and repeat, as in the names of its files: ``4-1``."""
        return f"{self.ranks}-{self.repeat}"

    @property
    def share(self) -> str:
        """The share of a host that each rank had, in words."""
        ranks = self.ranks_per_host
        return f"1 of {ranks} ranks" if ranks else "the whole host for each rank"

    @property
    def per_host(self) -> int:
        """Ranks on the fullest host; all of them if the number of hosts is unknown."""
        return math.ceil(self.ranks / (self.summary.hosts or 1))

    @property
    def rate(self) -> float:
        """Images per second over all ranks; 0 before the run."""
        return float(self.summary.images_per_second_mean or 0)

    @property
    def batch(self) -> int | None:
        """Images per step over all ranks, if known."""
        return self.summary.global_batch_size

    @property
    def variables(self) -> Mapping[str, str] | None:
        """The tuning variables of the run; None if it does not report them."""
        variables = (self.summary.environment or {}).get("variables")
        return variables if isinstance(variables, Mapping) else None

    @property
    def split(self) -> dict[str, float]:
        """Seconds per step by part; only the parts that the trainer measured."""
        parts = {part: getattr(self.summary.step_split, part, None) for part in SPLIT}
        return {part: seconds for part, seconds in parts.items() if seconds is not None}


def read_lines(path: Path) -> list[MeasuredRun]:
    """Return the runs in a JSON Lines file; see ``read_records``."""
    return read_records(path, MeasuredRun, "sweep")


def write_table(path: Path, runs: Sequence[MeasuredRun]) -> None:
    """Write the runs as CSV, readable by ``--from``.

    Raises:
        UsageError: it cannot be written.
    """
    cells = [_cells(run) for run in sorted(runs, key=lambda run: (run.ranks, run.repeat))]
    write_csv(path, list(cells[0]), [list(row.values()) for row in cells], "--out")


def _cells(run: MeasuredRun) -> dict[str, object]:
    """Return a row of the table, by column."""
    summary, traffic = run.summary, run.summary.gradient_messages
    return {
        "ranks": run.ranks,
        "repeat": run.repeat,
        "images_per_second": run.rate,
        "images_per_second_std": summary.images_per_second_std,
        "step_seconds": run.batch / run.rate if run.batch else None,
        **{f"{part}_seconds": run.split.get(part) for part in SPLIT},
        "messages": traffic and traffic.count,
        "gradient_bytes": traffic and traffic.bytes,
        "scaling": run.scaling,
        **{key: getattr(summary, key) for key in TEXT_COLUMNS},
        "global_batch_size": run.batch,
        "hosts": summary.hosts,
        "machine": run.machine,
        "cores": run.cores,
        "threads": run.threads,
        "ranks_per_host": run.ranks_per_host,
        "timeline": summary.timeline,
    }


def read_table(path: Path) -> list[MeasuredRun]:
    """Return the runs in a CSV with ranks, images_per_second, and more columns of ``write_table``.

    Raises:
        UsageError: it cannot be read, a column is missing, or a value is not a number.
    """
    try:
        reader = csv.DictReader(read_regular(path).decode("utf-8-sig").splitlines())
        rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--from {path} cannot be read: {reason}") from error
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
        texts = {(k or "").strip(): v.strip() for k, v in cells.items() if isinstance(v, str)}
        values = _numbers(texts, f"--from {path}, line {number}")
        ranks = values.get("ranks")
        if ranks is None or "images_per_second" not in values:
            raise UsageError(f"--from {path}, line {number}: ranks or images_per_second is empty")
        repeats[ranks] += 1
        runs.append(_from_row(texts, values, repeats[ranks]))
    return runs


def _numbers(texts: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return the numbers in a row of a user's table by column; empty cells are left out."""
    values: dict[str, Any] = {}
    for name, (kind, least) in NUMBERS.items():
        text = texts.get(name)
        if not text:
            continue
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            valid = "a whole number of at least 1" if kind is int else "a positive number"
            raise UsageError(f"{where}: {name} {text!r} is not {valid}")
        values[name] = value
    return values


def _from_row(texts: Mapping[str, str], values: Mapping[str, Any], repeat: int) -> MeasuredRun:
    messages, nbytes = values.get("messages"), values.get("gradient_bytes")
    summary = {
        **{key: texts.get(key) or None for key in (*TEXT_COLUMNS, "timeline")},
        **{key: values.get(key) for key in ("global_batch_size", "hosts")},
        "world_size": values["ranks"],
        "images_per_second_mean": values["images_per_second"],
        "step_split": {part: values.get(f"{part}_seconds") for part in SPLIT},
        "gradient_messages": {"count": messages, "bytes": nbytes} if messages and nbytes else None,
    }
    return MeasuredRun(
        values["ranks"],
        repeat,
        Summary.from_json(summary),
        scaling=texts.get("scaling", ""),
        machine=texts.get("machine", ""),
        cores=values.get("cores"),
        threads=values.get("threads"),
        ranks_per_host=values.get("ranks_per_host"),
    )


def read_folder(folder: Path) -> list[MeasuredRun]:
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


def read_evaluations(
    runs: Sequence[MeasuredRun], folder: Path, metric: str
) -> dict[int, list[list[Evaluation]]]:
    """Return the evaluations of each run by ranks; sizes submitted as jobs have subdirectories."""
    evaluated: dict[int, list[list[Evaluation]]] = {run.ranks: [] for run in runs}
    for run in runs:
        for base in (folder, folder / f"ranks-{run.ranks}"):
            if curves := curves_of(base, run):
                evaluated[run.ranks].append(evaluations(curves, metric))
                break
    return evaluated


def check_comparable(runs: Sequence[MeasuredRun], scaling: str, source: str) -> None:
    """Reject runs that differ in more than the number of ranks.

    Values that a run does not report are not compared. ``source``: their file or directory, for
    the message.

    Raises:
        UsageError: with the difference, and the runs.
    """
    for run in runs:
        _check_run(run, source)
    same = partial(_same, source=source)
    same(runs, "the scaling", lambda run: run.scaling or None)
    recorded = next((run.scaling for run in runs if run.scaling), scaling)
    if recorded != scaling:
        raise UsageError(f"{source}: these are runs of --{recorded}, not --{scaling}")
    for key in TEXT_COLUMNS:
        same(runs, f"the {key}", attrgetter(f"summary.{key}"))
    if scaling == STRONG:
        same(runs, "the global batch", attrgetter("batch"))
    else:
        hint = "; for a constant global batch, use --strong"
        same(runs, "the batch per rank", lambda run: run.batch and run.batch / run.ranks, hint=hint)
    same(runs, "the machine", lambda run: run.machine or None)
    same(runs, "the number of ranks that share a host", attrgetter("ranks_per_host"))
    same(runs, "the number of threads per rank", attrgetter("threads"))
    for ranks in sorted({run.ranks for run in runs}):
        repeats = [run for run in runs if run.ranks == ranks]
        same(repeats, f"the number of hosts of {ranks} ranks", attrgetter("summary.hosts"))
    same(runs, "the command", lambda run: shlex.join(run.command) or None)
    # The trainers tune MPI and Horovod only with two or more ranks, so one rank may differ.
    for name in sorted({name for run in runs for name in run.variables or ()} - {BY_LAUNCH}):
        tuned = [
            run
            for run in runs
            if run.variables is not None and (run.ranks > 1 or name.startswith(ALWAYS))
        ]
        same(tuned, name, partial(_variable, name))


def _variable(name: str, run: MeasuredRun) -> str:
    return (run.variables or {}).get(name, "not set")


def _check_run(run: MeasuredRun, source: str) -> None:
    """Reject a run that does not measure its number of ranks undisturbed."""
    summary = run.summary
    if summary.timeline:
        raise UsageError(
            f"{source}: run {run.name} recorded a timeline ({summary.timeline}), which slows it "
            "down: repeat it without --timeline and HOROVOD_TIMELINE"
        )
    if summary.world_size not in (None, run.ranks):
        raise UsageError(f"{source}: run {run.name} reports a world_size of {summary.world_size}")
    if summary.stopped == Stopped.PREEMPTED:
        raise UsageError(f"{source}: run {run.name} was preempted; remove it")


def _same(
    runs: Iterable[MeasuredRun],
    label: str,
    key: Callable[[MeasuredRun], Any],
    source: str,
    hint: str = "",
) -> None:
    """Raise unless ``key`` is the same for all runs that report it."""
    reported = [(run, key(run)) for run in runs if key(run) is not None]
    counts = Counter(value for _, value in reported)
    if len(counts) < 2:
        return
    parts = []
    for value, _ in counts.most_common():
        names = [run.name for run, run_value in reported if run_value == value]
        rest = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        shown = f"{value:g}" if isinstance(value, float) else value
        parts.append(f"{shown} in {', '.join(names[:NAMED])}{rest}")
    raise UsageError(
        f"{source}: {label} is not the same in all runs (ranks-repeat): {'; '.join(parts)}. "
        f"Use a separate study for each{hint}"
    )
