"""Detect launcher, rank and size from environment variables, without initializing MPI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launcher:
    """A launcher and the environment variables that it sets for a rank.

    Sources: the manual pages of mpirun (Open MPI), mpiexec.hydra (MPICH, Intel MPI), PALS mpiexec,
    srun and torchrun; Horovod's gloo_run.py.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    mark: str = ""  # variable without which the others are ignored; empty: the rank


TORCHRUN = "torchrun"
SPAWN = "--spawn"  # option of a trainer
HOROVODRUN = "horovodrun --gloo"  # supported by no strategy
BY_HAND = "RANK and WORLD_SIZE"  # set by job scripts and Kubernetes without torchrun
OPEN_MPI = "mpirun (Open MPI)"
PALS = "mpiexec (Cray PALS)"
HYDRA = "mpiexec (Hydra)"
SRUN = "srun"
STEP = "SLURM_STEP_ID"  # set in each step of a Slurm job, that is by srun
TORCHRUN_MARK = "TORCHELASTIC_RUN_ID"  # RANK and WORLD_SIZE alone do not imply torchrun
SPAWNED_BY = "HVDTRAIN_SPAWNED_BY"  # the process id of the parent

_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_HOROVOD = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
_OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
LAUNCHERS = (
    Launcher(SPAWN, *_TORCH, mark=SPAWNED_BY),
    Launcher(TORCHRUN, *_TORCH, mark=TORCHRUN_MARK),
    Launcher(HOROVODRUN, *_HOROVOD, mark="HOROVOD_GLOO_RENDEZVOUS_ADDR"),
    Launcher(OPEN_MPI, *_OPEN_MPI),
    Launcher(PALS, "PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    # PALS_SIZE is set by `hvdtrain launch`, not by PALS; with PALS, Cray's PMI sets PMI_SIZE.
    Launcher(PALS, "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    Launcher(HYDRA, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # Slurm sets SLURM_* for the batch script too, so only variables of a *step* count, and srun
    # comes after mpirun, whose variables are more specific.
    Launcher(SRUN, *_SLURM, mark=STEP),
    Launcher(BY_HAND, *_TORCH, mark="MASTER_ADDR"),
)

RESTARTS = "TORCHELASTIC_MAX_RESTARTS"  # maximum number of restarts by torchrun

JOB_VARIABLES = ("PBS_JOBID", "SLURM_JOB_ID")  # job id in batch systems


@dataclass(frozen=True)
class LaunchInfo:
    """Rank and size of this process; without a launcher ``size`` is 1 and ``launcher`` None."""

    launcher: str | None
    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0, which prints messages for all ranks."""
        return self.rank == 0


SINGLE_RANK = LaunchInfo(launcher=None, rank=0, size=1, local_rank=0, local_size=1)


def detect(environ: Mapping[str, str]) -> LaunchInfo:
    """Return rank and size of this process from ``environ``; no communication, no side effect.

    A launcher is ignored if its rank or size is missing or not a number. Local rank and size
    default to rank and size (one host).
    """
    for launcher in LAUNCHERS:
        if not environ.get(launcher.mark or launcher.rank):
            continue
        rank, size = _number(environ, launcher.rank), _number(environ, launcher.size)
        if rank is None or size is None:
            continue
        local_rank = _number(environ, launcher.local_rank)
        local_size = _number(environ, launcher.local_size)
        return LaunchInfo(
            launcher=launcher.name,
            rank=rank,
            size=size,
            local_rank=rank if local_rank is None else local_rank,
            local_size=size if local_size is None else local_size,
        )
    return SINGLE_RANK


def may_be_shell(environ: Mapping[str, str]) -> bool:
    """Return whether this process may have been started from a shell in a Slurm job.

    The shell of ``srun --pty`` or salloc has the variables of a rank, the only one of its step;
    with Slurm's PMI-2 also those that Hydra sets.
    """
    launch = detect(environ)
    return STEP in environ and launch.size == 1 and launch.launcher in (SRUN, HYDRA)


def is_restarted(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun restarts the ranks if one fails."""
    return detect(environ).launcher == TORCHRUN and bool(_number(environ, RESTARTS))


def _number(environ: Mapping[str, str], name: str) -> int | None:
    # SLURM_STEP_TASKS_PER_NODE is e.g. "4" or "4(x2)": use the leading number.
    digits = environ.get(name, "").partition("(")[0].partition(",")[0]
    return int(digits) if digits.isdecimal() else None
