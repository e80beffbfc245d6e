"""From the user's request to the launcher's command: the hosts, the MPI, the argv for N ranks."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.commands.launch.argv import Placement, build
from hvdtrain.commands.launch.hosts import Allocation, find_allocation, parse_hosts, read_hostfile
from hvdtrain.commands.launch.layout import RankLayout, lay_out
from hvdtrain.commands.launch.mpirun import Mpi, agent_settings, find_mpi
from hvdtrain.commands.launch.remote import names_here
from hvdtrain.commands.launch.torchrun import AgentCommand, agent_commands
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
    """The user's request."""

    ranks: int  # total number of processes
    words: Sequence[str]  # the program that each rank runs, and its arguments
    ppn: int | None = None  # ranks per host; None fills the slots host by host
    threads: int | None = None  # OMP_NUM_THREADS of each rank; None leaves it to the program
    hosts: str | None = None  # ``a:2,b:2``, instead of the batch system's
    hostfile: Path | None = None  # file with the hosts, instead
    tag: bool = False  # prefix each line of output with its rank, in the launcher's format
    bind: bool = True  # whether to bind ranks to cores, if the job is known to have them
    ranks_per_host: int | None = None  # to divide cores and threads among; None: those that run
    fewest: int | None = None  # minimum number of ranks after losses; None: all


def add_host_options(parser: argparse._ActionsContainer) -> None:
    """Declare --hosts, --hostfile and --ppn, for each verb that starts ranks."""
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument(
        "--hosts",
        metavar="A:2,B:2",
        help="hosts and their slots (default: those of the PBS, Slurm or LSF job, or this host)",
    )
    hosts.add_argument(
        "--hostfile",
        type=Path,
        metavar="F",
        help="file with lines `host`, `host:4` or `host slots=4`",
    )
    parser.add_argument(
        "--ppn", type=count, metavar="K", help="number of ranks per host (default: its slots)"
    )


