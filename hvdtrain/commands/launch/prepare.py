"""From the user's request to the job to start: hosts, launcher, and the placement of ranks."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hvdtrain.commands.launch.argv import Launch
from hvdtrain.commands.launch.hosts import (
    Allocation,
    Host,
    RankLayout,
    find_allocation,
    lay_out,
    parse_hosts,
    read_hostfile,
)
from hvdtrain.commands.launch.launcher_choice import agent_settings, find_mpi
from hvdtrain.config.command_line import effective_value
from hvdtrain.config.declare import optional
from hvdtrain.config.values import positive
from hvdtrain.errors import UsageError
from hvdtrain.system.machine.gpus import count_gpus
from hvdtrain.system.machine.limits import packages, physical_cores
from hvdtrain.system.machine.threads import (
    HOST_CORES,
    batch_share,
    job_cores,
    launch_threads,
    requested_threads,
)
from hvdtrain.system.runtime.command import run
from hvdtrain.system.runtime.walltime import QUERY_TIMEOUT, walltime_query

# Options of each verb that starts ranks.
hosts_option = partial(
    optional,
    "hosts and their slots (default: those of the PBS or Slurm job, or this host)",
    metavar="A:2,B:2",
    either="hosts",
)
hostfile_option = partial(
    optional,
    "file with lines `host`, `host:4` or `host slots=4`",
    Path,
    metavar="F",
    either="hosts",
)
ppn_option = partial(
    optional, "number of ranks per host (default: its slots)", positive, metavar="K"
)
_CHUNK = re.compile(r"([^/+.]+)[^/+]*/\d+(?:\*(\d+))?")  # of exec_host: node1/0*2+node2/0*4


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


def prepare(request: Request, environ: Mapping[str, str] = os.environ) -> Launch:
    """Return the job for ``request``, with the hosts and the launcher.

    Raises:
        UsageError: no launcher, no such program, or the ranks do not fit on the hosts.
    """
    check_request(request, environ)
    allocation = choose_hosts(request.hosts, request.hostfile, environ)
    layout = lay_out(request.ranks, allocation, request.ppn)
    environ = with_host_cores(environ, layout.hosts)
    mpi = find_mpi(environ)
    cores, share = physical_cores(), batch_share(environ)
    if mpi.dialect == "srun" and share:
        cores = share  # srun itself divides the job's share of a host, in its own units
    specified = allocation.source in ("--hosts", "--hostfile")
    return Launch(
        mpi,
        request.words,
        layout,
        cores=cores,
        packages=packages(),
        ranks_per_host=request.ranks_per_host or 0,
        cpus=len(os.sched_getaffinity(0)),
        # The cores of hosts that the user specifies are unknown. And if the batch system allocated
        # a part of a host without isolating it, other jobs may be bound to the same first cores.
        bind=request.bind and not specified and not 0 < share < cores,
        threads=choose_threads(request, layout, cores, environ),
        gpus=count_gpus(environ),
        root=os.geteuid() == 0,
        tag=request.tag,
        agent=agent_settings(mpi, environ),
        environ=environ,
    )


def choose_hosts(
    hosts: str | None, hostfile: Path | None, environ: Mapping[str, str]
) -> Allocation:
    """Return the hosts that the user specifies, by default those of the batch system."""
    if hosts is not None:
        return Allocation("--hosts", parse_hosts(hosts))
    if hostfile is not None:
        return Allocation("--hostfile", read_hostfile(hostfile, "--hostfile"))
    return find_allocation(environ)


def with_host_cores(environ: Mapping[str, str], hosts: Sequence[Host]) -> Mapping[str, str]:
    """Return ``environ`` with ``HOST_CORES`` if PBS's chunks differ, or ``hosts`` have several.

    It is the number for the fullest host with which no rank of any host gets more than its share.
    """
    command = walltime_query(environ) if "PBS_NODEFILE" in environ else None
    text = run(command, timeout=QUERY_TIMEOUT).output.replace("\n\t", "") if command else ""
    line = re.search(r"^ *exec_host = (.*)$", text, re.MULTILINE)
    cores: Counter[str] = Counter()
    for name, number in _CHUNK.findall(line[1] if line else ""):
        cores[name] += int(number or 1)
    most = max((host.slots for host in hosts), default=0)
    shares = [cores[host.name.partition(".")[0]] * most // host.slots for host in hosts]
    share = str(min(shares, default=0))
    return environ if share in ("0", environ.get("NCPUS")) else {**environ, HOST_CORES: share}


def check_request(request: Request, environ: Mapping[str, str]) -> None:
    """Raise UsageError if there is no program to start."""
    if not request.words:
        raise UsageError("missing command: put it after `--`, e.g. `-- python train.py`")
    program = request.words[0]
    if shutil.which(program, path=environ.get("PATH")) is None:
        script = program.endswith(".py") and os.access(program, os.F_OK)
        remedy = f"; to run the script, use `python {program}`" if script else " on the PATH"
        if program.startswith("hvdtrain."):
            remedy = f"; use `python -m {program}`"
        raise UsageError(f"{program}: no such program{remedy}")


def choose_threads(
    request: Request, layout: RankLayout, cores: int, environ: Mapping[str, str]
) -> int | None:
    """Return the OMP_NUM_THREADS of each rank; None leaves it to the program."""
    return request.threads or launch_threads(
        max(request.ranks_per_host or 0, layout.per_host),
        cores,
        environ,
        known=not (request.hosts or request.hostfile),
        fill=bool(request.ranks_per_host) and not count_gpus(environ),
    )


def checkpoint_dir(command: Sequence[str]) -> Path | None:
    """Return the --checkpoint-dir of a training command or its --config files, or None."""
    directory = effective_value(command, "--checkpoint-dir")
    return Path(directory) if directory else None


def notes(launch: Launch) -> list[str]:
    """Return warnings on a placement that the user may not have intended."""
    warnings = []
    if launch.layout.idle:
        warnings.append(f"no rank for host {', '.join(launch.layout.idle)}")
    ranks = launch.layout.per_host
    share, cores = batch_share(launch.environ), job_cores(launch.cores, launch.environ)
    threads = requested_threads(launch.environ) or 0
    if 0 < share < ranks:
        warnings.append(
            f"{ranks} ranks per host, but the batch system allocated only {share} cores: request "
            f"{ranks} (PBS: ncpus and mpiprocs), or use --ppn {share}"
        )
    elif not launch.threads and threads * ranks > cores:
        warnings.append(
            f"{ranks} ranks of {threads} threads are more than {cores} cores: "
            f"use --threads {max(1, cores // ranks)}"
        )
    return warnings
