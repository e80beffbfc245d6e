"""Check that runs are comparable: they may differ only in the number of ranks."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hvdtrain.commands.runs.command_options import difference
from hvdtrain.commands.runs.records import STRONG, Run
from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import Stopped

NAMED = 4  # maximum number of runs named in a message
ALWAYS = "OMP_"  # variables that also tune a single rank; those of MPI and Horovod need several
BY_LAUNCH = "OMPI_MCA_mpi_yield_when_idle"  # set by launch depending on the size


def check_comparable(runs: Sequence[Run], scaling: str, source: str) -> None:
    """Reject runs that differ in more than the number of ranks.

    Values that a run does not report are not compared. ``source``: their file or directory, for
    the message.

    Raises:
        UsageError: with the difference, and the runs.
    """
    for run in runs:
        _check_run(run, source)
    _same(runs, "the scaling", lambda run: run.scaling or None, source)
    recorded = next((run.scaling for run in runs if run.scaling), scaling)
    if recorded != scaling:
        raise UsageError(f"{source}: these are runs of --{recorded}, not --{scaling}")
    for key in ("workload", "framework", "strategy", "model", "precision"):
        _same(runs, f"the {key}", lambda run, key=key: getattr(run.summary, key), source)  # type: ignore[misc]
    if scaling == STRONG:
        _same(runs, "the global batch", lambda run: run.batch, source)
    else:
        hint = "; for a constant global batch, use --strong"
        _same(runs, "the batch per rank", _batch_per_rank, source, hint)
    _same(runs, "the machine", lambda run: run.machine or None, source)
    _same(runs, "the number of ranks that share a host", lambda run: run.ranks_per_host, source)
    _same(runs, "the number of threads per rank", lambda run: run.threads, source)
    for ranks in sorted({run.ranks for run in runs}):
        repeats = [run for run in runs if run.ranks == ranks]
        label = f"the number of hosts of {ranks} ranks"
        _same(repeats, label, lambda run: run.summary.hosts, source)
    _same(runs, "the command", lambda run: shlex.join(run.command) or None, source)
    _check_variables(runs, source)


def _check_variables(runs: Sequence[Run], source: str) -> None:
    """Reject runs with different tuning variables, if their summaries have them.

    The trainers tune MPI and Horovod only with two or more ranks, so one rank may differ.
    """
    names = {name for run in runs for name in _variables(run) or ()} - {BY_LAUNCH}
    for name in sorted(names):
        tuned = [run for run in runs if run.ranks > 1 or name.startswith(ALWAYS)]
        _same(tuned, name, lambda run, name=name: _variable(run, name), source)  # type: ignore[misc]


def _variable(run: Run, name: str) -> str | None:
    """Return the value of a variable in a run; None if the run reports no variables."""
    variables = _variables(run)
    return None if variables is None else variables.get(name, "not set")


def _variables(run: Run) -> Mapping[str, str] | None:
    variables = (run.summary.environment or {}).get("variables")
    return variables if isinstance(variables, Mapping) else None


def _batch_per_rank(run: Run) -> float | None:
    return None if run.batch is None else run.batch / run.ranks


def _check_run(run: Run, source: str) -> None:
    """Reject a run that does not measure its number of ranks undisturbed."""
    summary = run.summary
    if summary.timeline:
        raise UsageError(
            f"{source}: run {run.name} recorded a timeline ({summary.timeline}), which slows it "
            "down: repeat it without --timeline and HOROVOD_TIMELINE"
        )
    traffic = summary.gradient_messages
    if traffic and not (traffic.count > 0 and traffic.bytes > 0):
        raise UsageError(
            f"{source}: gradient_messages in the summary of run {run.name} is {traffic.count} of "
            f"{traffic.bytes} bytes: both must be at least 1"
        )
    if summary.world_size not in (None, run.ranks):
        raise UsageError(f"{source}: run {run.name} reports a world_size of {summary.world_size}")
    if summary.stopped == Stopped.PREEMPTED:
        raise UsageError(f"{source}: run {run.name} was preempted; remove it")


def _same(
    runs: Iterable[Run], label: str, key: Callable[[Run], Any], source: str, hint: str = ""
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


def check_continues(runs: Sequence[Run], new: Run, source: str) -> None:
    """Reject a new run that differs from the existing ones, before it starts.

    ``new``: the record of the next run, without a summary.

    Raises:
        UsageError: with the difference.
    """
    for run in runs:
        if run.command != new.command:
            raise UsageError(
                f"{source} has runs of another command: "
                f"{difference(run.command, new.command)} (run {run.name}). Use another --out"
            )
        for label, old, now in (
            ("scaling", run.scaling, new.scaling),
            ("machine", run.machine, new.machine),
            ("share of a host", _share(run.ranks_per_host), _share(new.ranks_per_host)),
            ("threads per rank", run.threads, new.threads),
        ):
            if old != now:
                raise UsageError(
                    f"{source} has runs of another {label}: {old} in run {run.name}, now {now}. "
                    "Use another --out" + _remedy(label, run, new)
                )


def _share(ranks: int | None) -> str:
    return f"1 of {ranks} ranks" if ranks else "the whole host for each rank"


def _remedy(label: str, run: Run, new: Run) -> str:
    if label == "threads per rank" and run.threads:
        return f", or --threads {run.threads}"
    old, now = run.ranks_per_host, new.ranks_per_host
    if label == "share of a host" and old and now:
        hint = f"; with --ppn {now} from the start, more ranks can be added later"
        return f", or --ppn {old}" if now < old else hint
    return ""
