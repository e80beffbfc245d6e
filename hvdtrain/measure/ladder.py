"""The runs of a ladder: which, in what order, by what command; and carrying one out."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch import launch
from hvdtrain.launch.machine import gpus, physical_cores, processor
from hvdtrain.launch.run import TIMED_OUT, Command, run
from hvdtrain.measure.records import STRONG, Run

log = logging.getLogger(__name__)

# What would make the runs of a ladder something else than independent measurements.
REFUSED = {
    "--summary": "the ladder gives each run its own",
    "--metrics": "the ladder gives each run its own",
    "--checkpoint-dir": "each run would go on from where the one before it ended",
    "--timeline": "recording it slows a run down",
}
DYNAMIC = "DYNAMIC"  # as HOROVOD_TIMELINE: no timeline unless the program starts one
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


def value_of(words: Sequence[str], option: str) -> str | None:
    """The value that ``words`` give ``option``, spelled with dashes or underscores; None: none."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == option:
            return value if equals else next(iter(words[index + 1 : index + 2]), "")
    return None


def without(words: Sequence[str], option: str) -> list[str]:
    """``words`` less ``option`` and its value."""
    kept: list[str] = []
    skip = False
    for word in words:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name.replace("_", "-") == option:
            skip = not equals
        else:
            kept.append(word)
    return kept


def check_words(words: Sequence[str], scaling: str, environ: Mapping[str, str]) -> None:
    """Refuse a command that cannot be measured as it is.

    Raises:
        UsageError: naming the option.
    """
    if not words:
        raise UsageError("what should be measured? Give it after --, as in `-- python train.py`")
    for option, reason in REFUSED.items():
        if value_of(words, option) is not None:
            raise UsageError(f"{option} in the command: {reason}; leave it out")
    if environ.get("HOROVOD_TIMELINE", DYNAMIC) != DYNAMIC:
        raise UsageError("HOROVOD_TIMELINE is set: recording slows a run down; unset it")
    total, own = value_of(words, "--global-batch-size"), value_of(words, "--batch-size")
    if scaling == STRONG and total is None and own is None:
        raise UsageError(
            "--strong keeps the batch of all ranks: say how large, as in "
            "`-- python -m hvdtrain.mnist --global-batch-size 256`"
        )
    if scaling != STRONG and total is not None:
        raise UsageError(
            "--global-batch-size in the command keeps the batch of all ranks: say --strong, or "
            "give --batch-size, that of a rank"
        )


def with_batch(words: Sequence[str], scaling: str, smallest: int) -> list[str]:
    """``words`` with the batch as the scaling needs it.

    In strong scaling a ``--batch-size`` is taken as that of a rank at the smallest size.

    Raises:
        UsageError: it is no number.
    """
    own = value_of(words, "--batch-size")
    if scaling != STRONG or own is None or value_of(words, "--global-batch-size") is not None:
        return list(words)
    if not re.fullmatch(r"[1-9]\d*", own):
        raise UsageError(f"--batch-size {own}: give a whole number of 1 or more")
    total = int(own) * smallest
    return [*without(words, "--batch-size"), "--global-batch-size", str(total)]


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
        hosts=plan.hosts,
        hostfile=plan.hostfile,
        environ=environ,
    )


def fair_threads(
    sizes: Sequence[int], ppn: int | None, hosts: int, environ: Mapping[str, str]
) -> int | None:
    """Threads that every rank can have at every size, so that a rank's hardware stays the same.

    Left alone, one rank takes all cores of its host and two take half of them each: then more
    ranks would be no more hardware, and no efficiency could come near 1. None where GPUs compute
    or the user has decided.

    Args:
        sizes: numbers of ranks.
        ppn: ranks on a host; None: each host is filled.
        hosts: how many there are, at least 1.
        environ: where OMP_NUM_THREADS may be set.
    """
    if gpus(environ) or environ.get("OMP_NUM_THREADS"):
        return None
    fullest = ppn or math.ceil(max(sizes) / hosts)
    return max(1, physical_cores() // fullest)


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
