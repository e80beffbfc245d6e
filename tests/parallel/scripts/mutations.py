"""Run on every rank by test_verify.py: switch one step off, verify, see which rows fail.

All mutations run one after the other in one group of ranks; each rank writes what it found.
``few`` leaves out those that no framework and no number of ranks makes a difference to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from hvdtrain.commands.verify.ranks import verify
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps.checkpoint_files import MODEL_FILE
from hvdtrain.steps.sharding import Part, Shards
from hvdtrain.system.runtime.detect import detect

TASK = {"pytorch": "torch_task", "tensorflow": "tf_task"}
framework, result, how_many = sys.argv[1:]
module = importlib.import_module(f"hvdtrain.adapters.{framework}.horovod")
tasks = importlib.import_module(f"hvdtrain.workloads.{TASK[framework]}")
Horovod = module.HorovodAdapter
Task = tasks.TorchTask if framework == "pytorch" else tasks.TFTask


def around(owner: Any, name: str, replacement: Callable[..., Any]) -> Any:
    """Replace a method by one that is given the original first."""
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, self, *args, **kwargs)

    return patch.object(owner, name, method)


def lie(**changes: Any) -> Any:
    """``initialize`` tells another world than the true one."""

    def initialize(original: Any, self: Any, **kwargs: Any) -> Any:
        true = original(self, **kwargs)
        told = {k: v(true) if callable(v) else v for k, v in changes.items()}
        self.world = dataclasses.replace(true, **told)
        return self.world

    return around(Horovod, "initialize", initialize)


def all_cores(original: Any, self: Any) -> str:
    import torch

    words = original(self)
    torch.set_num_threads(os.cpu_count() or 1)
    return str(words)


def whole_set(original: Any, self: Any, samples: int, **kwargs: Any) -> Any:
    self._shards = Shards(samples, kwargs["global_batch"], kwargs["seed"], 0, 1)
    return self._shards


def first_shard(original: Any, self: Any, samples: int, **kwargs: Any) -> Any:
    size = self.world.size
    self._shards = Shards(samples, kwargs["global_batch"], kwargs["seed"], 0, size)
    return self._shards


def seed_by_rank(original: Any, self: Any, samples: int, **kwargs: Any) -> Any:
    return original(self, samples, **{**kwargs, "seed": kwargs["seed"] + self.world.rank})


def without_tail(original: Any, self: Any, samples: int, **kwargs: Any) -> Any:
    batch = kwargs["global_batch"]
    return original(self, samples - samples % batch, **kwargs)


def parts_untold(original: Any, self: Any, samples: int, **kwargs: Any) -> Any:
    world = self.world
    return Shards(samples, kwargs["global_batch"], kwargs["seed"], world.rank, world.size)


def rescaled(factor: Callable[[Any], float]) -> Callable[..., Any]:
    def scale(original: Any, self: Any, base: float, **kwargs: Any) -> Any:
        rate = original(self, base, **kwargs)
        return dataclasses.replace(rate, factor=rate.factor * factor(self.world))

    return scale


def without_warmup(original: Any, self: Any, base: float, **kwargs: Any) -> Any:
    return original(self, base, **{**kwargs, "warmup_epochs": 0.0})


def same_rate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    return original(self, *args, **{**kwargs, "learning_rate": 0.1})


def own_gradients(original: Any, self: Any, model: Any, optimizer: Any) -> Any:
    return model, optimizer


def no_broadcast(original: Any, self: Any, model: Any, optimizer: Any = None) -> str:
    return ""


def model_only(original: Any, self: Any, model: Any, optimizer: Any = None) -> str:
    return str(original(self, model))


def root_has_changed(original: Any, self: Any, model: Any, optimizer: Any = None) -> str:
    """Equal on all ranks, but not what rank 0 had."""
    digest = str(original(self, model, optimizer))
    state = self.export_state(model, optimizer)
    first = next(iter(state.model))
    changed = {**state.model, first: np.zeros_like(state.model[first])}
    self.import_state(model, optimizer, dataclasses.replace(state, model=changed))
    return digest


def save(self: Any, directory: Any, model: Any, optimizer: Any, state: Any) -> None:
    arrays = self.export_state(model, optimizer)
    checkpoints.save(directory, dataclasses.replace(arrays, state={**state, "origin": {}}), 3)


def all_write(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    for rank in range(self.world.size):  # one after the other: all of them succeed
        if rank == self.world.rank:
            save(self, *args, **kwargs)
        self.communicator.gather(b"")


def all_write_at_once(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    save(self, *args, **kwargs)


def nobody_writes(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    return None


def half_written(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    folder = original(self, *args, **kwargs)
    if self.world.rank == 0:
        file = folder / MODEL_FILE
        file.write_bytes(file.read_bytes()[:-8])
    return folder


def other_values(
    original: Any, self: Any, directory: Any, model: Any, *args: Any, **kw: Any
) -> Any:
    for value in model.parameters() if framework == "pytorch" else model.trainable_variables:
        value.data.mul_(2) if framework == "pytorch" else value.assign(value * 2)
    folder = original(self, directory, model, *args, **kw)
    for value in model.parameters() if framework == "pytorch" else model.trainable_variables:
        value.data.div_(4) if framework == "pytorch" else value.assign(value / 4)
    return folder


def mean_of_means(original: Any, self: Any, count: float, **sums: float) -> Any:
    own = {name: value / count if count else 0.0 for name, value in sums.items()}
    held = float(count > 0)
    means, _ = original(self, held, **{name: value * held for name, value in own.items()})
    return means, original(self, count, **sums)[1]


def own_metrics(original: Any, self: Any, count: float, **sums: float) -> Any:
    return {name: value / count if count else 0.0 for name, value in sums.items()}, int(count)


def padded(original: Any, self: Any, count: float, **sums: float) -> Any:
    means, total = original(self, count, **sums)
    return means, total + total % self.world.size


def share(value: Callable[[Any], float]) -> Any:
    """What the gradients of a part are multiplied by."""
    return patch.object(Part, "weight", property(lambda part: value(detect(os.environ))))


MUTATIONS: dict[str, tuple[int | None, Any]] = {
    "nothing": (None, contextlib.nullcontext()),
    "every rank believes it is alone": (
        1,
        lie(rank=0, size=1, local_rank=0, local_size=1),
    ),
    "two ranks believe they are rank 0": (1, lie(rank=lambda true: true.rank // 2)),
    "local ranks are not counted by host": (1, lie(local_rank=0)),
    "every rank takes all cores": (2, around(Horovod, "pin_device", all_cores)),
    "every rank draws the whole set": (3, around(Horovod, "shard_data", whole_set)),
    "every rank draws the first shard": (3, around(Horovod, "shard_data", first_shard)),
    "every rank shuffles by its own seed": (3, around(Horovod, "shard_data", seed_by_rank)),
    "the uneven tail is dropped": (3, around(Horovod, "shard_data", without_tail)),
    "the adapter is not told the parts": (3, around(Horovod, "shard_data", parts_untold)),
    "the rate is not scaled": (
        4,
        around(Horovod, "scale_learning_rate", rescaled(lambda world: 1 / world.size)),
    ),
    "the rate is scaled on rank 0 only": (
        4,
        around(
            Horovod,
            "scale_learning_rate",
            rescaled(lambda world: 1 / world.size if world.rank else 1.0),
        ),
    ),
    "there is no warm-up": (4, around(Horovod, "scale_learning_rate", without_warmup)),
    "the optimizer keeps its first rate": (4, around(Task, "update", same_rate)),
    "the optimizer is not distributed": (
        5,
        around(Horovod, "distribute_optimizer", own_gradients),
    ),
    "gradients are averaged over ranks": (
        5,
        share(lambda world: 1.0 / world.size),
    ),
    "gradients are summed over ranks": (5, share(lambda world: 1.0)),
    "only rank 0's gradients count": (
        5,
        share(lambda world: float(world.rank == 0)),
    ),
    "nothing is broadcast": (6, around(Horovod, "broadcast_state", no_broadcast)),
    "only the model is broadcast": (6, around(Horovod, "broadcast_state", model_only)),
    "what is broadcast is not rank 0's": (6, around(Horovod, "broadcast_state", root_has_changed)),
    "every rank writes": (7, around(Horovod, "save_checkpoint", all_write)),
    "every rank writes at once": (7, around(Horovod, "save_checkpoint", all_write_at_once)),
    "no rank writes": (7, around(Horovod, "save_checkpoint", nobody_writes)),
    "the checkpoint is cut short": (7, around(Horovod, "save_checkpoint", half_written)),
    "the checkpoint holds other values": (7, around(Horovod, "save_checkpoint", other_values)),
    "the average of averages": (8, around(Horovod, "average_metrics", mean_of_means)),
    "metrics are not reduced": (8, around(Horovod, "average_metrics", own_metrics)),
    "padding counts as samples": (8, around(Horovod, "average_metrics", padded)),
}
FEW = {
    "nothing",
    "every rank believes it is alone",
    "every rank takes all cores",
    "every rank draws the whole set",
    "the rate is not scaled",
    "the optimizer keeps its first rate",
    "the optimizer is not distributed",
    "gradients are averaged over ranks",
    "nothing is broadcast",
    "every rank writes",
    "the average of averages",
}

found: dict[str, Any] = {}
for name, (step, mutation) in MUTATIONS.items():
    if how_many == "few" and name not in FEW:
        continue
    if framework == "tensorflow" and step == 2:
        continue  # its threads cannot change any more: test_verify.py starts it anew
    with mutation:
        rows = verify(framework, "horovod", lambda row: None)
    found[name] = {"expected": step, "rows": [row.data() for row in rows]}
Path(result, f"{detect(os.environ).rank}.json").write_text(json.dumps(found))
