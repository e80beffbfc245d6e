"""Who started me: rank and size as the launcher's environment tells them, before any MPI call.

The variables are a table of data. Nothing here starts MPI, so a login node may ask too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.errors import UsageError


@dataclass(frozen=True)
class Launcher:
    """One launcher and the variables in which it tells a process its rank.

    Sources: the manual pages of mpirun (Open MPI), mpiexec.hydra (MPICH, Intel MPI), PALS mpiexec,
    srun, jsrun and torchrun; Horovod's gloo_run.py.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


TORCHRUN = "torchrun"
SPAWN = "--spawn"  # of a trainer
HOROVODRUN = "horovodrun"  # over Gloo, as `hvdtrain launch --elastic` starts ranks too
BY_HAND = "RANK and WORLD_SIZE"  # what job scripts and Kubernetes set where torchrun is not used

LAUNCHERS = (
    Launcher(SPAWN, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Launcher(TORCHRUN, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Launcher(
        HOROVODRUN, "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"
    ),
    Launcher(
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "mpiexec (Cray PALS)", "PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"
    ),
    # PALS_SIZE is what `hvdtrain launch` sets. PALS itself does not; beside it Cray's PMI does.
    Launcher(
        "mpiexec (Cray PALS)", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"
    ),
    Launcher("mpiexec (Hydra)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher(
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"
    ),
    Launcher(BY_HAND, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
)
# Inside an allocation Slurm sets SLURM_* for the batch script too, so srun comes last, and only
# the variables of a *step* count; a mpirun in the same job sets its own, more particular ones.

TORCHRUN_MARK = "TORCHELASTIC_RUN_ID"  # RANK and WORLD_SIZE alone are too common to mean torchrun
SPAWNED_BY = "HVDTRAIN_SPAWNED_BY"  # the process id of the parent
# A launcher's variables count only beside this one.
MARKS = {
    SPAWN: SPAWNED_BY,
    TORCHRUN: TORCHRUN_MARK,
    HOROVODRUN: "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "srun": "SLURM_STEP_ID",
    BY_HAND: "MASTER_ADDR",
}

RESTARTS = "TORCHELASTIC_MAX_RESTARTS"  # how often torchrun may start the ranks anew
SLOT = "HVDTRAIN_SLOT"  # what the driver of `hvdtrain launch --elastic` calls this process

JOB_VARIABLES = ("PBS_JOBID", "SLURM_JOB_ID", "LSB_JOBID")  # in which a batch job has its number


@dataclass(frozen=True)
class LaunchInfo:
    """What the launcher says of this process; ``size`` 1 and ``launcher`` None when alone."""

    launcher: str | None
    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0, which speaks for all."""
        return self.rank == 0


ALONE = LaunchInfo(launcher=None, rank=0, size=1, local_rank=0, local_size=1)


def detect(environ: Mapping[str, str]) -> LaunchInfo:
    """Read the rank of this process from ``environ``; no collective, no side effect.

    A variable that is absent or no number makes the launcher count as absent. Local rank and size
    fall back to rank and size (one host) where the launcher does not tell them.
    """
    for launcher in LAUNCHERS:
        if not environ.get(MARKS.get(launcher.name, launcher.rank)):
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
    return ALONE


def check_local_rank(given: int | None, environ: Mapping[str, str]) -> None:
    """Compare ``--local-rank``, as torch.distributed.launch passes it, with what ``environ`` tells.

    Raises:
        UsageError: they differ.
    """
    launch = detect(environ)
    names = [one.local_rank for one in LAUNCHERS if one.name == launch.launcher]
    told = launch.launcher is None or any(_number(environ, name) is not None for name in names)
    if given is None or given == launch.local_rank or not told:
        return
    says = (
        f"{launch.launcher} set {names[0]}={launch.local_rank}" if names else "no launcher is here"
    )
    raise UsageError(
        f"--local-rank {given}, but {says}: leave the option out, which torch.distributed.launch "
        "passes by itself"
    )


def is_restarted(environ: Mapping[str, str]) -> bool:
    """Whether the ranks are started anew where one fails."""
    by_torchrun = detect(environ).launcher == TORCHRUN and bool(_number(environ, RESTARTS))
    return by_torchrun or is_elastic(environ)


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Whether this process, where it loses another rank, is started anew (``elastic.py``)."""
    return detect(environ).launcher == HOROVODRUN and SLOT in environ


def _number(environ: Mapping[str, str], name: str) -> int | None:
    # SLURM_STEP_TASKS_PER_NODE reads like "4" or "4(x2)": the leading number is what counts.
    digits = environ.get(name, "").partition("(")[0].partition(",")[0]
    return int(digits) if digits.isdecimal() else None
