"""From the user's request to the job to start: hosts, launcher, and the placement of ranks."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.commands.launch.argv import Launch
from hvdtrain.commands.launch.hosts import (
    Allocation,
    Host,
    RankLayout,
    find_allocation,
    lay_out,
    parse_hosts,
    parse_lines,
    read_hostfile,
)
from hvdtrain.commands.launch.launcher_choice import agent_settings, find_mpi
from hvdtrain.commands.launch.torchrun import agent_commands
from hvdtrain.config.values import positive
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.machine.frameworks import find_module
from hvdtrain.system.machine.gpus import count_gpus
from hvdtrain.system.machine.limits import packages, physical_cores
from hvdtrain.system.machine.threads import (
    batch_share,
    job_cores,
    launch_threads,
    requested_threads,
)
from hvdtrain.system.output.text import plural
from hvdtrain.system.runtime.command import Command, run
from hvdtrain.system.settings import read_settings

HERE = "localhost"  # this machine, if no hosts are specified for an elastic job
LIBRARIES = ("horovod.torch.mpi_lib_v2", "horovod.tensorflow.mpi_lib")
GLOO = b"HOROVOD_GLOO_RENDEZVOUS_ADDR"  # in each Horovod library built with Gloo
PATIENCE = 60.0  # seconds for a discovery script


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
        help="hosts and their slots (default: those of the PBS or Slurm job, or this host)",
    )
    hosts.add_argument(
        "--hostfile",
        type=Path,
        metavar="F",
        help="file with lines `host`, `host:4` or `host slots=4`",
    )
    parser.add_argument(
        "--ppn", type=positive, metavar="K", help="number of ranks per host (default: its slots)"
    )


def prepare(request: Request, environ: Mapping[str, str] = os.environ) -> Launch:
    """Return the job for ``request``, with the hosts and the launcher.

    Raises:
        UsageError: no launcher, no such program, or the ranks do not fit on the hosts.
    """
    check_request(request, environ)
    allocation = choose_hosts(request.hosts, request.hostfile, environ)
    layout = lay_out(request.ranks, allocation, request.ppn)
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


def prepare_agents(request: Request, environ: Mapping[str, str]) -> dict[str, Command]:
    """Find the hosts, and return the command of torchrun's agent by host.

    Raises:
        UsageError: no such program, or the ranks do not fit on the hosts.
    """
    check_request(request, environ)
    allocation = choose_hosts(request.hosts, request.hostfile, environ)
    ranks, fewest = request.ranks, request.fewest
    if fewest:  # a host may be lost before the start: use the slots that there are
        slots = sum(request.ppn or host.slots for host in allocation.hosts) or ranks
        if fewest > min(slots, ranks):
            raise UsageError(f"--min {fewest}: more than --max {ranks} or the {slots} slots")
        ranks = min(slots, ranks)
    layout = lay_out(ranks, allocation, request.ppn)
    threads = choose_threads(request, layout, physical_cores(), environ)
    return agent_commands(layout, request.words, threads, environ, fewest)


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
    values: dict[str, list[str]] = {"--checkpoint-dir": [], "--config": []}
    for index, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in values:
            value = value if equals else "".join(command[index + 1 : index + 2])
            values[name.replace("_", "-")].append(value)
    directories = [value for file in values["--config"] for value in _directories_in(Path(file))]
    directories += values["--checkpoint-dir"]
    return Path(directories[-1]) if directories and directories[-1] else None


def _directories_in(file: Path) -> list[str]:
    """Return the checkpoint directory in a file of options, if any."""
    try:
        settings = read_settings(file, "checkpoint-dir: DIR")
    except UsageError:  # the ranks report it
        return []
    names = ("checkpoint-dir", "checkpoint_dir")
    return [str(setting.value) for setting in settings if setting.name in names and setting.value]


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


@dataclass(frozen=True)
class Pool:
    """The number of ranks that may run, and the hosts for them."""

    fewest: int  # ranks; with fewer slots the job waits
    most: int  # ranks, even if there are more slots
    hosts: tuple[Host, ...]  # if ``script`` is None
    source: str  # the origin of the hosts, for messages
    script: Path | None = None  # prints a host and its slots per line, at each call
    ppn: int | None = None  # ranks per host; None: one per slot
    threads: int | None = None  # OMP_NUM_THREADS of each rank; None leaves it to the program

    def find(self) -> tuple[Host, ...]:
        """Return the hosts that are available now.

        Raises:
            HvdtrainError: the script failed.
            UsageError: the output of the script is not a list of hosts.
        """
        hosts = self.hosts
        if self.script:
            done = run(Command((str(self.script.absolute()),)), timeout=PATIENCE)
            if not done.ok:
                output = " ".join(done.output.split())[-200:]
                raise HvdtrainError(f"{self.source} ended with code {done.exit_code}: {output}")
            hosts = parse_lines(done.output.splitlines(), self.source)
        # Spare slots replace those of lost ranks; a file may specify more than fit in memory.
        most = 2 * self.most
        return tuple(Host(host.name, min(self.ppn or host.slots, most)) for host in hosts)


def make_pool(
    request: Request, script: Path | None, environ: Mapping[str, str] = os.environ
) -> Pool:
    """Return the requested pool of slots, for from ``request.fewest`` to ``request.ranks`` ranks.

    Raises:
        UsageError: the numbers do not fit, or a program cannot be executed.
    """
    fewest, most = request.fewest or 1, request.ranks
    if fewest > most:
        raise UsageError(f"--min {fewest} is more than --max {most}")
    if request.ranks_per_host:
        raise UsageError("--room-for: not supported by --elastic; use --threads")
    check_request(request, environ)
    if script is None:
        allocation = choose_hosts(request.hosts, request.hostfile, environ)
        hosts = allocation.hosts or (Host(HERE, most),)
        source = allocation.source if allocation.hosts else "this machine"
        pool = Pool(fewest, most, hosts, source, ppn=request.ppn)
        slots = sum(host.slots for host in pool.find())
        if slots < fewest:
            raise UsageError(
                f"--min {fewest}: {source} has {plural(slots, 'slot')}; --discovery can add hosts"
            )
        full = tuple(Host(host.name, min(host.slots, most)) for host in pool.find())
        layout = RankLayout(slots, full)
        return replace(pool, threads=choose_threads(request, layout, physical_cores(), environ))
    option = f"--discovery {script}"
    if request.hosts or request.hostfile:
        raise UsageError(f"{option}: cannot be combined with --hosts or --hostfile")
    if not script.is_file():
        raise UsageError(f"{option}: no such file")
    if not os.access(script, os.X_OK):
        raise UsageError(f"{option}: not executable: run `chmod +x {script}`")
    pool = Pool(fewest, most, (), option, script, request.ppn, request.threads)
    try:
        pool.find()
    except HvdtrainError as error:
        raise UsageError(str(error)) from None
    return pool


def check_gloo(libraries: Iterable[Path | None] | None = None) -> None:
    """Raise ``UsageError`` if Horovod's ``libraries`` cannot connect ranks without MPI."""
    files = [file for file in libraries or map(find_module, LIBRARIES) if file]
    if not files:
        raise UsageError("--elastic needs Horovod: run `hvdtrain install-horovod`")
    for library in files:
        if GLOO not in library.read_bytes():
            raise UsageError(
                f"--elastic needs Horovod with Gloo, but {library} was built without: run "
                "`hvdtrain install-horovod --rebuild`, with HOROVOD_WITH_GLOO=1"
            )
