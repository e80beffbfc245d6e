"""Start one run, and keep what it leaves; the share of a host that its ranks get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from hvdtrain.commands.launch.hosts import Allocation
from hvdtrain.commands.launch.layout import lay_out
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.steps.summary import Summary
from hvdtrain.system.machine.gpus import count_gpus
from hvdtrain.system.machine.limits import physical_cores, processor
from hvdtrain.system.output.text import about, plural, printable
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import TIMED_OUT, Command, Result, run

Kind = TypeVar("Kind")  # of runs that take about the same time
SUMMARY, COURSE, LOG = ".json", ".jsonl", ".log"  # how the files of a run end


KEPT = "what is measured is kept in %s: the same command goes on from there"


def file_of(stem: Path, ending: str) -> Path:
    """Return a file of the run whose files are called ``stem``."""
    return stem.with_name(stem.name + ending)


def file_words(stem: Path) -> list[str]:
    """Return the options that make a trainer write the files of a run."""
    return [f"--summary={file_of(stem, SUMMARY)}", f"--metrics={file_of(stem, COURSE)}"]


def start(command: Command, stem: Path, timeout: float | None, what: str) -> Result:
    """Run ``command`` to its end; its output is kept beside its files.

    Args:
        command: what to run.
        stem: where its files lie, without their endings.
        timeout: seconds that it may take.
        what: its name for who waits, who sees the last line of its output beside it.

    Raises:
        UsageError: the folder cannot be made.
    """
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {stem.parent.parent}: {error.strerror}") from error
    for ending in (SUMMARY, COURSE, LOG):  # of a run that was broken off
        file_of(stem, ending).unlink(missing_ok=True)

    def show(line: str) -> None:
        if line[:1].isalnum():  # no frame of a table
            terminal.status(f"{what}: {printable(line)}")

    with terminal.working(f"{what}: starting"):
        result = run(command, on_line=show, timeout=timeout)
    file_of(stem, LOG).write_text(f"{result.command.show()}\n{result.output}")
    return result


def time_left(took: Mapping[Kind, float], rest: Sequence[Kind]) -> str:
    """Return how long the rest of the runs takes, for a person; empty where none is done yet.

    Args:
        took: seconds of a run of each kind that has been run.
        rest: the kinds of the runs to come. One that has not been run counts as the others' mean.
    """
    if not took:
        return ""
    mean = sum(took.values()) / len(took)
    return f" ({about(sum(took.get(kind, mean) for kind in rest))} to go)"


def why(result: Result) -> str:
    """Return in a few words how a run ended that failed."""
    return "took too long" if result.exit_code == TIMED_OUT else f"exit code {result.exit_code}"


def read_summary(stem: Path, what: str) -> Summary:
    """Return what a run measured.

    Raises:
        HvdtrainError: it left no summary.
    """
    file = file_of(stem, SUMMARY)
    try:
        return Summary.read(file)
    except UsageError as error:
        raise no_throughput(stem, what, error) from error


def no_throughput(stem: Path, what: str, error: Exception) -> HvdtrainError:
    """Return the error that tells what a command has to do to be measured."""
    return HvdtrainError(
        f"{what} left no throughput in {file_of(stem, SUMMARY)} ({error}): the command must take "
        "--summary FILE as hvdtrain's trainers do, and take a step or more"
    )


def fullest_host(sizes: Sequence[int], ppn: int | None, hosts: Allocation) -> int:
    """Return the ranks on the fullest host: at every size, each rank gets its share of that host.

    Left alone, one rank takes all cores of its host and two take half of them each: then more
    ranks would be no more hardware, and no efficiency could come near 1. Without ``ppn``, ranks per
    host, each host is filled.
    """
    return ppn or max(lay_out(ranks, hosts).per_host for ranks in sizes)


def describe_machine(environ: Mapping[str, str]) -> tuple[str, int | None]:
    """Return what this host computes with, in words, and its cores (None where GPUs compute)."""
    count = count_gpus(environ)
    if count:
        return f"{plural(count, 'GPU')} per host", None
    cores = physical_cores()  # the words stand in the results, and are compared
    return f"{processor()}, {plural(cores, 'core')} per host", cores
