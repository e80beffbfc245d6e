"""Step 1, the world: who takes part, and whether launcher and runtime agree about it."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.launch.detect import BY_HAND, Place


@dataclass(frozen=True)
class World:
    """The processes that train together, seen from one of them.

    ``hosts`` is how many hosts take part; ``local_rank`` counts from 0 on each host.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    hosts: int

    @property
    def is_writer(self) -> bool:
        """Whether this process writes what is written once: logs, summary, checkpoints."""
        return self.rank == 0


@dataclass(frozen=True)
class Evidence:
    """What a process knows of its MPI and of its launcher, for the message where they differ."""

    mpi: str = ""
    """The MPI library in this process, such as ``Open MPI 5.0.11, /opt/lib/libmpi.so.40``."""
    own_mpirun: str = ""
    """The launcher that is installed with that library."""
    started_by: str = ""
    """The program that started this process."""


NO_EVIDENCE = Evidence()


def check_launch(
    place: Place, runtime_size: int, runtime: str, evidence: Evidence = NO_EVIDENCE
) -> None:
    """Raise where the launcher started another number of processes than the runtime connected.

    The usual case is eight worlds of size one: the runtime was built with another MPI than the
    one that started it. Every process would then train alone, in silence.

    Args:
        place: what the launcher's environment tells (see ``hvdtrain.launch.detect``).
        runtime_size: the world size that the runtime itself reports.
        runtime: its name for the message, such as ``Horovod``.
        evidence: what this process found out about itself.

    Raises:
        UsageError: on every rank, since every rank sees the same two numbers.
    """
    if place.size == runtime_size:
        return
    if place.size < runtime_size:
        cause = (
            "a script between mpirun and Python has changed or dropped the launcher's variables, "
            "as env -i, sudo and ssh do"
        )
    elif place.launcher == BY_HAND:
        cause = f"{runtime} does not read these variables"
    elif evidence.mpi:
        by = f" ({evidence.started_by})" if evidence.started_by else ""
        cause = f"its MPI ({evidence.mpi}) is not the one that started it{by}"
    else:
        cause = "no MPI is loaded in this process"
    raise UsageError(
        f"{place.launcher or 'the command line'} "
        f"{'tell of' if place.launcher == BY_HAND else 'started'} {place.size} "
        f"process{'es' if place.size > 1 else ''}, but {runtime} sees a world of {runtime_size}: "
        f"{cause}. {_remedy(place, runtime_size, evidence)}"
    )


def _remedy(place: Place, runtime_size: int, evidence: Evidence) -> str:
    own = evidence.own_mpirun or "the mpirun of this environment"
    if place.size < runtime_size:
        return "Pass on OMPI_*, PMI*, PALS_* and SLURM_*, or let mpirun start Python itself"
    if place.launcher == "srun" or "slurmstepd" in evidence.started_by:  # also --mpi=pmi2
        return (
            "Start with `srun --mpi=pmix` (`srun --mpi=list` tells whether this Slurm has it), "
            f"or with {own}"
        )
    if place.launcher == BY_HAND:
        return f"Start with `{own} -n {place.size}`, or unset RANK and WORLD_SIZE to train alone"
    return (
        f"Start with {own}, or run `hvdtrain install-horovod --rebuild` with the mpirun that you "
        "want first on the PATH"
    )


def threads_per_rank(affinities: list[frozenset[int]], local_rank: int) -> int:
    """Threads that let the ranks of one host use each of their cores once.

    A launcher may bind each rank to cores of its own, or leave all ranks on all cores; so a rank's
    share is its cores divided by the number of local ranks whose cores overlap with them.

    Args:
        affinities: the cores that each local rank may use, by local rank.
        local_rank: whose share is asked for.
    """
    mine = affinities[local_rank]
    sharers = sum(1 for other in affinities if other & mine)
    return max(1, len(mine) // max(1, sharers))
