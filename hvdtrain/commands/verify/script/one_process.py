"""Let one process answer for N ranks that hold the same: the collectives of torch.distributed.

SUM gives N times the value, gathering N copies, a mean or a broadcast the value. torch itself sees
a group of one process, so that DistributedDataParallel and its kin are what they are on one rank.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hvdtrain.commands.verify.script.watch_distributed import argument
from hvdtrain.commands.verify.script.watch_horovod import SMALL

SAMPLERS = "torch.utils.data.distributed"  # of torch, but it is the script's
# Collectives whose result on one rank depends on what another one holds.
OTHERS = (
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "all_to_all",
    "all_to_all_single",
    "all_reduce_coalesced",
    "all_gather_coalesced",
    "scatter",
    "scatter_object_list",
)


class UnreplayableError(Exception):
    """The script communicates in a way that one process cannot answer."""


class OneProcess:
    """Answers as rank 0 of ``ranks``; ``draws``: see ``replay``."""

    def __init__(self, torch: Any, ranks: int, draws: Any) -> None:
        self.torch, self.ranks, self.draws = torch, ranks, draws
        self.module = torch.distributed

    def install(self) -> None:
        """Answer from now on."""
        self._replace("init_process_group", self._initialize)
        self._replace("get_world_size", lambda original, *a, **k: self.ranks)
        self._replace("new_group", self._group)
        for owner in (self.module, self.module.device_mesh):
            self._replace("init_device_mesh", self._mesh, owner)
        for name in ("all_reduce", "reduce"):
            self._replace(name, self._reduce)
        for name in ("broadcast", "broadcast_object_list", "barrier", "monitored_barrier"):
            self._replace(name, self._keep)
        for name in ("all_gather", "all_gather_object", "gather", "gather_object"):
            self._replace(name, self._gather)
        self._replace("all_gather_into_tensor", self._gather_into)
        for name in ("reduce_scatter", "reduce_scatter_tensor"):
            self._replace(name, self._scatter)
        for name in OTHERS:
            self._replace(name, _refuse)

    def _replace(self, name: str, answer: Callable[..., Any], owner: Any = None) -> None:
        """Replace a function for the script, not for the modules of torch and of hvdtrain."""
        owner = owner or self.module
        original = getattr(owner, name, None)
        if original is None:
            return

        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith(("torch.", "hvdtrain.")) and caller != SAMPLERS:
                return original(*args, **kwargs)
            return answer(original, *args, **kwargs)

        call.__name__ = name
        setattr(owner, name, call)

    def _initialize(self, original: Any, backend: Any = None, *_: Any, **__: Any) -> None:
        store = self.module.HashStore()
        original(backend, store=store, rank=0, world_size=1)

    def _mesh(self, original: Any, device: str, shape: Any, **kwargs: Any) -> Any:
        if tuple(shape) != (self.ranks,):
            raise UnreplayableError("a mesh of several dimensions")
        return original(device, (1,), **kwargs)

    def _group(self, original: Any, ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        if ranks is not None and len(list(ranks)) != self.ranks:
            raise UnreplayableError("new_group of some of the ranks")
        return original(None, *args, **kwargs)  # another one: the script may destroy it

    def _keep(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        values = inspect.signature(original).bind(*args, **kwargs).arguments
        if not values.get("async_op"):
            return None
        future = self.torch.futures.Future()
        future.set_result([next(iter(values.values()))])
        done = {"wait": True, "is_completed": True, "get_future": future}  # result of each method
        return SimpleNamespace(**{name: lambda *_, r=r: r for name, r in done.items()})

    def _reduce(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = argument(original, 0, args, kwargs)
        operations = self.module.ReduceOp
        position = 1 if original.__name__ == "all_reduce" else 2
        op = args[position] if len(args) > position else kwargs.get("op", operations.SUM)
        with self.torch.no_grad():
            tensor.copy_(self._reduced(tensor, op))
        return self._keep(original, *args, **kwargs)

    def _reduced(self, tensor: Any, op: Any) -> Any:
        """Return what ``ranks`` equal tensors give."""
        operations = self.module.ReduceOp
        if op in (operations.AVG, operations.MAX, operations.MIN, operations.BAND, operations.BOR):
            return tensor
        if op == operations.SUM:
            return tensor * self.ranks
        if op == operations.PRODUCT:
            return tensor**self.ranks
        raise UnreplayableError(f"a reduction by {op}")

    def _gather(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        source, target = (0, 1) if original.__name__.startswith("gather") else (1, 0)
        value, results = (argument(original, n, args, kwargs) for n in (source, target))
        if self.torch.is_tensor(value):
            check_gathered(value, self.draws)
        for number in range(len(results or ())):
            if self.torch.is_tensor(results[number]):
                results[number].copy_(value.detach())
            else:
                results[number] = copy.deepcopy(value)
        return self._keep(original, *args, **kwargs)

    def _gather_into(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result, value = (argument(original, n, args, kwargs) for n in (0, 1))
        check_gathered(value, self.draws)
        result.copy_(self.torch.cat([value.detach().reshape(-1)] * self.ranks).view(result.shape))
        return self._keep(original, *args, **kwargs)

    def _scatter(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        values = inspect.signature(original).bind(*args, **kwargs).arguments
        result, value, op = *list(values.values())[:2], values.get("op", self.module.ReduceOp.SUM)
        parts = value if isinstance(value, list) else value.chunk(self.ranks)
        result.copy_(self._reduced(parts[0].detach(), op).view(result.shape))
        return self._keep(original, *args, **kwargs)


def check_gathered(value: Any, draws: Any) -> None:
    """Raise an error for activations, or record what may be: one process has those of all samples.

    Without gradients they may also be metrics.
    """
    if value.numel() > SMALL and value.is_floating_point():
        if sys.modules["torch"].is_grad_enabled():
            raise UnreplayableError("a gather of activations")
        draws.gathered = True


def _refuse(original: Any, *_: Any, **__: Any) -> Any:
    raise UnreplayableError(f"torch.distributed.{original.__name__}")
