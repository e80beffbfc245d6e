"""Step 1, the world: ranks and hosts, and agreement of launcher and runtime."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.detect import BY_HAND, LaunchInfo


@dataclass(frozen=True)
class World:
    """Rank of this process and size of the job.

    ``hosts`` is the number of hosts; ``local_rank`` counts from 0 on each host; ``gpus_per_rank``
    is greater than 1 if a process uses several GPUs.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    hosts: int
    gpus_per_rank: int = 1

    @property
    def devices(self) -> int:
        """Number of devices, each of which computes a share of a global batch."""
        return self.size * self.gpus_per_rank

    @property
    def is_writer(self) -> bool:
        """Whether this process writes logs, summary and checkpoints."""
        return self.rank == 0


@dataclass(frozen=True)
class Evidence:
    """A process's MPI library and launcher, for the message if they do not match."""

    mpi: str = ""  # in this process, e.g. ``Open MPI 5.0.11, /opt/lib/libmpi.so.40``
    matching_mpirun: str = ""  # the launcher installed with that library
    started_by: str = ""  # the program that started this process


def check_launch(
    launch: LaunchInfo, runtime_size: int, runtime: str, evidence: Evidence = Evidence()
) -> None:
    """Raise if the launcher started a different number of processes than the runtime connected.

    Usually these are N worlds of size one: the runtime was built for another MPI than that of the
    launcher. Without this check each process would train independently.

    Raises:
        UsageError: on all ranks, as all have the same two numbers.
    """
    if launch.size == runtime_size:
        return
    if launch.size < runtime_size:
        cause = (
            "a script between mpirun and Python has changed or removed the launcher's variables, "
            "as env -i, sudo and ssh do"
        )
    elif launch.launcher == BY_HAND:
        cause = f"{runtime} does not read these variables"
    elif evidence.mpi:
        by = f" ({evidence.started_by})" if evidence.started_by else ""
        cause = f"its MPI ({evidence.mpi}) is not the one that started it{by}"
    else:
        cause = "no MPI is loaded in this process"
    raise UsageError(
        f"{launch.launcher or 'the command line'} "
        f"{'announce' if launch.launcher == BY_HAND else 'started'} {launch.size} "
        f"process{'es' if launch.size > 1 else ''}, but {runtime} sees a world of {runtime_size}: "
        f"{cause}. {_remedy(launch, runtime_size, evidence)}"
    )


def _remedy(launch: LaunchInfo, runtime_size: int, evidence: Evidence) -> str:
    mpirun = evidence.matching_mpirun or "the mpirun of this environment"
    if launch.size < runtime_size:
        return "Preserve OMPI_*, PMI*, PALS_* and SLURM_*, or let mpirun start Python directly"
    if launch.launcher == "srun" or "slurmstepd" in evidence.started_by:  # also --mpi=pmi2
        return (
            "Start with `srun --mpi=pmix` (`srun --mpi=list` shows whether this Slurm has it), or "
            f"with {mpirun}"
        )
    if launch.launcher == BY_HAND:
        return f"Start with `{mpirun} -n {launch.size}`, or unset RANK and WORLD_SIZE for one rank"
    return (
        f"Start with {mpirun}, or run `hvdtrain install-horovod --rebuild` with the desired mpirun "
        "first on the PATH"
    )
