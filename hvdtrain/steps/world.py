"""Step 1, the world: who takes part, and whether launcher and runtime agree about it."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.launch.detect import Place


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


def check_launch(place: Place, runtime_size: int, runtime: str) -> None:
    """Raise where the launcher started another number of processes than the runtime connected.

    The usual case is eight worlds of size one: the runtime was built with another MPI than the
    one that started it. Every process would then train alone, in silence.

    Args:
        place: what the launcher's environment tells (see ``hvdtrain.launch.detect``).
        runtime_size: the world size that the runtime itself reports.
        runtime: its name for the message, such as ``Horovod``.

    Raises:
        UsageError: on every rank, since every rank sees the same two numbers.
    """
    if place.size != runtime_size:
        raise UsageError(
            f"{place.launcher or 'the command line'} started {place.size} "
            f"process{'es' if place.size > 1 else ''}, but {runtime} "
            f"sees a world of {runtime_size}: it was built with another MPI than the one that "
            "started it. Start with the mpirun of this environment (`which mpirun`), or run "
            "`hvdtrain install-horovod --rebuild` with that MPI on the PATH"
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
