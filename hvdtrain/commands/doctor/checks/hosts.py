"""The batch system, its nodefile, and whether the hosts of the job answer."""

from __future__ import annotations

import errno
import shutil
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil

from hvdtrain.commands.doctor.findings import ABSENT, ERROR, OK, WARNING, Finding
from hvdtrain.commands.launch.hosts import Allocation, find_allocation
from hvdtrain.commands.launch.layout import BATCH_SYSTEMS
from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.detect import JOB_VARIABLES

SUBMITTERS = {"sbatch": "Slurm", "qsub": "PBS", "bsub": "LSF"}
SSH = 22
PATIENCE = 3.0  # seconds that a host has to answer
AT_ONCE = 32  # hosts asked at the same time
FEW = 4  # hosts named before they are only counted

ANSWERS, NO_SSH, SILENT, UNKNOWN = "answers", "no ssh", "does not answer", "unknown name"


@dataclass(frozen=True)
class BatchSystem:
    """What is known of the batch system."""

    submitters: tuple[str, ...]  # paths of the commands that submit a job
    job: str  # number of the job that this process belongs to; empty outside of one
    allocation: Allocation  # the hosts of the job
    trouble: str = ""  # why the hosts could not be read


def find_batch(environ: Mapping[str, str]) -> BatchSystem:
    """Look at the PATH and the environment; nothing is asked of a server."""
    found = (shutil.which(name, path=environ.get("PATH")) for name in SUBMITTERS)
    job = next((environ[name] for name in JOB_VARIABLES if environ.get(name)), "")
    try:
        return BatchSystem(tuple(path for path in found if path), job, find_allocation(environ))
    except UsageError as error:
        return BatchSystem((), job, Allocation("none"), str(error))


def own_names() -> frozenset[str]:
    """Return the names of this host in a nodefile: its own, and its interfaces' addresses."""
    addresses = (one.address for some in psutil.net_if_addrs().values() for one in some)
    return frozenset({"localhost", socket.gethostname(), *addresses})


def is_this_host(name: str, here: Collection[str]) -> bool:
    """Return whether ``name`` is one of the names ``here``, with or without its domain."""
    return name in here or _short(name) in {_short(own) for own in here}


def _short(name: str) -> str:
    """Return ``name`` without its domain; an address is left whole."""
    return name if name[:1].isdigit() else name.partition(".")[0]


def slots_here(allocation: Allocation, here: Collection[str]) -> int:
    """Return how many ranks the job has room for on this host; 1 outside a job."""
    return max(1, sum(host.slots for host in allocation.hosts if is_this_host(host.name, here)))


def batch_findings(batch: BatchSystem, here: Collection[str]) -> Iterator[Finding]:
    """Judge the scheduler and the nodefile."""
    hosts = batch.allocation.hosts
    if batch.job:
        yield Finding("scheduler", OK, f"inside job {batch.job} ({batch.allocation.source})")
    elif batch.submitters:
        paths = ", ".join(batch.submitters)
        yield Finding("scheduler", OK, f"{paths}; outside of any job: a login node, it seems")
    else:
        yield Finding("scheduler", ABSENT, "neither qsub nor sbatch nor bsub is on the PATH")
    if batch.trouble:
        yield Finding("hosts of the job", ERROR, batch.trouble, "look at what the job script sets")
    elif not hosts:
        yield Finding("hosts of the job", ABSENT, "no job: ranks start on this host")
    else:
        told = f"{batch.allocation.source}: {_list([f'{h.name}:{h.slots}' for h in hosts])}"
        told += f", {batch.allocation.slots} slots"
        if any(is_this_host(host.name, here) for host in hosts):
            yield Finding("hosts of the job", OK, told)
        else:
            remedy = "run it in the job, on its first host; or unset a PBS_NODEFILE left over"
            evidence = f"{told}; this host, {socket.gethostname()}, is none of them"
            yield Finding("hosts of the job", WARNING, evidence, remedy)


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return ", ".join(names[:FEW]) + more


def ask_hosts(names: Sequence[str], port: int = SSH) -> dict[str, str]:
    """Ask each host for an address and an answer on the port of ssh; log in to none."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(names, pool.map(lambda name: ask_host(name, port), names), strict=True))


def ask_host(name: str, port: int) -> str:
    """Return one of the four answers."""
    try:
        with socket.create_connection((name, port), timeout=PATIENCE):
            return ANSWERS
    except socket.gaierror:
        return UNKNOWN
    except OSError as error:
        return NO_SSH if error.errno == errno.ECONNREFUSED else SILENT


def answer_finding(answers: Mapping[str, str], source: str) -> Finding:
    """Judge the answers of the hosts of a job that ``source`` gave; this host is not among them."""
    check = "other hosts"
    if not answers:
        return Finding(check, ABSENT, "none in this job")
    named = {kind: [name for name, answer in answers.items() if answer == kind] for kind in KINDS}
    bad = [f"{_list(named[kind])}: {kind}" for kind in (UNKNOWN, SILENT) if named[kind]]
    if bad:
        remedy = "leave them out (hvdtrain launch --hosts), and tell the people who run the cluster"
        return Finding(check, ERROR, "; ".join(bad), remedy)
    if named[NO_SSH]:
        # The batch system's own daemons start ranks as well: then nobody misses ssh.
        evidence = f"{_list(named[NO_SSH])}: there, without ssh"
        remedy = (
            f"harmless where mpirun starts ranks through {source}: try hvdtrain doctor -n"
            if source in BATCH_SYSTEMS
            else "start sshd there: mpirun needs it"
        )
        return Finding(check, WARNING, evidence, remedy)
    return Finding(check, OK, f"{_list(list(answers))}: answer{'s' if len(answers) == 1 else ''}")


KINDS = (ANSWERS, NO_SSH, SILENT, UNKNOWN)
