"""Plan the runs of a ladder, and carry out those that are missing."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hvdtrain.commands.launch.hosts import Allocation
from hvdtrain.commands.launch.layout import asked_threads, fair_threads, lay_out, own_cores
from hvdtrain.commands.launch.prepare import Request, choose_hosts, prepare
from hvdtrain.commands.runs.comparable import check_comparable, check_continues
from hvdtrain.commands.runs.records import LINES, STRONG, Run, append_line, read_lines
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.steps.summary import Summary
from hvdtrain.system.files import read_yaml
from hvdtrain.system.machine.gpus import count_gpus
from hvdtrain.system.machine.limits import physical_cores, processor
from hvdtrain.system.output.text import number, plural
from hvdtrain.system.runtime.command import TIMED_OUT, Command, run

log = logging.getLogger(__name__)

SHOWN = 12  # last lines of a failed run's output
# What would make the runs of a ladder something else than independent measurements.
REFUSED = {
    "--summary": "the ladder gives each run its own",
    "--metrics": "the ladder gives each run its own",
    "--checkpoint-dir": "each run would go on from where the one before it ended",
    "--timeline": "recording it slows a run down",
}
DYNAMIC = "DYNAMIC"  # as HOROVOD_TIMELINE: no timeline unless the program starts one


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


def value_of(words: Sequence[str], option: str) -> str | None:
    """Return the value of ``option``, spelled with dashes or underscores; None where not given."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == option:
            return value if equals else next(iter(words[index + 1 : index + 2]), "")
    return None


def without(words: Sequence[str], option: str) -> list[str]:
    """Return ``words`` without ``option`` and its value."""
    kept, rest = [], iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name.replace("_", "-") != option:
            kept.append(word)
        elif not equals:
            next(rest, None)
    return kept


def from_file(words: Sequence[str]) -> dict[str, str]:
    """Return the options in the file that --config names, as the trainers read it, by ``--name``.

    Empty where there is none, or the program means something else by --config.
    """
    path = value_of(words, "--config")
    try:
        content = read_yaml(Path(path)) if path else None
    except (OSError, ValueError):  # the program itself will say what is wrong
        return {}
    return {
        f"--{str(name).replace('_', '-')}": str(value)
        for name, value in (content.items() if isinstance(content, dict) else ())
        if value is not None and value is not False
    }


def batches(words: Sequence[str]) -> tuple[str | None, str | None]:
    """Return batch per rank and global batch, as far as line or file give them; the line wins."""
    for find in (partial(value_of, words), from_file(words).get):
        own, total = find("--batch-size"), find("--global-batch-size")
        if own is not None or total is not None:
            return own, total
    return None, None


def check_words(words: Sequence[str], scaling: str, environ: Mapping[str, str]) -> None:
    """Refuse a command that cannot be measured as it is.

    Raises:
        UsageError: naming the option.
    """
    if not words:
        raise UsageError("what should be measured? Give it after --, as in `-- python train.py`")
    file = from_file(words)
    for option, reason in REFUSED.items():
        if value_of(words, option) is not None or option in file:
            place = value_of(words, "--config") if option in file else "the command"
            raise UsageError(f"{option} in {place}: {reason}; leave it out")
    if environ.get("HOROVOD_TIMELINE", DYNAMIC) != DYNAMIC:
        raise UsageError("HOROVOD_TIMELINE is set: recording slows a run down; unset it")
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


