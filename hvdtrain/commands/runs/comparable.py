"""Whether runs belong in one table: what must be the same in all of them."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hvdtrain.commands.runs.records import STRONG, Run
from hvdtrain.commands.runs.words import difference
from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import Stopped

NAMED = 4  # runs that a message names
ALWAYS = "OMP_"  # variables that tune one rank, too; those of MPI and Horovod tune two and more
BY_LAUNCH = "OMPI_MCA_mpi_yield_when_idle"  # launch sets it for a size as that needs it


def check_comparable(runs: Sequence[Run], scaling: str, source: str) -> None:
    """Refuse runs that differ in more than the number of ranks.

    What a run does not report is not compared. ``source``: where they come from, for the message.

    Raises:
        UsageError: naming what differs, in which runs.
    """
    for run in runs:
        _check_run(run, source)
    _same(runs, "the scaling", lambda run: run.scaling or None, source)
    given = next((run.scaling for run in runs if run.scaling), scaling)
    if given != scaling:
        raise UsageError(f"{source}: these are runs of --{given}, not --{scaling}")
    for key in ("workload", "framework", "strategy", "model", "precision"):
        _same(runs, f"the {key}", lambda run, key=key: getattr(run.summary, key), source)  # type: ignore[misc]
    if scaling == STRONG:
        _same(runs, "the global batch", lambda run: run.batch, source)
    else:
        hint = "; to keep the global batch, say --strong"
        _same(runs, "the batch per rank", _batch_per_rank, source, hint)
    _same(runs, "the machine", lambda run: run.machine or None, source)
    _same(runs, "the number of ranks that share a host", lambda run: run.ranks_per_host, source)
    _same(runs, "the number of threads per rank", lambda run: run.threads, source)
    for ranks in sorted({run.ranks for run in runs}):
        same = [run for run in runs if run.ranks == ranks]
        label = f"the number of hosts of {ranks} ranks"
        _same(same, label, lambda run: run.summary.hosts, source)
    _same(runs, "the command", lambda run: shlex.join(run.command) or None, source)
    _check_variables(runs, source)


def _check_variables(runs: Sequence[Run], source: str) -> None:
    """Refuse runs that were tuned differently, as far as their summaries hold the variables.

    The trainers tune MPI and Horovod where there are two ranks or more, so there one rank differs.
    """
    names = {name for run in runs for name in _variables(run) or ()} - {BY_LAUNCH}
    for name in sorted(names):
        some = [run for run in runs if run.ranks > 1 or name.startswith(ALWAYS)]
        _same(some, name, lambda run, name=name: _set_to(run, name), source)  # type: ignore[misc]


def _set_to(run: Run, name: str) -> str | None:
    """Return the value of a variable in a run; None where the run reports none."""
    reported = _variables(run)
    return None if reported is None else reported.get(name, "not set")


def _variables(run: Run) -> Mapping[str, str] | None:
    found = (run.summary.environment or {}).get("variables")
    return found if isinstance(found, Mapping) else None


def _batch_per_rank(run: Run) -> float | None:
    return None if run.batch is None else run.batch / run.ranks


def _check_run(run: Run, source: str) -> None:
    """Refuse a run that is no measurement of its number of ranks."""
    summary = run.summary
    if summary.timeline:
        raise UsageError(
            f"{source}: run {run.name} recorded a timeline ({summary.timeline}), which slows it "
            "down: measure without --timeline and HOROVOD_TIMELINE"
        )
    traffic = summary.gradient_messages
    if traffic and not (traffic.count > 0 and traffic.bytes > 0):
        raise UsageError(
            f"{source}: gradient_messages in the summary of run {run.name} is {traffic.count} of "
            f"{traffic.bytes} bytes: both have to be 1 or more"
        )
    if summary.world_size not in (None, run.ranks):
        raise UsageError(
            f"{source}: run {run.name} reports that its world was of {summary.world_size} ranks"
        )
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
        names = [run.name for run, other in reported if other == value]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        shown = f"{value:g}" if isinstance(value, float) else value
        parts.append(f"{shown} in {', '.join(names[:NAMED])}{more}")
    raise UsageError(
        f"{source}: {label} is not the same in all runs (ranks-repeat): {'; '.join(parts)}. "
        f"Keep each in a study of its own{hint}"
    )


def check_continues(done: Sequence[Run], new: Run, source: str) -> None:
    """Refuse to add to runs of another kind, before anything is started.

    ``new`` is the next run, as far as it is known before: without a summary.

    Raises:
        UsageError: naming what differs.
    """
    for run in done:
        if run.command != new.command:
            raise UsageError(
                f"{source} holds runs of another command: "
                f"{difference(run.command, new.command)} (run {run.name}). Give another --out"
            )
        for label, old, now in (
            ("scaling", run.scaling, new.scaling),
            ("machine", run.machine, new.machine),
            ("share of a host", _share(run.ranks_per_host), _share(new.ranks_per_host)),
            ("threads per rank", run.threads, new.threads),
        ):
            if old != now:
                raise UsageError(
                    f"{source} holds runs of another {label}: {old} in run {run.name}, now {now}. "
                    "Give another --out" + _way_out(label, run, new)
                )


def _share(ranks: int | None) -> str:
    return f"1 of {ranks} ranks" if ranks else "all of it for each rank alone"


def _way_out(label: str, run: Run, new: Run) -> str:
    if label == "threads per rank" and run.threads:
        return f", or --threads {run.threads}"
    old, now = run.ranks_per_host, new.ranks_per_host
    if label == "share of a host" and old and now:
        more = f"; with --ppn {now} from the start, more ranks can be added later"
        return f", or --ppn {old}" if now < old else more
    return ""
