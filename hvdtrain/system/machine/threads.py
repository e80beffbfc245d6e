"""Number of CPU threads per rank: the policy of trainers and ``launch``.

The user's OMP_NUM_THREADS takes precedence, but not a value set by PBS: that is the number of cores
of a whole chunk, for any number of ranks. By default a rank uses its share of the job's cores of
its host.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.system.machine.gpus import count_gpus
from hvdtrain.system.machine.limits import cpu_quota, physical_cores
from hvdtrain.system.runtime.detect import LAUNCHERS, detect

THREADS = "OMP_NUM_THREADS"
HOST_CORES = "PBS_HOST_CORES"  # set by ``launch`` if NCPUS, of the first chunk, is another number
SHARES = (HOST_CORES, "SLURM_CPUS_ON_NODE", "NCPUS")  # the job's number of cores on this host
BATCH = ("PBS_JOBID", *SHARES)
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
UNBOUND = {"", "disabled", "none"}  # values of KMP_AFFINITY, after others and a comma
# Variables that distinguish processes of different jobs.
STEP_VARIABLES = ("PMIX_NAMESPACE", "PALS_APID", "PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID")


def set_by_pbs(environ: Mapping[str, str]) -> bool:
    """Return whether OMP_NUM_THREADS was set by PBS, for all ranks together."""
    value = environ.get(THREADS)
    return bool(value) and "PBS_JOBID" in environ and value == environ.get("NCPUS")


def requested_threads(environ: Mapping[str, str]) -> int | None:
    """Return the user's OMP_NUM_THREADS; None if unset or set by PBS, 0 if not a number."""
    value = environ.get(THREADS)
    if not value or set_by_pbs(environ):
        return None
    return int(value) if value.isdecimal() else 0


def batch_share(environ: Mapping[str, str]) -> int:
    """Return the cores or hardware threads of this host allocated to the job; 0: unknown."""
    allocated = next((environ[name] for name in SHARES if environ.get(name)), "")
    return int(allocated) if allocated.isdecimal() else 0


def job_cores(cores: int, environ: Mapping[str, str]) -> int:
    """Return the job's number of cores on this host; other jobs may use the rest."""
    return min(cores, batch_share(environ) or cores)


# OpenMP binds ranks that no launcher has bound to the same cores.


def binding(environ: Mapping[str, str]) -> str:
    """Return the variable by which OpenMP binds threads to cores; empty: it does not."""
    if environ.get("OMP_PROC_BIND", "").lower() == "false":
        return ""
    values = {name: environ.get(name, "").lower().split(",") for name in BINDING}
    return next((name for name in BINDING if UNBOUND.isdisjoint(values[name])), "")


def own_cpus() -> set[int]:
    """Return the cores of this process, also if OpenMP has bound this thread to one of them."""
    cpus = os.sched_getaffinity(0)
    with suppress(AttributeError):  # no OpenMP is loaded
        openmp = ctypes.CDLL(None)
        for index in range(openmp.omp_get_num_places()):
            numbers = (ctypes.c_int * openmp.omp_get_place_num_procs(index))()
            openmp.omp_get_place_proc_ids(index, numbers)
            cpus.update(numbers)
    return cpus


# Choice of a rank


@dataclass(frozen=True)
class RankCores:
    """The cores that a rank may use, as it sees them."""

    host: str
    cpus: tuple[int, ...]  # affinity
    variables: Mapping[str, str]  # of ``BATCH`` and ``BINDING``, and OMP_NUM_THREADS

    @staticmethod
    def here(host: str, environ: Mapping[str, str]) -> RankCores:
        """Return the values of this process."""
        names = (THREADS, *BATCH, *BINDING)
        known = {name: environ[name] for name in names if name in environ}
        return RankCores(host, tuple(sorted(own_cpus())), known)


def agreed_threads(ranks: Sequence[RankCores], rank: int) -> int:
    """Return the number of threads of ``rank``.

    PBS's variables may be missing on some hosts: a missing variable has the value of the first rank
    that has it.
    """
    mine = ranks[rank]
    seen: dict[str, str] = {}
    for cores in (mine, *ranks):
        seen = {**cores.variables, **seen}
    if THREADS not in mine.variables:
        seen.pop(THREADS, None)
    local = [number for number, cores in enumerate(ranks) if cores.host == mine.host]
    affinities = [frozenset(ranks[number].cpus) for number in local]
    return requested_threads(seen) or share_of_job(affinities, local.index(rank), seen)


def oversubscription(ranks: Sequence[RankCores], threads: Sequence[int]) -> str:
    """Return a warning if ranks of a host share cores, or have too many threads; else empty."""
    by_host: dict[str, list[int]] = {}
    for number, rank in enumerate(ranks):
        by_host.setdefault(rank.host, []).append(number)
    for host, local in by_host.items():
        cores = len({cpu for number in local for cpu in ranks[number].cpus})
        bound = max(binding(ranks[number].variables) for number in local)
        if bound and cores < sum(len(ranks[number].cpus) for number in local):
            who = f"the OpenMP threads of {len(local)} ranks of {host}"
            return f"{bound} binds {who} to the same cores: unset it"
        total = sum(threads[number] for number in local)
        if total > max(cores, len(local)):
            return (
                f"{total} threads share {cores} core{'s' if cores > 1 else ''} of {host}: unset "
                f"{THREADS}, or set it to {max(1, cores // len(local))}"
            )
    return ""


