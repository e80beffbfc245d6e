"""From what is asked for to the launcher's command: the hosts, the MPI, the argv for N ranks."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.commands.launch.argv import Placement, build
from hvdtrain.commands.launch.hosts import Allocation, find_allocation, parse_hosts, read_hostfile
from hvdtrain.commands.launch.layout import Layout, lay_out
from hvdtrain.commands.launch.mpirun import Mpi, agent_settings, find_mpi
from hvdtrain.commands.launch.remote import names_here
from hvdtrain.commands.launch.torchrun import Agent, agents
from hvdtrain.errors import UsageError
from hvdtrain.system.machine.gpus import count_gpus
from hvdtrain.system.machine.limits import packages, physical_cores
from hvdtrain.system.machine.threads import (
    batch_share,
    fair_threads,
    job_cores,
    launch_threads,
    requested_number,
)
from hvdtrain.system.runtime.command import Command


@dataclass(frozen=True)
class Request:
    """What the user asks for."""

    ranks: int  # processes over all hosts
    words: Sequence[str]  # the program that each rank runs, and its arguments
    ppn: int | None = None  # ranks per host; None fills the slots of one host after the other
    threads: int | None = None  # OMP_NUM_THREADS of each rank; None leaves it to the program
    hosts: str | None = None  # ``a:2,b:2``, instead of what the batch system gave
    hostfile: Path | None = None  # a file with the hosts, instead
    tag: bool = False  # mark each line of output with its rank, as the launcher spells it
    bind: bool = True  # whether each rank gets cores of its own, where that is known to be right
    ranks_per_host: int | None = None  # to share cores and threads out among; None: those that run
    fewest: int | None = None  # ranks to go on with where others are lost; None: with all or none


def add_host_options(parser: argparse._ActionsContainer) -> None:
    """Declare --hosts, --hostfile and --ppn, for each verb that starts ranks."""
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
        "--ppn", type=count, metavar="K", help="ranks per host (default: fill host after host)"
    )


def count(text: str) -> int:
    """Return the whole number of 1 or more in an option's ``text``.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


@dataclass(frozen=True)
class Launch:
    """What is to be run, and what is known about it."""

    command: Command  # the launcher's
    mpi: Mpi  # the launcher
    placed: Placement  # its ranks and hosts


def prepare(request: Request, environ: Mapping[str, str] = os.environ) -> Launch:
    """Find hosts and launcher, and compose the command.

    Raises:
        UsageError: no launcher, no such program, or the ranks do not fit on the hosts.
    """
    allocation, layout = place(request, environ)
    mpi = find_mpi(environ)
    cores, share = physical_cores(), batch_share(environ)
    if mpi.dialect == "srun" and share:
        cores = share  # srun itself deals the job's share of a host out, in its own units
    named = allocation.source in ("--hosts", "--hostfile")
    devices = count_gpus(environ)
    placed = Placement(
        layout,
        cores=cores,
        packages=packages(),
        ranks_per_host=request.ranks_per_host or 0,
        cpus=len(os.sched_getaffinity(0)),
        # Of hosts that the user names nobody knows the cores. And where the batch system gave a
        # part of a host but fenced nothing off, other jobs may be bound to the same first cores.
        bind=request.bind and not named and not 0 < share < cores,
        threads=choose_threads(request, layout, cores, devices, environ),
        gpus=devices,
        root=os.geteuid() == 0,
        tag=request.tag,
        agent=agent_settings(mpi, environ),
        environ=environ,
    )
    return Launch(build(mpi, placed, request.words), mpi, placed)


def place(request: Request, environ: Mapping[str, str]) -> tuple[Allocation, Layout]:
    """Find the hosts, and place the ranks on them.

    Raises:
        UsageError: no such program, or the ranks do not fit on the hosts.
    """
    check_request(request, environ)
    allocation = choose_hosts(request.hosts, request.hostfile, environ)
    return allocation, lay_out(request.ranks, allocation, request.ppn)


