"""How many threads a rank takes, before TensorFlow's runtime starts: no collective is possible yet.

TensorFlow fixes its thread pool when the first operation runs, and Horovod's collectives are
operations. So the cores of the other ranks of this host are read from ``/proc`` instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from hvdtrain.launch.detect import LAUNCHERS, detect
from hvdtrain.steps.world import threads_per_rank

# What tells processes of one job from those of another.
JOB_VARIABLES = ("PMIX_NAMESPACE", "PALS_APID", "PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID")


def local_threads(
    local_rank: int,
    local_size: int,
    environ: Mapping[str, str] = os.environ,
    processes: Path = Path("/proc"),
) -> int:
    """This rank's share of its host's cores, or what OMP_NUM_THREADS says.

    Where the other ranks cannot be seen (a hidden ``/proc``), they are taken to share the cores of
    this one. No collective; Linux.
    """
    asked = environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked):
        return int(asked)
    mine = frozenset(os.sched_getaffinity(0))
    cores = dict(_ranks_here(environ, processes)) if local_size > 1 else {}
    if len(cores) != local_size or local_rank not in cores:
        return max(1, len(mine) // local_size)
    return threads_per_rank([cores[rank] for rank in sorted(cores)], local_rank)


def _ranks_here(
    environ: Mapping[str, str], processes: Path
) -> Iterator[tuple[int, frozenset[int]]]:
    """Local rank and cores of every process of this job on this host (children count as well)."""
    place = detect(environ)
    names = [launcher.local_rank for launcher in LAUNCHERS if launcher.name == place.launcher]
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
