"""How many threads a rank computes with on a CPU: the one policy, of trainers and of ``launch``.

A user's OMP_NUM_THREADS counts. PBS sets it too, to the cores of a whole chunk, however many ranks
share them; that value does not count. Otherwise a rank takes its share of the cores of its host
that are the job's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.system.machine.gpus import count_gpus
from hvdtrain.system.machine.limits import cpu_quota, physical_cores
from hvdtrain.system.runtime.detect import LAUNCHERS, detect

THREADS = "OMP_NUM_THREADS"
SHARES = ("SLURM_CPUS_ON_NODE", "NCPUS")  # in which batch systems name the job's part of a host
BATCH = ("PBS_JOBID", *SHARES)
# What tells processes of one job from those of another.
JOB_VARIABLES = ("PMIX_NAMESPACE", "PALS_APID", "PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID")


def set_by_pbs(environ: Mapping[str, str]) -> bool:
    """Return whether OMP_NUM_THREADS is the value that PBS has set, for all ranks together."""
    value = environ.get(THREADS)
    return bool(value) and "PBS_JOBID" in environ and value == environ.get("NCPUS")


def requested_threads(environ: Mapping[str, str]) -> str:
    """Return OMP_NUM_THREADS as the user has set it; empty if it is unset, or PBS set it."""
    return "" if set_by_pbs(environ) else environ.get(THREADS, "")


def requested_number(environ: Mapping[str, str]) -> int:
    """Return the user's number of threads; 0 if there is none, or it is no number."""
    value = requested_threads(environ)
    return int(value) if value.isdecimal() else 0


def batch_share(environ: Mapping[str, str]) -> int:
    """Return the cores or hardware threads of this host that the batch system gave; 0: unknown."""
    given = next((environ[name] for name in SHARES if environ.get(name)), "")
    return int(given) if given.isdecimal() else 0


def job_cores(cores: int, environ: Mapping[str, str]) -> int:
    """Return how many cores of this host are the job's: others may compute on the rest."""
    return min(cores, batch_share(environ) or cores)


# A rank's own choice


@dataclass(frozen=True)
class RankCores:
    """What a rank knows of the cores that it may use."""

    host: str
    cpus: tuple[int, ...]  # that it may run on (affinity)
    variables: Mapping[str, str]  # of ``BATCH``, and OMP_NUM_THREADS

    @staticmethod
    def here(host: str, environ: Mapping[str, str]) -> RankCores:
        """Return what this process knows."""
        known = {name: environ[name] for name in (THREADS, *BATCH) if name in environ}
        return RankCores(host, tuple(sorted(os.sched_getaffinity(0))), known)


def agreed_threads(ranks: Sequence[RankCores], rank: int) -> int:
    """Return the threads of ``rank``, given what all ranks know.

    PBS's variables may not have reached every host: what a rank does not see counts as the first
    rank that sees it does.
    """
    mine = ranks[rank]
    seen: dict[str, str] = {}
    for one in (mine, *ranks):
        seen = {**one.variables, **seen}
    if THREADS not in mine.variables:
        seen.pop(THREADS, None)
    local = [number for number, one in enumerate(ranks) if one.host == mine.host]
    affinities = [frozenset(ranks[number].cpus) for number in local]
    return requested_number(seen) or share_of_job(affinities, local.index(rank), seen)


def oversubscription(ranks: Sequence[RankCores], threads: Sequence[int]) -> str:
    """Return the warning that ranks of a host have more threads than cores; empty if none does.

    Args:
        ranks: what each knows.
        threads: of each.
    """
    for host in dict.fromkeys(one.host for one in ranks):
        local = [number for number, one in enumerate(ranks) if one.host == host]
        cores = len({cpu for number in local for cpu in ranks[number].cpus})
        total = sum(threads[number] for number in local)
        if total > max(cores, len(local)):
            return (
                f"{total} threads share {cores} core{'s' if cores > 1 else ''} of {host}: unset "
                f"{THREADS}, or set it to {max(1, cores // len(local))}"
            )
    return ""


def local_threads(
    local_rank: int,
    local_size: int,
    environ: Mapping[str, str] = os.environ,
    processes: Path = Path("/proc"),
) -> int:
    """Return the threads of this rank as far as it can tell by itself; no collective.

    TensorFlow fixes its thread pool when the first operation runs, and Horovod's collectives are
    operations.
    """
    requested = requested_number(environ)
    return requested or local_cores(local_rank, local_size, environ, processes)


