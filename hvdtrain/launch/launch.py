"""``hvdtrain launch``: find the hosts and the MPI, and start N ranks of a program the right way."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.launch.dialects import Job, build
from hvdtrain.launch.hosts import Allocation, find_allocation, parse_hosts, read_hostfile
from hvdtrain.launch.layout import (
    Layout,
    asked_threads,
    batch_share,
    fair_threads,
    lay_out,
    own_cores,
)
from hvdtrain.launch.machine import gpus, packages, physical_cores
from hvdtrain.launch.mpirun import Mpi, find_mpi, ssh_agent
from hvdtrain.launch.run import Command
from hvdtrain.launch.watch import watch
from hvdtrain.verb import Report

log = logging.getLogger(__name__)

EPILOG = """example:
  hvdtrain launch -n 2 -- python -m hvdtrain.mnist
  hvdtrain launch -n 2 --timeout 600 --tag -- python train.py --epochs 3
  hvdtrain launch -n 8 --ppn 4 --hosts node1,node2 --dry-run -- python -m hvdtrain.resnet

The exit code is the job's; 124 after --timeout. docs/launch.md tells more."""


@dataclass(frozen=True)
class Request:
    """What the user asks for."""

    ranks: int
    """Processes over all hosts."""
    words: Sequence[str]
    """The program that each rank runs, and its arguments."""
    ppn: int | None = None
    """Ranks on each host; None fills the slots of one host after the other."""
    threads: int | None = None
    """OMP_NUM_THREADS of each rank; None leaves it to the program."""
    hosts: str | None = None
    """``a:2,b:2``, instead of what the batch system gave."""
    hostfile: Path | None = None
    """A file with the hosts, instead."""
    tag: bool = False
    """Mark each line of output with its rank, as the launcher spells it."""
    bind: bool = True
    """Whether each rank gets cores of its own, where that is known to be right."""
    room: int | None = None
    """Each rank gets cores and threads as if so many were on its host; None: as many as are."""


@dataclass(frozen=True)
class Launch:
    """What is to be run, and what is known about it."""

    command: Command
    """Of the launcher."""
    mpi: Mpi
    """The launcher."""
    job: Job
    """Its ranks and hosts."""