def local_cores(
    local_rank: int,
    local_size: int,
    environ: Mapping[str, str] = os.environ,
    processes: Path = Path("/proc"),
) -> int:
    """Return this rank's share of its host's cores without communication between ranks.

    TensorFlow fixes its thread pool when the first operation runs, and Horovod's collectives are
    operations. The cores of the other local ranks are read from ``/proc`` (Linux). If it is hidden,
    the other ranks are assumed to share the cores of this one.
    """
    mine = frozenset(os.sched_getaffinity(0))
    cores = dict(_ranks_here(environ, processes)) if local_size > 1 else {}
    if len(cores) != local_size or local_rank not in cores:
        return share_of_job([mine] * local_size, 0, environ)
    affinities = [cores[rank] for rank in sorted(cores)]
    return share_of_job(affinities, local_rank, environ)


def share_of_job(
    affinities: Sequence[frozenset[int]], local_rank: int, environ: Mapping[str, str]
) -> int:
    """Return a rank's share of the job's cores on its host, within its quota.

    ``affinities`` are the cores that each local rank may use; ``environ`` has the batch system's
    allocation.
    """
    share, cores = threads_per_rank(affinities, local_rank), len(frozenset.union(*affinities))
    limit = min(job_cores(cores, environ), cpu_quota(Path("/")) or cores)
    # Ranks that are bound to these cores may have unequal shares.
    return share if limit == cores else max(1, min(share, int(limit / len(affinities))))


def threads_per_rank(affinities: Sequence[frozenset[int]], local_rank: int) -> int:
    """Return the number of threads with which the ranks of a host use each core once.

    A launcher may bind each rank to separate cores, or leave all ranks on all cores; so a rank's
    share is its cores divided by the number of local ranks whose cores overlap with them.
    """
    mine = affinities[local_rank]
    sharers = sum(1 for affinity in affinities if affinity & mine)
    return max(1, len(mine) // max(1, sharers))


def _ranks_here(
    environ: Mapping[str, str], processes: Path
) -> Iterator[tuple[int, frozenset[int]]]:
    """Yield local rank and cores of each process of this job on this host, including children."""
    launch = detect(environ)
    names = [launcher.local_rank for launcher in LAUNCHERS if launcher.name == launch.launcher]
    job = {name: environ[name] for name in STEP_VARIABLES if name in environ}
    for folder in processes.iterdir():
        if not names or not folder.name.isdigit():
            continue
        try:
            pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            variables = dict(pair.partition("=")[::2] for pair in pairs)
            rank = variables.get(names[0], "")
            if rank.isdigit() and all(variables.get(key) == value for key, value in job.items()):
                yield int(rank), frozenset(os.sched_getaffinity(int(folder.name)))
        except OSError:  # it has exited, or belongs to another user
            continue


# Choice of a launcher


def launch_threads(
    ranks_per_host: int, cores: int, environ: Mapping[str, str], *, known: bool, fill: bool
) -> int | None:
    """Return the OMP_NUM_THREADS to set for the ranks; None: leave it to the program.

    A job with a part of a host is not bound to it, so its ranks would use the whole host; other
    programs read the value of PBS; and the ranks would take NCPUS for the cores of their host.

    Args:
        ranks_per_host: number of ranks that share the cores of a host, even if fewer run.
        cores: number of cores of the host.
        environ: the user's environment.
        known: whether the hosts are this job's, so that their cores are known.
        fill: whether the ranks use all cores of a host also without such a reason; not on a host
            with GPUs, where the number depends on the cores to which a rank is bound.
    """
    if requested_threads(environ) is not None:
        return None
    allocated = job_cores(cores, environ)
    if known and (allocated < cores or set_by_pbs(environ) or HOST_CORES in environ):
        return max(1, allocated // ranks_per_host)
    return max(1, cores // ranks_per_host) if fill else None


def equal_threads(ranks_per_host: int, environ: Mapping[str, str]) -> int | None:
    """Return the threads per rank for all sizes of a study; None: leave them unset."""
    cores, fill = job_cores(physical_cores(), environ), not count_gpus(environ)
    return requested_threads(environ) or launch_threads(
        ranks_per_host, cores, environ, known=False, fill=fill
    )


def thread_variables(threads: int | None, environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return changes to the environment of the ranks, by variable; None: unset it.

    Without ``threads`` the number is left to the program.
    """
    if threads is None:
        return {THREADS: None} if set_by_pbs(environ) else {}
    changes: dict[str, str | None] = {THREADS: str(threads)}
    # With an equal NCPUS the ranks would take it for a value set by PBS.
    by_pbs = set_by_pbs({**environ, THREADS: str(threads)})
    return {**changes, "NCPUS": None} if by_pbs else changes
