"""Plan the runs of a ladder, and carry out those that are missing."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.commands.launch.prepare import Request, choose_hosts, prepare
from hvdtrain.commands.runs.comparable import check_comparable, check_continues
from hvdtrain.commands.runs.records import LINES, STRONG, Run, append_line, read_lines
from hvdtrain.commands.runs.start import (
    KEPT,
    LOG,
    describe_machine,
    file_of,
    file_words,
    fullest_host,
    no_throughput,
    read_summary,
    start,
    time_left,
    why,
)
from hvdtrain.commands.runs.words import batches, check_measurable, without
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.steps.summary import Summary
from hvdtrain.system.machine.threads import equal_threads
from hvdtrain.system.output.text import duration, number, plural
from hvdtrain.system.runtime.command import Command

log = logging.getLogger(__name__)

SHOWN = 12  # last lines of a failed run's output


@dataclass(frozen=True)
class Ladder:
    """The same training at rising numbers of ranks, as asked for."""

    words: tuple[str, ...]  # the command of each rank, with the batch that the scaling needs
    sizes: tuple[int, ...]  # numbers of ranks, rising
    repeats: int
    scaling: str  # ``weak``: the batch per rank stays; ``strong``: the global batch
    folder: Path
    ppn: int | None = None
    threads: int | None = None
    ranks_per_host: int | None = None  # to share a host out among at every size; `fullest_host`
    hosts: str | None = None
    hostfile: Path | None = None
    timeout: float | None = None  # seconds that one run may take

    def stem(self, ranks: int, repeat: int) -> Path:
        """Return where a run's files lie, without their endings."""
        return self.folder / "runs" / f"{ranks}-{repeat}"


def check_words(words: Sequence[str], scaling: str, environ: Mapping[str, str]) -> None:
    """Refuse a command that cannot be measured as it is.

    Raises:
        UsageError: naming the option.
    """
    check_measurable(words, environ)
    own, total = batches(words)
    if scaling == STRONG and total is None and own is None:
        raise UsageError(
            "--strong keeps the global batch: say how large, as in "
            "`-- python -m hvdtrain.mnist --global-batch-size 256`"
        )
    if scaling != STRONG and total is not None:
        raise UsageError(
            "--global-batch-size in the command, or its file of options, keeps the global batch: "
            "say --strong, or give --batch-size, the batch per rank"
        )


def with_batch(words: Sequence[str], scaling: str, smallest: int) -> list[str]:
    """Return ``words`` with the batch as the scaling needs it.

    In strong scaling ``--batch-size`` is taken as the batch per rank at the smallest size.

    Raises:
        UsageError: it is no number.
    """
    own, given = batches(words)
    if scaling != STRONG or own is None or given is not None:
        return list(words)
    if not re.fullmatch(r"[1-9]\d*", own):
        raise UsageError(f"--batch-size {own}: give a whole number of 1 or more")
    total = int(own) * smallest
    return [*without(words, "--batch-size"), "--global-batch-size", str(total)]


def complete(ladder: Ladder, *, here: bool) -> Ladder:
    """Return ``ladder`` with the batch, threads and share of a host that its runs need.

    Args:
        ladder: as the user asks for it; its words are the command as given.
        here: whether the runs are started from here; else each size is a job that sees its nodes.

    Raises:
        UsageError: the command cannot be measured, or the ranks do not fit.
    """
    check_words(ladder.words, ladder.scaling, os.environ)
    if not ladder.sizes:
        raise UsageError("--ranks: on how many ranks? Such as --ranks 1,2,4")
    if ladder.timeout is not None and ladder.timeout <= 0:
        raise UsageError(f"--timeout {ladder.timeout:g}: give seconds, more than 0")
    ladder = replace(ladder, words=tuple(with_batch(ladder.words, ladder.scaling, ladder.sizes[0])))
    if not here:
        return ladder
    hosts = choose_hosts(ladder.hosts, ladder.hostfile, os.environ)
    ranks = fullest_host(ladder.sizes, ladder.ppn, hosts)
    threads = ladder.threads or equal_threads(ranks, os.environ)
    return replace(ladder, ranks_per_host=ranks, threads=threads)


