"""The runs of a ladder: which, in what order, by what command; and carrying one out."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch import launch
from hvdtrain.launch.hosts import Allocation
from hvdtrain.launch.layout import asked_threads, fair_threads, lay_out, own_cores
from hvdtrain.launch.machine import gpus, physical_cores, processor
from hvdtrain.launch.run import TIMED_OUT, Command, run
from hvdtrain.measure.records import Run

log = logging.getLogger(__name__)

SAID = 12  # last lines of a failed run's output that are shown


@dataclass(frozen=True)
class Plan:
    """A ladder as asked for."""

    words: tuple[str, ...]
    """The command that each rank runs, with the batch that the scaling needs."""
    sizes: tuple[int, ...]
    """Numbers of ranks, rising."""
    repeats: int
    scaling: str
    """``weak``: the batch of a rank stays; ``strong``: that of all ranks."""
    folder: Path
    ppn: int | None = None
    threads: int | None = None
    room: int | None = None
    """Ranks to share a host out among at every size; see ``room``."""
    hosts: str | None = None
    hostfile: Path | None = None
    timeout: float | None = None
    """Seconds that one run may take."""

    def stem(self, ranks: int, repeat: int) -> Path:
        """Where a run's files lie, without their endings."""
        return self.folder / "runs" / f"{ranks}-{repeat}"


def order(sizes: Sequence[int], repeats: int) -> Iterator[tuple[int, int]]:
    """The runs as (ranks, repeat): up the ladder, then down, then up ...

    A machine that grows slower in the meantime then favours no size.
    """
    for repeat in range(1, repeats + 1):
        for ranks in sorted(sizes, reverse=repeat % 2 == 0):
            yield ranks, repeat


def run_words(plan: Plan, ranks: int, repeat: int) -> list[str]:
    """The words of one run: those of the ladder, and the files of this run."""
    stem = plan.stem(ranks, repeat)
    return [*plan.words, f"--summary={stem}.json", f"--metrics={stem}.jsonl"]


def command(
    plan: Plan, ranks: int, repeat: int, environ: Mapping[str, str] = os.environ
) -> Command:
    """What one run starts.

    Raises:
        UsageError: the ranks do not fit on the hosts, or there is no MPI.
    """
    return launch.command(
        ranks,
        run_words(plan, ranks, repeat),
        ppn=None if plan.ppn is None else min(plan.ppn, ranks),
        threads=plan.threads,
        room=plan.room,
        hosts=plan.hosts,
        hostfile=plan.hostfile,
        environ=environ,
    )


def room(sizes: Sequence[int], ppn: int | None, hosts: Allocation) -> int:
    """Ranks on the fullest host: at every size, each rank gets what it has left for each.

    Left alone, one rank takes all cores of its host and two take half of them each: then more
    ranks would be no more hardware, and no efficiency could come near 1.

    Args:
        sizes: numbers of ranks.
        ppn: ranks on a host; None: each host is filled.
        hosts: where they go.

    Raises:
        UsageError: they do not fit.
    """
    return ppn or max(lay_out(ranks, hosts).per_host for ranks in sizes)


def threads(room: int, environ: Mapping[str, str]) -> int | None:
    """Threads of a rank at every size; None where that is not for the ladder to say."""
    given = asked_threads(environ)
    if given.isdecimal() and int(given):
        return int(given)
    return fair_threads(room, own_cores(physical_cores(), environ), gpus(environ), environ)


def outline(plan: Plan, ranks: int, repeat: int, environ: Mapping[str, str] = os.environ) -> Run:
    """A run as far as it is known before it has begun: without a summary."""
    machine, cores = describe_machine(environ)
    return Run(
        ranks=ranks,
        repeat=repeat,
        summary={},
        scaling=plan.scaling,
        command=plan.words,
        machine=machine,
        cores=cores,
        threads=plan.threads,
        room=plan.room,
    )


def carry_out(plan: Plan, ranks: int, repeat: int) -> Run:
    """Start the ranks, wait for them, and read what they measured.

    Raises:
        UsageError: see ``command``.
        HvdtrainError: the run failed; what it said is kept beside its files.
    """
    stem = plan.stem(ranks, repeat)
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {plan.folder}: {error.strerror}") from error
    files = {end: stem.with_name(stem.name + end) for end in (".json", ".jsonl", ".log")}
    for file in files.values():  # of a run that was broken off
        file.unlink(missing_ok=True)
    result = run(command(plan, ranks, repeat), timeout=plan.timeout)
    files[".log"].write_text(f"{result.command.show()}\n{result.output}")
    if not result.ok:
        why = "took too long" if result.exit_code == TIMED_OUT else f"exit code {result.exit_code}"
        for line in result.output.splitlines()[-SAID:]:
            log.info("  %s", line)
        raise HvdtrainError(
            f"the run on {_ranks(ranks)} failed ({why}): its end stands above, all that it said in "
            f"{files['.log']}. The runs before it are kept: the same command goes on from there"
        )
    try:
        summary = json.loads(files[".json"].read_text())
        rate = float(summary["images_per_second_mean"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HvdtrainError(
            f"the run on {_ranks(ranks)} left no throughput in {files['.json']} ({error!r}): the "
            "command must take --summary FILE as hvdtrain's trainers do, and take a step or more"
        ) from error
    if not rate > 0:
        raise HvdtrainError(f"{files['.json']}: {rate} images/s is no throughput")
    return replace(outline(plan, ranks, repeat), summary=summary)


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number > 1 else ''}"


def describe_machine(environ: Mapping[str, str]) -> tuple[str, int | None]:
    """What this host computes with, in words, and its cores (None where GPUs compute)."""
    number = gpus(environ)
    if number:
        return f"{number} GPU{'s' if number > 1 else ''} a host", None
    cores = physical_cores()
    return f"{processor()}, {cores} core{'s' if cores > 1 else ''} a host", cores