def command(
    ranks: int,
    words: Sequence[str],
    *,
    ppn: int | None = None,
    threads: int | None = None,
    hosts: str | None = None,
    hostfile: Path | None = None,
    tag: bool = False,
    bind: bool = True,
    room: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Command:
    """What ``hvdtrain launch -n RANKS -- WORDS`` runs; see ``Request`` and ``prepare``."""
    request = Request(ranks, words, ppn, threads, hosts, hostfile, tag, bind, room)
    return prepare(request, environ).command


def prepare(request: Request, environ: Mapping[str, str] = os.environ) -> Launch:
    """Find hosts and launcher, and compose the command.

    Raises:
        UsageError: no launcher, no such program, or the ranks do not fit on the hosts.
    """
    for option, value in (("--threads", request.threads), ("--room-for", request.room)):
        if value is not None and value < 1:
            raise UsageError(f"{option} {value}: give a number of at least 1")
    _check_program(request.words, environ)
    allocation = choose_hosts(request.hosts, request.hostfile, environ)
    layout = lay_out(request.ranks, allocation, request.ppn)
    mpi = find_mpi(environ)
    cores, share = physical_cores(), batch_share(environ)
    if mpi.dialect == "srun" and share:
        cores = share  # srun itself deals the job's share of a host out, in its own units
    named = allocation.source in ("--hosts", "--hostfile")
    devices = gpus(environ)
    job = Job(
        layout,
        cores=cores,
        packages=packages(),
        room=request.room or 0,
        cpus=len(os.sched_getaffinity(0)),
        # Of hosts that the user names nobody knows the cores. And where the batch system gave a
        # part of a host but fenced nothing off, other jobs may be bound to the same first cores.
        bind=request.bind and not named and not 0 < share < cores,
        threads=request.threads or choose_threads(request, layout, cores, devices, environ),
        gpus=devices,
        root=os.geteuid() == 0,
        tag=request.tag,
        agent=ssh_agent(mpi, environ),
        environ=environ,
    )
    return Launch(build(mpi, job, request.words), mpi, job)


def choose_hosts(
    hosts: str | None, hostfile: Path | None, environ: Mapping[str, str]
) -> Allocation:
    """The hosts that the user names, else those of the batch system."""
    if hosts is not None:
        return Allocation("--hosts", parse_hosts(hosts))
    if hostfile is not None:
        return Allocation("--hostfile", read_hostfile(hostfile, "--hostfile"))
    return find_allocation(environ)


def _check_program(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise where there is nothing that could be started."""
    if not words:
        raise UsageError("no program to start: put it after --, as in `-- python train.py`")
    program = words[0]
    if shutil.which(program, path=environ.get("PATH")) is None:
        script = program.endswith(".py") and Path(program).exists()
        remedy = f"; start the script by `python {program}`" if script else " on the PATH"
        raise UsageError(f"{program}: no such program{remedy}")


def choose_threads(
    request: Request, layout: Layout, cores: int, gpus: int, environ: Mapping[str, str]
) -> int | None:
    """Threads of a rank where nobody asked for a number; None leaves them to the program.

    A job that got a part of a host is not bound to it: its ranks would take all of the host.
    """
    own, asked = own_cores(cores, environ), asked_threads(environ)
    by_pbs = not asked and environ.get("OMP_NUM_THREADS")  # for all ranks together
    named = request.hosts or request.hostfile  # and not of this job
    room = max(request.room or 0, layout.per_host)
    if (own < cores or by_pbs) and not asked and not named:
        return max(1, own // room)
    return fair_threads(room, cores, gpus, environ) if request.room else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.usage = "hvdtrain launch -n N [options] -- COMMAND..."
    parser.epilog = EPILOG
    parser.add_argument("-n", type=int, required=True, metavar="N", help="ranks over all hosts")
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument(
        "--hosts",
        metavar="A:2,B:2",
        help="hosts and their slots (default: those that PBS, Slurm or LSF gave, else this one)",
    )
    hosts.add_argument(
        "--hostfile",
        type=Path,
        metavar="F",
        help="a file of lines `host`, `host:4`, `host slots=4`",
    )
    parser.add_argument(
        "--ppn", type=int, metavar="K", help="ranks a host (default: fill host after host)"
    )
    parser.add_argument(
        "--threads", type=int, metavar="T", help="OMP_NUM_THREADS of each rank (default: unset)"
    )
    parser.add_argument(
        "--room-for",
        type=int,
        metavar="K",
        help="cores and threads of each rank as if K were on its host, to compare numbers of ranks",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="end the job when no rank has written anything for so long",
    )
    parser.add_argument("--tag", action="store_true", help="put [RANK] before each line")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be run, and run nothing"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run_verb(arguments: argparse.Namespace) -> Report:
    """Start the ranks, wait for them, and pass on the launcher's exit code.

    Raises:
        UsageError: see ``prepare``.
        HvdtrainError: the job was ended for its silence.
    """
    words, timeout = arguments.command, arguments.timeout
    if timeout is not None and not timeout > 0:
        raise UsageError(f"--timeout {timeout:g}: give seconds, more than 0")
    request = Request(
        arguments.n,
        words[1:] if words[:1] == ["--"] else words,
        arguments.ppn,
        arguments.threads,
        arguments.hosts,
        arguments.hostfile,
        tag=arguments.tag or timeout is not None,
        room=arguments.room_for,
    )
    launch = prepare(request)
    if arguments.dry_run:
        return Report(launch.command.show())
    for note in notes(launch.job):
        log.warning("hvdtrain: %s", note)
    log.info("%s", launch.command.show())
    kept = checkpoint_dir(request.words)
    layout, dialect = launch.job.layout, launch.mpi.dialect
    code = watch(
        launch.command,
        dialect,
        layout,
        tag=arguments.tag,
        timeout=timeout,
        checkpoints=Path(kept) if kept else None,
    )
    return Report("", exit_code=code)


def checkpoint_dir(command: Sequence[str]) -> str | None:
    """The directory that the command itself keeps its checkpoints in."""
    for index, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == "--checkpoint-dir":
            return value if equals else "".join(command[index + 1 : index + 2])
    return None


def notes(job: Job) -> list[str]:
    """What the user may not have meant."""
    found = []
    if job.layout.idle:
        found.append(f"no rank for host {', '.join(job.layout.idle)}")
    ranks = job.layout.per_host
    share, cores = batch_share(job.environ), own_cores(job.cores, job.environ)
    threads = asked_threads(job.environ)
    if 0 < share < ranks:
        found.append(
            f"{ranks} ranks on a host of which the batch system gave this job {share} cores: ask "
            f"for {ranks} (PBS: ncpus and mpiprocs), or give --ppn {share}"
        )
    elif not job.threads and threads.isdecimal() and int(threads) * ranks > cores:
        each = int(threads)
        found.append(
            f"{ranks} ranks of {each} threads are more than {cores} cores: "
            f"--threads {max(1, cores // ranks)} gives each its share"
        )
    return found