def count(text: str) -> int:
    """Return the whole number of 1 or more in an option's ``text``.

    Raises:
        argparse.ArgumentTypeError: it has another form.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


@dataclass(frozen=True)
class Launch:
    """A job to start: the command, the launcher, and the placement of its ranks."""

    command: Command  # the launcher's
    mpi: Mpi  # the launcher
    placement: Placement  # of its ranks


def prepare(request: Request, environ: Mapping[str, str] = os.environ) -> Launch:
    """Return the job for ``request``: find hosts and launcher, and compose the command.

    Raises:
        UsageError: no launcher, no such program, or the ranks do not fit on the hosts.
    """
    allocation, layout = find_layout(request, environ)
    mpi = find_mpi(environ)
    cores, share = physical_cores(), batch_share(environ)
    if mpi.dialect == "srun" and share:
        cores = share  # srun itself divides the job's share of a host, in its own units
    specified = allocation.source in ("--hosts", "--hostfile")
    devices = count_gpus(environ)
    placement = Placement(
        layout,
        cores=cores,
        packages=packages(),
        ranks_per_host=request.ranks_per_host or 0,
        cpus=len(os.sched_getaffinity(0)),
        # The cores of hosts that the user specifies are unknown. And if the batch system allocated
        # a part of a host without isolating it, other jobs may be bound to the same first cores.
        bind=request.bind and not specified and not 0 < share < cores,
        threads=choose_threads(request, layout, cores, devices, environ),
        gpus=devices,
        root=os.geteuid() == 0,
        tag=request.tag,
        agent=agent_settings(mpi, environ),
        environ=environ,
    )
    return Launch(build(mpi, placement, request.words), mpi, placement)


def find_layout(request: Request, environ: Mapping[str, str]) -> tuple[Allocation, RankLayout]:
    """Return the hosts, and the layout of the ranks on them.

    Raises:
        UsageError: no such program, or the ranks do not fit on the hosts.
    """
    check_request(request, environ)
    allocation = choose_hosts(request.hosts, request.hostfile, environ)
    return allocation, lay_out(request.ranks, allocation, request.ppn)


def prepare_agents(request: Request, environ: Mapping[str, str] = os.environ) -> list[AgentCommand]:
    """Find the hosts, and return the command of torchrun's agent for each.

    Raises:
        UsageError: no such program, or the ranks do not fit on the hosts.
    """
    if request.fewest:
        request = replace(request, ranks=_available_ranks(request, request.fewest, environ))
    _, layout = find_layout(request, environ)
    devices = count_gpus(environ)
    threads = choose_threads(request, layout, physical_cores(), devices, environ)
    words, folder, here = request.words, Path.cwd(), names_here()
    return agent_commands(layout, words, threads, environ, folder, here, request.fewest)


def _available_ranks(request: Request, fewest: int, environ: Mapping[str, str]) -> int:
    """Return the number of ranks there are slots for: a host may be lost before the start.

    Raises:
        UsageError: there are fewer than the minimum.
    """
    hosts = choose_hosts(request.hosts, request.hostfile, environ).hosts
    slots = sum(request.ppn or host.slots for host in hosts) or request.ranks
    if fewest > min(slots, request.ranks):
        raise UsageError(f"--min {fewest}: more than --max {request.ranks} or the {slots} slots")
    return min(slots, request.ranks)


def choose_hosts(
    hosts: str | None, hostfile: Path | None, environ: Mapping[str, str]
) -> Allocation:
    """Return the hosts that the user specifies, by default those of the batch system."""
    if hosts is not None:
        return Allocation("--hosts", parse_hosts(hosts))
    if hostfile is not None:
        return Allocation("--hostfile", read_hostfile(hostfile, "--hostfile"))
    return find_allocation(environ)


def check_request(request: Request, environ: Mapping[str, str]) -> None:
    """Raise UsageError if a number is out of range, or there is no program to start."""
    for option, value in (("--threads", request.threads), ("--room-for", request.ranks_per_host)):
        if value is not None and value < 1:
            raise UsageError(f"{option} {value}: must be at least 1")
    if not request.words:
        raise UsageError("missing command: put it after `--`, e.g. `-- python train.py`")
    program = request.words[0]
    if shutil.which(program, path=environ.get("PATH")) is None:
        script = program.endswith(".py") and Path(program).exists()
        remedy = f"; to run the script, use `python {program}`" if script else " on the PATH"
        raise UsageError(f"{program}: no such program{remedy}")


def choose_threads(
    request: Request, layout: RankLayout, cores: int, gpus: int, environ: Mapping[str, str]
) -> int | None:
    """Return the OMP_NUM_THREADS of each rank; None leaves it to the program."""
    ranks = max(request.ranks_per_host or 0, layout.per_host)
    known = not (request.hosts or request.hostfile)
    needed = launch_threads(ranks, cores, environ, known=known)
    fair = fair_threads(ranks, cores, gpus, environ) if request.ranks_per_host else None
    return request.threads or needed or fair


def checkpoint_dir(command: Sequence[str]) -> Path | None:
    """Return the --checkpoint-dir of a training command; None if it has none."""
    for index, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == "--checkpoint-dir":
            value = value if equals else "".join(command[index + 1 : index + 2])
            return Path(value) if value else None
    return None


def notes(placement: Placement) -> list[str]:
    """Return warnings on a placement that the user may not have intended."""
    warnings = []
    if placement.layout.idle:
        warnings.append(f"no rank for host {', '.join(placement.layout.idle)}")
    ranks = placement.layout.per_host
    share, cores = batch_share(placement.environ), job_cores(placement.cores, placement.environ)
    threads = requested_number(placement.environ)
    if 0 < share < ranks:
        warnings.append(
            f"{ranks} ranks per host, but the batch system allocated only {share} cores: request "
            f"{ranks} (PBS: ncpus and mpiprocs), or use --ppn {share}"
        )
    elif not placement.threads and threads * ranks > cores:
        warnings.append(
            f"{ranks} ranks of {threads} threads are more than {cores} cores: "
            f"use --threads {max(1, cores // ranks)}"
        )
    return warnings
