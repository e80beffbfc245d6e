"""A framework's profiler, recording on this rank since it was created."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hvdtrain.steps.world import World

STEP = "ProfilerStep"
"""Name of the span of an update; ``#`` and its number follow, as torch.profiler writes it."""
RANK = "distributedInfo"
"""Key of the rank in a trace, by which HolisticTraceAnalysis and others match files to ranks."""


class Profiler(ABC):
    """Records what the framework does on this rank."""

    @abstractmethod
    def step(self, number: int) -> AbstractContextManager[Any]:
        """Return a context that is the span of update ``number`` in the trace."""

    @abstractmethod
    def mark(self, name: str) -> AbstractContextManager[Any]:
        """Return a context that is a span of this name."""

    @abstractmethod
    def stop(self, path: Path) -> None:
        """Stop recording, and write a gzipped trace in Chrome's JSON format."""


def rank_facts(world: World, strategy: str) -> dict[str, object]:
    """Return the value of ``RANK`` as torch.distributed has it, for strategies without it."""
    return {"backend": strategy, "rank": world.rank, "world_size": world.size}
