"""Whether runs belong in one table: what must be the same in all of them."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.measure.records import STRONG, Run

NAMED = 4  # runs that a message names
ALWAYS = "OMP_"  # variables that tune one rank, too; those of MPI and Horovod tune two and more
BY_LAUNCH = "OMPI_MCA_mpi_yield_when_idle"  # launch sets it for a size as that needs it


def check_alike(runs: Sequence[Run], scaling: str, source: str) -> None:
    """Refuse runs that differ in more than the number of ranks.

    What a run does not tell is not compared.

    Args:
        runs: of one table.
        scaling: ``weak`` or ``strong``.
        source: where they come from, for the message.

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
        _same(runs, f"the {key}", lambda run, key=key: run.summary.get(key), source)  # type: ignore[misc]
    if scaling == STRONG:
        _same(runs, "the batch of all ranks", lambda run: run.batch, source)
    else:
        hint = "; where the batch of all ranks is to stay, say --strong"
        _same(runs, "the batch of a rank", _batch_of_a_rank, source, hint)
    _same(runs, "the machine", lambda run: run.machine or None, source)
    _same(runs, "the number of ranks that share a host", lambda run: run.room, source)
    _same(runs, "the number of threads of a rank", lambda run: run.threads, source)
    for ranks in sorted({run.ranks for run in runs}):
        same = [run for run in runs if run.ranks == ranks]
        label = f"the number of hosts of {ranks} ranks"
        _same(same, label, lambda run: run.summary.get("hosts"), source)
    _same(runs, "the command", lambda run: shlex.join(run.command) or None, source)
    _check_variables(runs, source)


def _check_variables(runs: Sequence[Run], source: str) -> None:
    """Refuse runs that were tuned differently, as far as their summaries tell by what variables.

    The trainers tune MPI and Horovod where there are two ranks or more, so there one rank differs.
    """
    names = {name for run in runs for name in _variables(run) or ()} - {BY_LAUNCH}
    for name in sorted(names):
        some = [run for run in runs if run.ranks > 1 or name.startswith(ALWAYS)]
        _same(some, name, lambda run, name=name: _set_to(run, name), source)  # type: ignore[misc]


def _set_to(run: Run, name: str) -> str | None:
    """The value of a variable in a run; None where the run tells of none."""
    told = _variables(run)
    return None if told is None else told.get(name, "not set")


def _variables(run: Run) -> Mapping[str, str] | None:
    environment = run.summary.get("environment")
    found = environment.get("variables") if isinstance(environment, Mapping) else None
    return found if isinstance(found, Mapping) else None


def _batch_of_a_rank(run: Run) -> float | None:
    return None if run.batch is None else run.batch / run.ranks


def _check_run(run: Run, source: str) -> None:
    """Refuse a run that is no measurement of its number of ranks."""
    timeline, size = run.summary.get("timeline"), run.summary.get("world_size", run.ranks)
    if timeline:
        raise UsageError(
            f"{source}: run {run.name} recorded a timeline ({timeline}), which slows it down: "
            "measure without --timeline and HOROVOD_TIMELINE"
        )
    _check_traffic(run, source)
    if size != run.ranks:
        raise UsageError(f"{source}: run {run.name} says that its world was of {size} ranks")
    if run.summary.get("stopped") == "preempted":
        raise UsageError(f"{source}: run {run.name} was ended before its time; remove it")


def _check_traffic(run: Run, source: str) -> None:
    told = run.summary.get("gradient_messages")
    if not told:
        return
    counts = [told.get(key) for key in ("count", "bytes")] if isinstance(told, Mapping) else [None]
    if not all(isinstance(count, int) and count > 0 for count in counts):
        raise UsageError(
            f"{source}: gradient_messages in the summary of run {run.name} is {told}: it takes "
            "count and bytes, whole numbers of 1 or more"
        )


def _same(
    runs: Iterable[Run], label: str, key: Callable[[Run], Any], source: str, hint: str = ""
) -> None:
    """Raise unless ``key`` is the same for all runs that tell it."""
    told = [(run, key(run)) for run in runs if key(run) is not None]
    counts = Counter(value for _, value in told)
    if len(counts) < 2:
        return
    parts = []
    for value, _ in counts.most_common():
        names = [run.name for run, other in told if other == value]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        shown = f"{value:g}" if isinstance(value, float) else value
        parts.append(f"{shown} in {', '.join(names[:NAMED])}{more}")
    raise UsageError(
        f"{source}: {label} is not the same in all runs (ranks-repeat): {'; '.join(parts)}. "
        f"Keep each in a study of its own{hint}"
    )


def check_going_on(done: Sequence[Run], new: Run, source: str) -> None:
    """Refuse to add to runs of another kind, before anything is started.

    Args:
        done: the runs that are there.
        new: the next run, as far as it is known before: without a summary.
        source: where the runs are.

    Raises:
        UsageError: naming what differs.
    """
    for run in done:
        words = [word for word in run.command if word not in new.command]
        others = [word for word in new.command if word not in run.command]
        for label, old, now in (
            ("scaling", run.scaling, new.scaling),
            ("machine", run.machine, new.machine),
            ("share of a host", _share(run.room), _share(new.room)),
            ("threads a rank", run.threads, new.threads),
            ("command", shlex.join(words) or "...", shlex.join(others) or "..."),
        ):
            differs = run.command != new.command if label == "command" else old != now
            if differs:
                raise UsageError(
                    f"{source} holds runs of another {label}: {old} in run {run.name}, now {now}. "
                    "Give another --out" + _way_out(label, run, new)
                )


def _share(room: int | None) -> str:
    return f"1 of {room} ranks" if room else "all that there is for a rank"


def _way_out(label: str, run: Run, new: Run) -> str:
    if label == "threads a rank" and run.threads:
        return f", or --threads {run.threads}"
    if label == "share of a host" and run.room and new.room:
        if new.room < run.room:
            return f", or --ppn {run.room}"
        return f"; with --ppn {new.room} from the start, more ranks can be added later"
    return ""
