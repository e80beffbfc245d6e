"""``hvdtrain launch --elastic``: the request, checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.commands.launch.hosts import Host, parse_lines
from hvdtrain.commands.launch.layout import RankLayout
from hvdtrain.commands.launch.prepare import Request, check_request, choose_hosts, choose_threads
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.machine.frameworks import find_module
from hvdtrain.system.machine.gpus import count_gpus
from hvdtrain.system.machine.limits import physical_cores
from hvdtrain.system.output.text import plural
from hvdtrain.system.runtime.command import Command, run

HERE = "localhost"  # this machine, if no hosts are specified
LIBRARIES = ("horovod.torch.mpi_lib_v2", "horovod.tensorflow.mpi_lib")
GLOO = b"HOROVOD_GLOO_RENDEZVOUS_ADDR"  # in each Horovod library built with Gloo
PATIENCE = 60.0  # seconds for a discovery script


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
        return tuple(Host(host.name, self.ppn or host.slots) for host in hosts)


def make_pool(
    request: Request,
    fewest: int,
    most: int,
    script: Path | None,
    environ: Mapping[str, str] = os.environ,
) -> Pool:
    """Return the requested pool of slots.

    Raises:
        UsageError: the numbers do not fit, or a program cannot be executed.
    """
    if fewest > most:
        raise UsageError(f"--min {fewest} is more than --max {most}")
    if request.ranks_per_host:
        raise UsageError("--room-for: not supported by --elastic; use --threads")
    check_request(request, environ)
    if script is None:
        allocation = choose_hosts(request.hosts, request.hostfile, environ)
        hosts, source = allocation.hosts, allocation.source
        if not hosts:
            hosts, source = (Host(HERE, most),), "this machine"
        pool = Pool(fewest, most, hosts, source, ppn=request.ppn)
        slots = sum(host.slots for host in pool.find())
        if slots < fewest:
            raise UsageError(
                f"--min {fewest}: {source} has {plural(slots, 'slot')}; --discovery can add hosts"
            )
        full = RankLayout(
            slots, tuple(Host(host.name, min(host.slots, most)) for host in pool.find())
        )
        cores, gpus = physical_cores(), count_gpus(environ)
        threads = choose_threads(request, full, cores, gpus, environ)
        return replace(pool, threads=threads)
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