def local_cores(
    local_rank: int,
    local_size: int,
    environ: Mapping[str, str] = os.environ,
    processes: Path = Path("/proc"),
) -> int:
    """Return this rank's share of its host's cores; no collective.

    The cores of the other ranks of this host are read from ``/proc`` (Linux). If they cannot be
    seen (a hidden ``/proc``), the other ranks are taken to share the cores of this one.
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
    """Return a rank's share of its host's cores that are the job's, and that its quota allows.

    Args:
        affinities: the cores that each local rank may use, by local rank.
        local_rank: the rank whose share it is.
        environ: for the batch system's part of the host.
    """
    share, cores = threads_per_rank(affinities, local_rank), len(frozenset.union(*affinities))
    limit = min(job_cores(cores, environ), cpu_quota(Path("/")) or cores)
    # Ranks that are bound to no more than that may have unequal shares.
    return share if limit == cores else max(1, min(share, int(limit / len(affinities))))


def threads_per_rank(affinities: Sequence[frozenset[int]], local_rank: int) -> int:
    """Return the threads that let the ranks of one host use each of their cores once.

    A launcher may bind each rank to cores of its own, or leave all ranks on all cores; so a rank's
    share is its cores divided by the number of local ranks whose cores overlap with them.
    """
    mine = affinities[local_rank]
    sharers = sum(1 for other in affinities if other & mine)
    return max(1, len(mine) // max(1, sharers))


def _ranks_here(
    environ: Mapping[str, str], processes: Path
) -> Iterator[tuple[int, frozenset[int]]]:
    """Yield local rank and cores of each process of this job on this host, children too."""
    launch = detect(environ)
    names = [launcher.local_rank for launcher in LAUNCHERS if launcher.name == launch.launcher]
    job = {name: environ[name] for name in JOB_VARIABLES if name in environ}
    for folder in processes.iterdir():
        if not names or not folder.name.isdigit():
            continue
        try:
            pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            other = dict(pair.partition("=")[::2] for pair in pairs)
            rank = other.get(names[0], "")
            if rank.isdigit() and all(other.get(key) == value for key, value in job.items()):
                yield int(rank), frozenset(os.sched_getaffinity(int(folder.name)))
        except OSError:  # gone meanwhile, or another user's
            continue


# What a launcher sets


def launch_threads(
    ranks_per_host: int, cores: int, environ: Mapping[str, str], *, known: bool
) -> int | None:
    """Return the OMP_NUM_THREADS that ranks need to get; None leaves them to the program.

    A job that got a part of a host is not bound to it: its ranks would take all of the host. And
    programs of other makers read the value of PBS.

    Args:
        ranks_per_host: ranks that share a host.
        cores: of the host.
        environ: the user's environment.
        known: whether the hosts are this job's, so that their cores are known.
    """
    own = job_cores(cores, environ)
    partial = own < cores or set_by_pbs(environ)
    if partial and known and not requested_threads(environ):
        return max(1, own // ranks_per_host)
    return None


def fair_threads(
    ranks_per_host: int, cores: int, gpus: int, environ: Mapping[str, str]
) -> int | None:
    """Return the threads per rank with which ``ranks_per_host`` ranks would just fill a host.

    None if the user has set OMP_NUM_THREADS, or GPUs compute: then the cores that a rank is bound
    to decide how many threads help it.

    Args:
        ranks_per_host: ranks to share the host out among, even if fewer run.
        cores: of the host.
        gpus: of the host.
        environ: the user's environment.
    """
    if requested_threads(environ) or gpus:
        return None
    return max(1, cores // ranks_per_host)


def equal_threads(ranks_per_host: int, environ: Mapping[str, str]) -> int | None:
    """Return the threads per rank at every size of a study; None if it is not to set them."""
    cores = job_cores(physical_cores(), environ)
    fair = fair_threads(ranks_per_host, cores, count_gpus(environ), environ)
    return requested_number(environ) or fair


def thread_variables(threads: int | None, environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return what a launcher changes in the environment of its ranks; None: it is unset.

    Args:
        threads: of each rank; None leaves them to the program.
        environ: the user's environment.
    """
    if threads is None:
        return {THREADS: None} if set_by_pbs(environ) else {}
    own = {THREADS: str(threads)}
    # Beside an equal NCPUS the ranks would take it for PBS's own.
    return {**own, "NCPUS": None} if set_by_pbs({**environ, **own}) else {**own}
