"""The batch system, its nodefile, and whether the hosts of the job are reachable."""

from __future__ import annotations

import errno
import shutil
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hvdtrain.commands.doctor.findings import ABSENT, ERROR, OK, WARNING, Finding, warning_if
from hvdtrain.commands.launch.hosts import BATCH_SYSTEMS, Allocation, find_allocation, lay_out
from hvdtrain.commands.launch.prepare import Request
from hvdtrain.errors import UsageError
from hvdtrain.system.machine.network import is_this_host
from hvdtrain.system.runtime.detect import JOB_VARIABLES

SUBMITTERS = ("sbatch", "qsub")
OTHERS = "other hosts"
SSH = 22
TIMEOUT = 3.0  # seconds, per host
AT_ONCE = 32  # number of hosts probed at the same time
SHOWN_HOSTS = 4  # maximum number of host names in a finding

# The answers of a host.
KINDS = ANSWERS, NO_SSH, SILENT, UNKNOWN = "answers", "no ssh", "does not answer", "unknown name"


@dataclass(frozen=True)
class BatchSystem:
    """The batch system and the job of this process."""

    submitters: tuple[str, ...]  # paths of the commands that submit a job
    job: str  # identifier of the job of this process; empty outside a job
    allocation: Allocation  # the hosts of the job
    error: str = ""  # on reading the hosts


def find_batch(environ: Mapping[str, str]) -> BatchSystem:
    """Return the batch system, by PATH and environment only; no server is contacted."""
    paths = (shutil.which(name, path=environ.get("PATH")) for name in SUBMITTERS)
    job = next((environ[name] for name in JOB_VARIABLES if environ.get(name)), "")
    try:
        return BatchSystem(tuple(path for path in paths if path), job, find_allocation(environ))
    except UsageError as error:
        return BatchSystem((), job, Allocation("none"), str(error))


def local_slots(allocation: Allocation, local: Collection[str]) -> int:
    """Return the number of slots of the job on this host; 1 outside a job."""
    return max(1, sum(host.slots for host in allocation.hosts if is_this_host(host.name, local)))


def ranks_here(request: Request | None, allocation: Allocation, local: Collection[str]) -> int:
    """Return the number of ranks on this host, at least 1: the requested ones, or its slots."""
    if request is None:
        return local_slots(allocation, local)
    if not allocation.hosts:
        return request.ranks
    try:
        hosts = lay_out(request.ranks, allocation, request.ppn).hosts
    except UsageError:  # starting the ranks reports it
        return local_slots(allocation, local)
    return max(1, sum(host.slots for host in hosts if is_this_host(host.name, local)))


def batch_findings(batch: BatchSystem, local: Collection[str]) -> Iterator[Finding]:
    """Judge the scheduler and the nodefile."""
    hosts = batch.allocation.hosts
    if batch.job:
        yield Finding("scheduler", OK, f"inside job {batch.job} ({batch.allocation.source})")
    elif batch.submitters:
        paths = ", ".join(batch.submitters)
        yield Finding("scheduler", OK, f"{paths}; outside a job: probably a login node")
    else:
        yield Finding("scheduler", ABSENT, "neither qsub nor sbatch on the PATH")
    if batch.error:
        yield Finding("hosts of the job", ERROR, batch.error, "check the job script's variables")
    elif not hosts:
        yield Finding("hosts of the job", ABSENT, "no job: ranks start on this host")
    else:
        evidence = f"{batch.allocation.source}: {_list([f'{h.name}:{h.slots}' for h in hosts])}"
        evidence, remedy = f"{evidence}, {batch.allocation.slots} slots", ""
        if not any(is_this_host(host.name, local) for host in hosts):
            remedy = "run in the job, on its first host; or unset a stale PBS_NODEFILE"
            evidence += f"; this host, {socket.gethostname()}, is not among them"
        yield warning_if(remedy, "hosts of the job", evidence)


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_HOSTS} more" if len(names) > SHOWN_HOSTS else ""
    return ", ".join(names[:SHOWN_HOSTS]) + more


def other_hosts(allocation: Allocation, local: Collection[str]) -> Finding:
    """Probe the other hosts of the job, if this host belongs to it."""
    names = [host.name for host in allocation.hosts]
    others = [name for name in names if not is_this_host(name, local)]
    if names and len(others) == len(names):
        evidence = f"{_list(names)}: not contacted, as this host is not among them"
        return Finding(OTHERS, ABSENT, evidence)
    return answer_finding(probe_hosts(others), allocation.source)


def probe_hosts(names: Sequence[str], port: int = SSH) -> dict[str, str]:
    """Resolve each host and connect to its ssh port, without logging in."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(names, pool.map(lambda name: probe_host(name, port), names), strict=True))


def probe_host(name: str, port: int) -> str:
    """Return one of the four ``KINDS`` of answers."""
    try:
        with socket.create_connection((name, port), timeout=TIMEOUT):
            return ANSWERS
    except socket.gaierror:
        return UNKNOWN
    except OSError as error:
        return NO_SSH if error.errno == errno.ECONNREFUSED else SILENT


def answer_finding(answers: Mapping[str, str], source: str) -> Finding:
    """Judge the answers of the other hosts of a job; ``source``: of its allocation."""
    if not answers:
        return Finding(OTHERS, ABSENT, "none in this job")
    named = {kind: [name for name, answer in answers.items() if answer == kind] for kind in KINDS}
    bad = [f"{_list(named[kind])}: {kind}" for kind in (UNKNOWN, SILENT) if named[kind]]
    if bad:
        remedy = "exclude them (hvdtrain launch --hosts), and report them to the administrators"
        return Finding(OTHERS, ERROR, "; ".join(bad), remedy)
    if named[NO_SSH]:
        # The batch system's daemons may start ranks as well: then ssh is not needed.
        evidence = f"{_list(named[NO_SSH])}: reachable, without ssh"
        remedy = (
            f"harmless if mpirun starts ranks through {source}: check with hvdtrain doctor -n"
            if source in BATCH_SYSTEMS
            else "start sshd there: mpirun needs it"
        )
        return Finding(OTHERS, WARNING, evidence, remedy)
    return Finding(OTHERS, OK, f"{_list(list(answers))}: answer{'s' if len(answers) == 1 else ''}")
