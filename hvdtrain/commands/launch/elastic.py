"""``hvdtrain launch --elastic``: what is asked for, checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.commands.launch.hosts import Host, parse_lines
from hvdtrain.commands.launch.layout import Layout
from hvdtrain.commands.launch.prepare import Request, check_request, choose_hosts, choose_threads
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.machine.frameworks import find_module
from hvdtrain.system.machine.gpus import count_gpus
from hvdtrain.system.machine.limits import physical_cores
from hvdtrain.system.output.text import plural
from hvdtrain.system.runtime.command import Command, run

HERE = "localhost"  # this machine, where nobody names a host
LIBRARIES = ("horovod.torch.mpi_lib_v2", "horovod.tensorflow.mpi_lib")
GLOO = b"HOROVOD_GLOO_RENDEZVOUS_ADDR"  # stands in a library of Horovod that was built with Gloo
PATIENCE = 60.0  # seconds for a discovery script


@dataclass(frozen=True)
class Pool:
    """How many ranks may run, and where."""

    fewest: int  # ranks; below that is waited for slots
    most: int  # ranks, whatever slots there are
    hosts: tuple[Host, ...]  # where ``script`` is None
    source: str  # who names the hosts, for messages
    script: Path | None = None  # prints a host and its slots per line, anew each time
    ppn: int | None = None  # ranks per host; None: a rank for each slot
    threads: int | None = None  # OMP_NUM_THREADS of each rank; None leaves it to the program

    def find(self) -> tuple[Host, ...]:
        """Return the hosts that are there now.

        Raises:
            HvdtrainError: the script failed.
            UsageError: it prints something else than hosts.
        """
        hosts = self.hosts
        if self.script:
            done = run(Command((str(self.script.absolute()),)), timeout=PATIENCE)
            if not done.ok:
                said = " ".join(done.output.split())[-200:]
                raise HvdtrainError(f"{self.source} ended with code {done.exit_code}: {said}")
            hosts = parse_lines(done.output.splitlines(), self.source)
        return tuple(Host(host.name, self.ppn or host.slots) for host in hosts)


def make_pool(
    request: Request,
    fewest: int,
    most: int,
    script: Path | None,
    environ: Mapping[str, str] = os.environ,
) -> Pool:
    """Return the pool of slots that is asked for.

    Raises:
        UsageError: something does not fit, or is no program.
    """
    if fewest > most:
        raise UsageError(f"--min {fewest} is more than --max {most}")
    if request.ranks_per_host:
        raise UsageError("--room-for is for ranks that stay: leave it out, or give --threads")
    check_request(request, environ)
    if script is None:
        given = choose_hosts(request.hosts, request.hostfile, environ)
        hosts, source = given.hosts, given.source
        if not hosts:
            hosts, source = (Host(HERE, most),), "this machine"
        pool = Pool(fewest, most, hosts, source, ppn=request.ppn)
        slots = sum(host.slots for host in pool.find())
        if slots < fewest:
            has = f"{source} gives {plural(slots, 'slot')}"
            raise UsageError(f"--min {fewest}: {has}, and no other can come without --discovery")
        full = Layout(slots, tuple(Host(one.name, min(one.slots, most)) for one in pool.find()))
        cores, gpus = physical_cores(), count_gpus(environ)
        threads = choose_threads(request, full, cores, gpus, environ)
        return replace(pool, threads=threads)
    named = f"--discovery {script}"
    if request.hosts or request.hostfile:
        raise UsageError(f"{named} names the hosts: leave --hosts and --hostfile out")
    if not script.is_file():
        raise UsageError(f"{named}: no such file")
    if not os.access(script, os.X_OK):
        raise UsageError(f"{named} cannot be executed: chmod +x {script}")
    pool = Pool(fewest, most, (), named, script, request.ppn, request.threads)
    try:
        pool.find()
    except HvdtrainError as error:
        raise UsageError(str(error)) from None
    return pool


def check_gloo(libraries: Iterable[Path | None] | None = None) -> None:
    """Raise ``UsageError`` where Horovod's ``libraries`` cannot connect ranks without MPI."""
    found = [one for one in libraries or map(find_module, LIBRARIES) if one]
    if not found:
        raise UsageError("--elastic is Horovod's: run `hvdtrain install-horovod`")
    for library in found:
        if GLOO not in library.read_bytes():
            raise UsageError(
                f"--elastic needs a Horovod with Gloo, and {library} is built without: run "
                "`hvdtrain install-horovod --rebuild`, with HOROVOD_WITH_GLOO=1"
            )
