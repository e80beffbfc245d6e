"""Plan the runs of a rank sweep, and execute those that are missing."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.commands.launch.prepare import Request, choose_hosts, prepare
from hvdtrain.commands.runs.command_options import batch_sizes, check_measurable, without_option
from hvdtrain.commands.runs.comparable import check_comparable, check_continues
from hvdtrain.commands.runs.records import LINES, STRONG, Run, append_line, read_lines
from hvdtrain.commands.runs.start import (
    KEPT,
    LOG,
    describe_machine,
    exit_reason,
    file_options,
    file_path,
    fullest_host,
    no_throughput,
    read_summary,
    start,
    time_left,
)
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.steps.summary import Summary
from hvdtrain.system.machine.threads import equal_threads
from hvdtrain.system.output.text import duration, number, plural
from hvdtrain.system.runtime.command import Command

log = logging.getLogger(__name__)

SHOWN = 12  # last lines of a failed run's output


@dataclass(frozen=True)
class Sweep:
    """The requested runs of one training at increasing numbers of ranks."""

    words: tuple[str, ...]  # the command of each rank, with the batch size option of the scaling
    sizes: tuple[int, ...]  # numbers of ranks, increasing
    repeats: int
    scaling: str  # ``weak``: constant batch per rank; ``strong``: constant global batch
    folder: Path
    ppn: int | None = None
    threads: int | None = None
    ranks_per_host: int | None = None  # that share a host's cores, at every size: `fullest_host`
    hosts: str | None = None
    hostfile: Path | None = None
    timeout: float | None = None  # seconds, of one run

    def stem(self, ranks: int, repeat: int) -> Path:
        """Return the path of a run's files, without their suffixes."""
        return self.folder / "runs" / f"{ranks}-{repeat}"


def check_words(words: Sequence[str], scaling: str, environ: Mapping[str, str]) -> None:
    """Reject a command that cannot be measured.

    Raises:
        UsageError: with the name of the option.
    """
    check_measurable(words, environ)
    per_rank, total = batch_sizes(words)
    if scaling == STRONG and total is None and per_rank is None:
        raise UsageError(
            "--strong needs a global batch size in the command, e.g. "
            "`-- python -m hvdtrain.mnist --global-batch-size 256`"
        )
    if scaling != STRONG and total is not None:
        raise UsageError(
            "--global-batch-size in the command or its --config file needs --strong; for weak "
            "scaling use --batch-size, the batch per rank"
        )


def with_batch(words: Sequence[str], scaling: str, smallest: int) -> list[str]:
    """Return ``words`` with the batch size option of the scaling.

    In strong scaling ``--batch-size`` is the batch per rank at the smallest size.

    Raises:
        UsageError: it is not a number.
    """
    per_rank, total = batch_sizes(words)
    if scaling != STRONG or per_rank is None or total is not None:
        return list(words)
    if not re.fullmatch(r"[1-9]\d*", per_rank):
        raise UsageError(f"--batch-size {per_rank}: must be a whole number of at least 1")
    kept = without_option(words, "--batch-size")
    return [*kept, "--global-batch-size", str(int(per_rank) * smallest)]


def resolve(sweep: Sweep, *, local: bool) -> Sweep:
    """Return ``sweep`` with the batch size, threads and ranks per host of its runs.

    Args:
        sweep: the request of the user, with the command as typed.
        local: whether this process starts the runs; if not, each size is a job.

    Raises:
        UsageError: the command cannot be measured, or the ranks do not fit.
    """
    check_words(sweep.words, sweep.scaling, os.environ)
    if not sweep.sizes:
        raise UsageError("--ranks is required, e.g. --ranks 1,2,4")
    if sweep.timeout is not None and sweep.timeout <= 0:
        raise UsageError(f"--timeout {sweep.timeout:g}: must be more than 0 seconds")
    sweep = replace(sweep, words=tuple(with_batch(sweep.words, sweep.scaling, sweep.sizes[0])))
    if not local:
        return sweep
    hosts = choose_hosts(sweep.hosts, sweep.hostfile, os.environ)
    ranks = fullest_host(sweep.sizes, sweep.ppn, hosts)
    threads = sweep.threads or equal_threads(ranks, os.environ)
    return replace(sweep, ranks_per_host=ranks, threads=threads)