def order(sizes: Sequence[int], repeats: int) -> Iterator[tuple[int, int]]:
    """Yield the runs as (ranks, repeat): up the ladder, then down, then up ...

    A machine that grows slower in the meantime then favours no size.
    """
    for repeat in range(1, repeats + 1):
        for ranks in sorted(sizes, reverse=repeat % 2 == 0):
            yield ranks, repeat


def run_words(ladder: Ladder, ranks: int, repeat: int) -> list[str]:
    """Return the words of one run: those of the ladder, and the files of this run."""
    stem = ladder.stem(ranks, repeat)
    return [*ladder.words, *file_words(stem)]


def request(ladder: Ladder, ranks: int, repeat: int) -> Request:
    """Return what one run asks ``hvdtrain launch`` for."""
    return Request(
        ranks,
        run_words(ladder, ranks, repeat),
        ppn=None if ladder.ppn is None else min(ladder.ppn, ranks),
        threads=ladder.threads,
        ranks_per_host=ladder.ranks_per_host,
        hosts=ladder.hosts,
        hostfile=ladder.hostfile,
    )


def command(
    ladder: Ladder, ranks: int, repeat: int, environ: Mapping[str, str] = os.environ
) -> Command:
    """Return what one run starts.

    Raises:
        UsageError: the ranks do not fit on the hosts, or there is no MPI.
    """
    return prepare(request(ladder, ranks, repeat), environ).command


def outline(ladder: Ladder, ranks: int, repeat: int) -> Run:
    """Return a run as far as it is known before it has begun: without a summary."""
    machine, cores = describe_machine(os.environ)
    return Run(
        ranks,
        repeat,
        Summary(),
        scaling=ladder.scaling,
        command=ladder.words,
        machine=machine,
        cores=cores,
        threads=ladder.threads,
        ranks_per_host=ladder.ranks_per_host,
    )


def carry_out(ladder: Ladder, ranks: int, repeat: int) -> Run:
    """Start the ranks, wait for them, and read what they measured.

    Raises:
        HvdtrainError: the run failed; its output is kept beside its files.
    """
    stem, what = ladder.stem(ranks, repeat), f"the run on {plural(ranks, 'rank')}"
    result = start(command(ladder, ranks, repeat), stem, ladder.timeout, plural(ranks, "rank"))
    if not result.ok:
        for line in result.output.splitlines()[-SHOWN:]:
            log.info("  %s", line)
        raise HvdtrainError(
            f"{what} failed ({why(result)}): the end of its output stands above, all of it in "
            f"{file_of(stem, LOG)}. The runs before it are kept: the same command goes on from "
            "there"
        )
    done = replace(outline(ladder, ranks, repeat), summary=read_summary(stem, what))
    try:
        done.check()
    except ValueError as error:
        raise no_throughput(stem, what, error) from error
    return done


def missing_runs(ladder: Ladder) -> list[tuple[int, int]]:
    """Return the runs that are still to be done, as (ranks, repeat), in order.

    Raises:
        UsageError: those that are done are of another kind, or of several.
    """
    done, source = read_lines(ladder.folder / LINES), str(ladder.folder)
    check_continues(done, outline(ladder, 1, 1), source)
    check_comparable(done, ladder.scaling, source)
    there = {(one.ranks, one.repeat) for one in done}
    return [one for one in order(ladder.sizes, ladder.repeats) if one not in there]


def climb(ladder: Ladder) -> None:
    """Carry out the missing runs, each kept as it ends."""
    missing, total = missing_runs(ladder), len(ladder.sizes) * ladder.repeats
    done = read_lines(ladder.folder / LINES)
    took: dict[int, float] = {}
    try:
        for place, (ranks, repeat) in enumerate(missing, total - len(missing) + 1):
            head = f"[{place}/{total}] {plural(ranks, 'rank')}, run {repeat} of {ladder.repeats}"
            rest = [size for size, _ in missing[place - total - 1 :]]
            log.info("%s%s", head, time_left(took, rest))
            began = time.monotonic()
            one = carry_out(ladder, ranks, repeat)
            check_comparable([*done, one], ladder.scaling, str(ladder.folder))
            append_line(ladder.folder / LINES, one)
            done.append(one)
            took[ranks] = time.monotonic() - began
            log.info("    %s images/s, after %s", number(one.rate), duration(took[ranks]))
    except KeyboardInterrupt:
        log.info(KEPT, ladder.folder)
        raise
