"""Let one process answer for N ranks of Horovod for PyTorch that hold the same.

Horovod's library connects one process and says N, so that its DistributedOptimizer is what it is on
N ranks, and its operations run on one: a mean or a broadcast is the value. SUM is multiplied by N,
a gather gets N copies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from hvdtrain.commands.verify.script.one_process import UnreplayableError, check_gathered
from hvdtrain.commands.verify.script.watch_horovod import first_argument, leaves

SIZES = ("horovod_size", "horovod_local_size", "horovod_process_set_size")
GATHERS = ("allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async")
# Functions whose result on one rank depends on what another one holds.
OTHERS = (
    "alltoall",
    "alltoall_async",
    "reducescatter",
    "reducescatter_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "add_process_set",
)
BETWEEN = ("horovod.", "torch.", "hvdtrain.commands.")  # modules of calls that others make


class OneHorovod:
    """Answers as rank 0 of ``ranks`` for ``horovod.torch``; ``draws``: see ``replay``."""

    def __init__(self, module: Any, ranks: int, draws: Any) -> None:
        self.module, self.ranks, self.draws = module, ranks, draws
        self.operations = sys.modules[f"{module.__name__}.mpi_ops"]

    def install(self) -> None:
        """Answer from now on, whatever has imported Horovod's functions before."""
        library = self.operations._basics.MPI_LIB_CTYPES
        for name in SIZES:
            self._answer(library, name, self._size)
        for name in ("_allreduce_async", "_grouped_allreduce_async"):
            self._answer(self.operations, name, self._reduce)
        self._answer(self.operations, "_allgather_async", self._gather)
        self._answer(self.operations, "_grouped_allgather_async", self._gather)
        self._answer(self.operations, "_broadcast_async", self._broadcast)
        for name in GATHERS:
            self._answer(self.module, name, self._checked)
        for name in OTHERS:
            setattr(self.module, name, partial(_refuse, name))

    @staticmethod
    def _answer(owner: Any, name: str, answer: Callable[..., Any]) -> None:
        """Replace a function for the script, not for hvdtrain's adapters."""
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if _called_by().startswith("hvdtrain."):
                return original(*args, **kwargs)
            return answer(original, *args, **kwargs)

        setattr(owner, name, call)

    def _size(self, original: Any, *args: Any) -> int:
        size: int = original(*args)
        return self.ranks if size > 0 else size  # an error

    def _reduce(self, original: Any, *args: Any) -> Any:
        tensors, outputs, name, op, prescale, postscale, process_set = args
        if op in (self.module.Adasum, self.module.Product):
            raise UnreplayableError("a reduction by Adasum or Product")
        if op == self.module.Sum:
            postscale *= self.ranks
        return original(tensors, outputs, name, op, prescale, postscale, process_set)

    def _gather(self, original: Any, value: Any, *args: Any) -> Any:
        copies = [
            leaf if not leaf.dim() else leaf.repeat(self.ranks, *[1] * (leaf.dim() - 1))
            for leaf in leaves(value)
        ]
        return original(copies if isinstance(value, list | tuple) else copies[0], *args)

    def _checked(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        for leaf in leaves(first_argument(args, kwargs)):
            check_gathered(leaf, self.draws)
        return original(*args, **kwargs)

    def _broadcast(self, original: Any, *args: Any) -> Any:
        if args[2]:
            raise UnreplayableError("a broadcast from another rank than 0")
        return original(*args)


def _called_by() -> str:
    """Return the name of the module that has called Horovod."""
    frame: Any = sys._getframe(2)
    while frame and frame.f_globals.get("__name__", "").startswith(BETWEEN):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame else ""


def _refuse(name: str, *_: Any, **__: Any) -> Any:
    raise UnreplayableError(f"hvd.{name}")