def run_order(sizes: Sequence[int], repeats: int) -> Iterator[tuple[int, int]]:
    """Yield the runs as (ranks, repeat): increasing ranks, then decreasing, then increasing ...

    A machine that slows down over time then favours no size.
    """
    for repeat in range(1, repeats + 1):
        for ranks in sorted(sizes, reverse=repeat % 2 == 0):
            yield ranks, repeat


def run_words(sweep: Sweep, ranks: int, repeat: int) -> list[str]:
    """Return the command of one run: the sweep's command, with the options for its files."""
    return [*sweep.words, *file_options(sweep.stem(ranks, repeat))]


def request(sweep: Sweep, ranks: int, repeat: int) -> Request:
    """Return the request of one run to ``hvdtrain launch``."""
    return Request(
        ranks,
        run_words(sweep, ranks, repeat),
        ppn=None if sweep.ppn is None else min(sweep.ppn, ranks),
        threads=sweep.threads,
        ranks_per_host=sweep.ranks_per_host,
        hosts=sweep.hosts,
        hostfile=sweep.hostfile,
    )


def command(
    sweep: Sweep, ranks: int, repeat: int, environ: Mapping[str, str] = os.environ
) -> Command:
    """Return the launcher's command for one run.

    Raises:
        UsageError: the ranks do not fit on the hosts, or there is no MPI.
    """
    return prepare(request(sweep, ranks, repeat), environ).command


def planned_run(sweep: Sweep, ranks: int, repeat: int) -> Run:
    """Return the record of a run before it starts: without a summary."""
    machine, cores = describe_machine(os.environ)
    return Run(
        ranks,
        repeat,
        Summary(),
        scaling=sweep.scaling,
        command=sweep.words,
        machine=machine,
        cores=cores,
        threads=sweep.threads,
        ranks_per_host=sweep.ranks_per_host,
    )


def execute(sweep: Sweep, ranks: int, repeat: int) -> Run:
    """Start the ranks, wait for them, and read their summary.

    Raises:
        HvdtrainError: the run failed; its output is kept in the directory of its files.
    """
    stem, label = sweep.stem(ranks, repeat), f"the run on {plural(ranks, 'rank')}"
    result = start(command(sweep, ranks, repeat), stem, sweep.timeout, plural(ranks, "rank"))
    if not result.ok:
        for line in result.output.splitlines()[-SHOWN:]:
            log.info("  %s", line)
        raise HvdtrainError(
            f"{label} failed ({exit_reason(result)}): see the last lines of its output above, or "
            f"{file_path(stem, LOG)}. Completed runs are kept: run the same command again to "
            "continue"
        )
    run = replace(planned_run(sweep, ranks, repeat), summary=read_summary(stem, label))
    try:
        run.check()
    except ValueError as error:
        raise no_throughput(stem, label, error) from error
    return run


def missing_runs(sweep: Sweep) -> list[tuple[int, int]]:
    """Return the runs that are not complete, as (ranks, repeat), in order.

    Raises:
        UsageError: the complete runs are of another kind, or of several.
    """
    runs, source = read_lines(sweep.folder / LINES), str(sweep.folder)
    check_continues(runs, planned_run(sweep, 1, 1), source)
    check_comparable(runs, sweep.scaling, source)
    complete = {(run.ranks, run.repeat) for run in runs}
    return [pair for pair in run_order(sweep.sizes, sweep.repeats) if pair not in complete]


def run_sweep(sweep: Sweep) -> None:
    """Execute the missing runs, and record each as it ends."""
    missing, total = missing_runs(sweep), len(sweep.sizes) * sweep.repeats
    runs = read_lines(sweep.folder / LINES)
    durations: dict[int, float] = {}
    try:
        for position, (ranks, repeat) in enumerate(missing, total - len(missing) + 1):
            head = f"[{position}/{total}] {plural(ranks, 'rank')}, run {repeat} of {sweep.repeats}"
            remaining = [size for size, _ in missing[position - total - 1 :]]
            log.info("%s%s", head, time_left(durations, remaining))
            start_time = time.monotonic()
            run = execute(sweep, ranks, repeat)
            check_comparable([*runs, run], sweep.scaling, str(sweep.folder))
            append_line(sweep.folder / LINES, run)
            runs.append(run)
            durations[ranks] = time.monotonic() - start_time
            log.info("    %s images/s, after %s", number(run.rate), duration(durations[ranks]))
    except KeyboardInterrupt:
        log.info(KEPT, sweep.folder)
        raise