def complete(
    ladder: Ladder, *, here: bool = True, environ: Mapping[str, str] = os.environ
) -> Ladder:
    """Return ``ladder`` with the batch, threads and share of a host that its runs need.

    Args:
        ladder: as the user asks for it; its words are the command as given.
        here: whether the runs are started from here; else each size is a job that sees its nodes.
        environ: where hosts and threads are given.

    Raises:
        UsageError: the command cannot be measured, or the ranks do not fit.
    """
    check_words(ladder.words, ladder.scaling, environ)
    if not ladder.sizes:
        raise UsageError("--ranks: on how many ranks? Such as --ranks 1,2,4")
    if ladder.timeout is not None and ladder.timeout <= 0:
        raise UsageError(f"--timeout {ladder.timeout:g}: give seconds, more than 0")
    ladder = replace(ladder, words=tuple(with_batch(ladder.words, ladder.scaling, ladder.sizes[0])))
    if not here:
        return ladder
    hosts = choose_hosts(ladder.hosts, ladder.hostfile, environ)
    ranks = fullest_host(ladder.sizes, ladder.ppn, hosts)
    threads = ladder.threads or equal_threads(ranks, environ)
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
    return [*ladder.words, f"--summary={stem}.json", f"--metrics={stem}.jsonl"]


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


def fullest_host(sizes: Sequence[int], ppn: int | None, hosts: Allocation) -> int:
    """Return the ranks on the fullest host: at every size, each rank gets its share of that host.

    Left alone, one rank takes all cores of its host and two take half of them each: then more
    ranks would be no more hardware, and no efficiency could come near 1. Without ``ppn``, ranks per
    host, each host is filled.
    """
    return ppn or max(lay_out(ranks, hosts).per_host for ranks in sizes)


def equal_threads(ranks_per_host: int, environ: Mapping[str, str]) -> int | None:
    """Return the threads per rank at every size; None where the ladder is not to set them."""
    given = asked_threads(environ)
    if given.isdecimal() and int(given):
        return int(given)
    cores = own_cores(physical_cores(), environ)
    return fair_threads(ranks_per_host, cores, count_gpus(environ), environ)


def outline(
    ladder: Ladder, ranks: int, repeat: int, environ: Mapping[str, str] = os.environ
) -> Run:
    """Return a run as far as it is known before it has begun: without a summary."""
    machine, cores = describe_machine(environ)
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
    stem = ladder.stem(ranks, repeat)
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {ladder.folder}: {error.strerror}") from error
    files = {end: stem.with_name(stem.name + end) for end in (".json", ".jsonl", ".log")}
    for file in files.values():  # of a run that was broken off
        file.unlink(missing_ok=True)
    result = run(command(ladder, ranks, repeat), timeout=ladder.timeout)
    files[".log"].write_text(f"{result.command.show()}\n{result.output}")
    if not result.ok:
        why = "took too long" if result.exit_code == TIMED_OUT else f"exit code {result.exit_code}"
        for line in result.output.splitlines()[-SHOWN:]:
            log.info("  %s", line)
        raise HvdtrainError(
            f"the run on {plural(ranks, 'rank')} failed ({why}): the end of its output stands "
            f"above, all of it in {files['.log']}. The runs before it are kept: the same command "
            "goes on from there"
        )
    try:
        done = replace(outline(ladder, ranks, repeat), summary=Summary.read(files[".json"]))
        done.check()
    except (UsageError, ValueError) as error:
        raise HvdtrainError(
            f"the run on {plural(ranks, 'rank')} left no throughput in {files['.json']} ({error}): "
            "the command must take --summary FILE as hvdtrain's trainers do, and take a step or "
            "more"
        ) from error
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
    for place, (ranks, repeat) in enumerate(missing, total - len(missing) + 1):
        one = carry_out(ladder, ranks, repeat)
        check_comparable([*done, one], ladder.scaling, str(ladder.folder))
        append_line(ladder.folder / LINES, one)
        done.append(one)
        log.info(
            "[%d/%d] %s, run %d: %s images/s in %.0f s",
            *(place, total, plural(ranks, "rank"), repeat),
            *(number(one.rate), one.summary.seconds_total or 0.0),
        )


def describe_machine(environ: Mapping[str, str]) -> tuple[str, int | None]:
    """Return what this host computes with, in words, and its cores (None where GPUs compute)."""
    count = count_gpus(environ)
    if count:
        return f"{plural(count, 'GPU')} per host", None
    cores = physical_cores()  # the words stand in the results, and are compared
    return f"{processor()}, {plural(cores, 'core')} per host", cores
