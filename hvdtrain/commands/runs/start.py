"""Start a run, and keep its files; determine the share of a host per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from hvdtrain.commands.launch.hosts import Allocation, lay_out
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.steps.summary import Summary
from hvdtrain.system.machine.gpus import count_gpus
from hvdtrain.system.machine.limits import physical_cores, processor
from hvdtrain.system.output.text import about, plural, printable
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import TIMED_OUT, Command, Result, run

Kind = TypeVar("Kind")  # of runs that take about the same time
SUMMARY, CURVES, LOG = ".json", ".jsonl", ".log"  # suffixes of the files of a run


KEPT = "completed runs are kept in %s: run the same command again to continue"


def file_path(stem: Path, suffix: str) -> Path:
    """Return the path of a file of a run: ``stem`` with a suffix."""
    return stem.with_name(stem.name + suffix)


def file_options(stem: Path) -> list[str]:
    """Return the options that make a trainer write the files of a run."""
    return [f"--summary={file_path(stem, SUMMARY)}", f"--metrics={file_path(stem, CURVES)}"]


def start(command: Command, stem: Path, timeout: float | None, label: str) -> Result:
    """Run ``command`` to its end, and keep its output in the directory of its files.

    Args:
        command: the command.
        stem: path of its files, without their suffixes.
        timeout: time limit in seconds.
        label: name of the run in the status line, which also shows the last line of output.

    Raises:
        UsageError: the folder cannot be created.
    """
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {stem.parent.parent}: {error.strerror}") from error
    for suffix in (SUMMARY, CURVES, LOG):  # of an interrupted run
        file_path(stem, suffix).unlink(missing_ok=True)

    def show(line: str) -> None:
        if line[:1].isalnum():  # not the frame of a table
            terminal.status(f"{label}: {printable(line)}")

    with terminal.working(f"{label}: starting"):
        result = run(command, on_line=show, timeout=timeout)
    file_path(stem, LOG).write_text(f"{result.command.show()}\n{result.output}")
    return result


def time_left(durations: Mapping[Kind, float], remaining: Sequence[Kind]) -> str:
    """Return the estimated time for the remaining runs, as text; empty before the first run.

    Args:
        durations: seconds of a run of each kind, for the kinds that have run.
        remaining: the kinds of the remaining runs; for a new kind the mean duration is assumed.
    """
    if not durations:
        return ""
    mean = sum(durations.values()) / len(durations)
    return f" ({about(sum(durations.get(kind, mean) for kind in remaining))} to go)"


def exit_reason(result: Result) -> str:
    """Return a short reason for a failed run."""
    return "timed out" if result.exit_code == TIMED_OUT else f"exit code {result.exit_code}"


def read_summary(stem: Path, label: str) -> Summary:
    """Return the summary of a run.

    Raises:
        HvdtrainError: it wrote no summary.
    """
    try:
        return Summary.read(file_path(stem, SUMMARY))
    except UsageError as error:
        raise no_throughput(stem, label, error) from error


def no_throughput(stem: Path, label: str, error: Exception) -> HvdtrainError:
    """Return the error for a run without a throughput, with the requirements of a command."""
    return HvdtrainError(
        f"{label} wrote no throughput to {file_path(stem, SUMMARY)} ({error}): the command must "
        "accept --summary FILE like hvdtrain's trainers, and run at least one step"
    )


def fullest_host(sizes: Sequence[int], ppn: int | None, hosts: Allocation) -> int:
    """Return the ranks on the fullest host: at every size, each rank gets its share of that host.

    By default, one rank takes all cores of its host, and two ranks half of them each: then more
    ranks would not be more hardware, and no efficiency could approach 1. Without ``ppn``, ranks
    per host, each host is filled.
    """
    return ppn or max(lay_out(ranks, hosts).per_host for ranks in sizes)


def describe_machine(environ: Mapping[str, str]) -> tuple[str, int | None]:
    """Return a description of this host's GPUs or CPU, and its cores (None with GPUs)."""
    count = count_gpus(environ)
    if count:
        return f"{plural(count, 'GPU')} per host", None
    cores = physical_cores()  # the description is stored in the results, and compared
    return f"{processor()}, {plural(cores, 'core')} per host", cores