def prepare_agents(request: Request, environ: Mapping[str, str] = os.environ) -> list[Agent]:
    """Find the hosts, and compose the command of torchrun's agent on each.

    Raises:
        UsageError: no such program, or the ranks do not fit on the hosts.
    """
    if request.fewest:
        request = replace(request, ranks=_ranks_there(request, request.fewest, environ))
    _, layout = place(request, environ)
    devices = count_gpus(environ)
    threads = choose_threads(request, layout, physical_cores(), devices, environ)
    where = (environ, Path.cwd(), names_here())
    return agents(layout, request.words, threads, *where, request.fewest)


def _ranks_there(request: Request, fewest: int, environ: Mapping[str, str]) -> int:
    """Return how many of the ranks there are slots for: a host may be lost before the start.

    Raises:
        UsageError: fewer than the job goes on with.
    """
    hosts = choose_hosts(request.hosts, request.hostfile, environ).hosts
    slots = sum(request.ppn or host.slots for host in hosts) or request.ranks
    if fewest > min(slots, request.ranks):
        raise UsageError(f"--min {fewest}: --max is {request.ranks}, and the slots are {slots}")
    return min(slots, request.ranks)


def choose_hosts(
    hosts: str | None, hostfile: Path | None, environ: Mapping[str, str]
) -> Allocation:
    """Return the hosts that the user names, else those of the batch system."""
    if hosts is not None:
        return Allocation("--hosts", parse_hosts(hosts))
    if hostfile is not None:
        return Allocation("--hostfile", read_hostfile(hostfile, "--hostfile"))
    return find_allocation(environ)


def check_request(request: Request, environ: Mapping[str, str]) -> None:
    """Raise UsageError where a number is none, or there is no program to start."""
    for option, value in (("--threads", request.threads), ("--room-for", request.ranks_per_host)):
        if value is not None and value < 1:
            raise UsageError(f"{option} {value}: give a number of at least 1")
    if not request.words:
        raise UsageError("no program to start: put it after --, as in `-- python train.py`")
    program = request.words[0]
    if shutil.which(program, path=environ.get("PATH")) is None:
        script = program.endswith(".py") and Path(program).exists()
        remedy = f"; start the script by `python {program}`" if script else " on the PATH"
        raise UsageError(f"{program}: no such program{remedy}")


def choose_threads(
    request: Request, layout: Layout, cores: int, gpus: int, environ: Mapping[str, str]
) -> int | None:
    """Return the OMP_NUM_THREADS of each rank; None leaves it to the program."""
    ranks = max(request.ranks_per_host or 0, layout.per_host)
    known = not (request.hosts or request.hostfile)
    needed = launch_threads(ranks, cores, environ, known=known)
    fair = fair_threads(ranks, cores, gpus, environ) if request.ranks_per_host else None
    return request.threads or needed or fair


def checkpoint_dir(command: Sequence[str]) -> Path | None:
    """Return the command's own --checkpoint-dir; None if it has none."""
    for index, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == "--checkpoint-dir":
            value = value if equals else "".join(command[index + 1 : index + 2])
            return Path(value) if value else None
    return None


def notes(placed: Placement) -> list[str]:
    """Return what the user may not have meant."""
    found = []
    if placed.layout.idle:
        found.append(f"no rank for host {', '.join(placed.layout.idle)}")
    ranks = placed.layout.per_host
    share, cores = batch_share(placed.environ), job_cores(placed.cores, placed.environ)
    threads = requested_number(placed.environ)
    if 0 < share < ranks:
        found.append(
            f"{ranks} ranks on a host of which the batch system gave this job {share} cores: ask "
            f"for {ranks} (PBS: ncpus and mpiprocs), or give --ppn {share}"
        )
    elif not placed.threads and threads * ranks > cores:
        found.append(
            f"{ranks} ranks of {threads} threads are more than {cores} cores: "
            f"--threads {max(1, cores // ranks)} gives each its share"
        )
    return found
