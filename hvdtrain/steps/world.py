"""Step 1, the world: who takes part, and whether launcher and runtime agree."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.detect import BY_HAND, LaunchInfo


@dataclass(frozen=True)
class World:
    """The processes that train together, seen from one of them.

    ``hosts`` is how many hosts take part; ``local_rank`` counts from 0 on each host;
    ``gpus_per_rank`` is more than 1 where one process computes on several; ``stages`` is how many
    ranks in a row hold one model together, each a part of it.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    hosts: int
    gpus_per_rank: int = 1
    stages: int = 1

    @property
    def data_rank(self) -> int:
        """Which share of the data this process has; its rank unless the model is split."""
        return self.rank // self.stages

    @property
    def data_size(self) -> int:
        """Into how many shares the data are cut; the world size unless the model is split."""
        return self.size // self.stages

    @property
    def stage(self) -> int:
        """Which part of the model this process has, from 0; 0 unless the model is split."""
        return self.rank % self.stages

    @property
    def devices(self) -> int:
        """How many devices compute."""
        return self.size * self.gpus_per_rank

    @property
    def shares(self) -> int:
        """Into how many parts a global batch is cut: one per device, or per model that is split."""
        return self.data_size * self.gpus_per_rank

    @property
    def is_writer(self) -> bool:
        """Whether this process writes what is written once: logs, summary, checkpoints."""
        return self.rank == 0


@dataclass(frozen=True)
class Evidence:
    """What a process knows of its MPI and of its launcher, for the message where they differ."""

    mpi: str = ""  # in this process, such as ``Open MPI 5.0.11, /opt/lib/libmpi.so.40``
    own_mpirun: str = ""  # the launcher that is installed with that library
    started_by: str = ""  # the program that started this process


NO_EVIDENCE = Evidence()


def check_launch(
    launch: LaunchInfo, runtime_size: int, runtime: str, evidence: Evidence = NO_EVIDENCE
) -> None:
    """Raise where the launcher started another number of processes than the runtime connected.

    The usual case is eight worlds of size one: the runtime was built with another MPI than the
    one that started it. Every process would then train alone, in silence.

    Args:
        launch: what the launcher's environment tells (see ``hvdtrain.system.runtime.detect``).
        runtime_size: the world size that the runtime itself reports.
        runtime: its name for the message, such as ``Horovod``.
        evidence: what this process found out about itself.

    Raises:
        UsageError: on every rank, since every rank sees the same two numbers.
    """
    if launch.size == runtime_size:
        return
    if launch.size < runtime_size:
        cause = (
            "a script between mpirun and Python has changed or dropped the launcher's variables, "
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
        f"{'tell of' if launch.launcher == BY_HAND else 'started'} {launch.size} "
        f"process{'es' if launch.size > 1 else ''}, but {runtime} sees a world of {runtime_size}: "
        f"{cause}. {_remedy(launch, runtime_size, evidence)}"
    )


def _remedy(launch: LaunchInfo, runtime_size: int, evidence: Evidence) -> str:
    own = evidence.own_mpirun or "the mpirun of this environment"
    if launch.size < runtime_size:
        return "Pass on OMPI_*, PMI*, PALS_* and SLURM_*, or let mpirun start Python itself"
    if launch.launcher == "srun" or "slurmstepd" in evidence.started_by:  # also --mpi=pmi2
        return (
            "Start with `srun --mpi=pmix` (`srun --mpi=list` tells whether this Slurm has it), "
            f"or with {own}"
        )
    if launch.launcher == BY_HAND:
        return f"Start with `{own} -n {launch.size}`, or unset RANK and WORLD_SIZE to train alone"
    return (
        f"Start with {own}, or run `hvdtrain install-horovod --rebuild` with the mpirun that you "
        "want first on the PATH"
    )
