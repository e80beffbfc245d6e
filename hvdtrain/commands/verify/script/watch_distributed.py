"""Watch torch.distributed: the collectives that the script calls, and what wraps its model.

``torch`` is an argument, because it must only be imported by the script. Collectives that torch
itself calls are not watched: they are looked up in another module, or reduce in C++.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from hvdtrain.commands.verify.hooks import after, best_effort, replace
from hvdtrain.commands.verify.script.record import TO_ONE, HorovodWorld, ScriptRecorder
from hvdtrain.commands.verify.script.watch_horovod import SMALL, copied, count, leaves
from hvdtrain.system.runtime.detect import detect

DDP = "DistributedDataParallel"
FSDP1 = "FullyShardedDataParallel (use fully_shard)"
BROADCASTS = ("broadcast", "broadcast_object_list")
REDUCTIONS = ("all_reduce", "reduce")
SCATTERS = ("reduce_scatter", "reduce_scatter_tensor", "all_reduce_coalesced")
GATHERS = {  # position of the value that each rank gives, and of the result
    "all_gather": (1, 0),
    "all_gather_into_tensor": (1, 0),
    "all_gather_object": (1, 0),
    "gather": (0, 1),
    "gather_object": (0, 1),
}
NAMES = {  # of these parameters
    "all_gather": ("tensor_list", "tensor"),
    "all_gather_into_tensor": ("output_tensor", "input_tensor"),
    "all_gather_object": ("object_list", "obj"),
    "gather": ("tensor", "gather_list"),
    "gather_object": ("obj", "object_gather_list"),
    "broadcast_object_list": ("object_list",),
}


class DistributedWatch:
    """Watch PyTorch's own way to distribute a script, unless Horovod or hvdtrain does."""

    def __init__(self, recorder: ScriptRecorder, ranks: int) -> None:
        self.recorder, self.ranks = recorder, ranks
        self.spawns = 0  # number of calls of mp.spawn

    def watch(self, torch: Any) -> None:
        """Watch ``torch.distributed`` from now on."""
        self.torch, module = torch, torch.distributed
        if not module.is_available():
            return
        after(module, "init_process_group", self._initialized)
        for names, watched in (
            (BROADCASTS, self._broadcast),
            (REDUCTIONS, self._reduction),
            (SCATTERS, self._scatter),
            (GATHERS, self._gather),
        ):
            for name in names:
                replace(module, name, watched)
        replace(module, "barrier", self._barrier)
        self.wrapper = importlib.import_module("torch.nn.parallel.distributed")
        replace(getattr(self.wrapper, DDP), "__init__", self._wrapped)
        for name in ("spawn", "start_processes"):
            original = getattr(torch.multiprocessing, name)
            setattr(torch.multiprocessing, name, partial(self._spawn, original))
        hook = partial(best_effort, self._forward)
        self.torch.nn.modules.module.register_module_forward_pre_hook(hook)

    def shards(self, module: Any) -> None:
        """Watch ``torch.distributed.fsdp``, whose shards are parts of one copy of the model."""
        after(module, "fully_shard", lambda *a, **k: self._sharded("fully_shard"))
        after(module.FullyShardedDataParallel, "__init__", self._flattened)

    @property
    def by_script(self) -> bool:
        """Whether the script itself calls, neither Horovod nor hvdtrain nor a wrapper."""
        record = self.recorder.record
        horovod = record.world is not None and not record.distributed
        return not (self.recorder.ignored or record.hvdtrain or horovod)

    def _initialized(self, *_: Any, **__: Any) -> None:
        if not self.by_script:
            return
        launch, groups = detect(os.environ), self.torch.distributed
        self.recorder.record.distributed = True
        world = groups.get_rank(), groups.get_world_size(), launch.local_rank, launch.local_size
        self.recorder.joined(HorovodWorld(*world))

    def _wrapped(self, original: Any, *args: Any, **kwargs: Any) -> None:
        """Record that a model is wrapped, by which rank 0's parameters are broadcast."""
        if not self.by_script:
            return original(*args, **kwargs)
        self.recorder.record.distributed = True
        with self.recorder.waiting(DDP):
            original(*args, **kwargs)
        self.recorder.wrapped += args[0].parameters()
        self.recorder.call(DDP)
        return None

    def _sharded(self, name: str) -> None:
        if self.by_script:
            self.recorder.record.distributed = True
            self.recorder.call(name)
            self.recorder.record.reduced += 1

    def _flattened(self, *_: Any, **__: Any) -> None:
        """Refuse FSDP1, of whose parameters each rank has a piece without a shape."""
        if self.by_script:
            self.recorder.record.library = FSDP1

    def _spawn(
        self,
        original: Any,
        fn: Any,
        args: Any = (),
        nprocs: int = 1,
        join: bool = True,
        *rest: Any,
        **more: Any,
    ) -> Any:
        """Call ``fn`` as this rank in this process, instead of starting others that call it."""
        recorder, groups = self.recorder, self.torch.distributed
        if not self.by_script or groups.is_initialized():  # these are not the ranks
            return original(fn, args, nprocs, join, *rest, **more)
        recorder.record.spawned = nprocs
        if nprocs != self.ranks:
            raise SystemExit(f"spawn: {nprocs} processes, not {self.ranks}")
        rank = int(recorder.path.stem)
        if self.spawns:  # the process that starts others waits for them
            self._meet(rank)
        self.spawns += 1
        if rank and not recorder.copy:  # so far it has run what one process runs
            recorder.record.written.clear()
        recorder.copy = False
        fn(rank, *args)
        recorder.copy = rank > 0
        if groups.is_initialized():  # that of a process that has ended
            groups.destroy_process_group()
        return None if join else SimpleNamespace(join=lambda *_, **__: True, processes=[])

    def _meet(self, rank: int) -> None:
        """Wait until all ranks have ended the functions of earlier spawns."""
        ranks = range(self.recorder.record.started)
        path = self.recorder.path.with_name("spawns")
        store = self.torch.distributed.FileStore(str(path), len(ranks))
        store.set(f"{self.spawns} {rank}", "")
        store.wait([f"{self.spawns} {number}" for number in ranks])

    def _forward(self, module: Any, _: Any) -> None:
        """Count the passes after which DDP reduces the gradients."""
        if isinstance(module, getattr(self.wrapper, DDP)) and self.by_script:
            reduces = module.require_backward_grad_sync and self.torch.is_grad_enabled()
            self.recorder.record.reduced += reduces

    def _broadcast(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.by_script:
            return original(*args, **kwargs)
        with self.recorder.waiting(original.__name__):
            result = original(*args, **kwargs)
        value = argument(original, 0, args, kwargs)
        if not self.torch.is_tensor(value) or value.is_floating_point():  # not a generator's state
            self.recorder.broadcast(original.__name__, count(value))
        return result

    def _barrier(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.by_script:
            return original(*args, **kwargs)
        with self.recorder.waiting("barrier"):
            return original(*args, **kwargs)

    def _scatter(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.recorder.record.reduced += self.by_script
        return original(*args, **kwargs)

    def _reduction(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Record a reduction; few values that are no gradient are a metric."""
        tensor = argument(original, 0, args, kwargs)
        if not self.by_script:
            return original(*args, **kwargs)
        if tensor.numel() > SMALL or self.recorder.is_gradient(tensor):
            self.recorder.record.reduced += 1
            return original(*args, **kwargs)
        before = copied(tensor)
        result = original(*args, **kwargs)
        if result is None:  # not asynchronous, and on the ranks that have the result
            self._metric(original.__name__, before, tensor, args, kwargs)
        return result

    def _gather(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        source, target = (argument(original, n, args, kwargs) for n in GATHERS[original.__name__])
        if self.by_script and self.torch.is_tensor(source):
            self.recorder.record.reduced += self.recorder.is_gradient(source)
        if self.by_script and result is None and 0 < count(source) <= SMALL:
            before = np.concatenate([np.ravel(copied(leaf)) for leaf in leaves(source)])
            self._metric(original.__name__, before, target, args, kwargs)
        return result

    def _metric(self, name: str, before: Any, result: Any, args: Any, kwargs: Any) -> None:
        """Record a metric; what goes to one rank has no result on the others."""
        root = kwargs.get("dst", next((v for v in args[1:] if type(v) is int), 0))
        absent = name in TO_ONE and self.torch.distributed.get_rank() != root
        parts = [] if absent else [copied(leaf) for leaf in leaves(result)]
        self.recorder.metric(name, [before], parts)


def argument(function: Any, position: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument of a collective at ``position``, however it was passed."""
    if len(args) > position:
        return args[position]
    return kwargs.get(NAMES.get(function.__name__, ("tensor",))[position])
