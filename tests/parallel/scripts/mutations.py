"""Run on every rank by test_verify.py: disable one step, verify, and record the failed rows.

All mutations run one after the other in one group of ranks; each rank writes its results.
``few`` omits those that depend neither on the framework nor on the number of ranks.
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

from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.commands.verify.ranks import verify
from hvdtrain.steps.checkpoint_files import MODEL_FILE
from hvdtrain.steps.sharding import Part, Shards
from hvdtrain.system.runtime.detect import detect
from tests.saves import save as save_alone

framework, result, selection = sys.argv[1:]
tasks = importlib.import_module(f"hvdtrain.tasks.training_step_{framework}")
Task = tasks.TorchTask if framework == "pytorch" else tasks.TFTask


def around(owner: Any, name: str, replacement: Callable[..., Any]) -> Any:
    """Replace a method by one whose first argument is the original."""
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, self, *args, **kwargs)

    return patch.object(owner, name, method)


def world(**changes: Any) -> Callable[..., Any]:
    """Let ``initialize`` return a false world."""

    def initialize(original: Any, self: Any, **kwargs: Any) -> Any:
        true = original(self, **kwargs)
        values = {k: v(true) if callable(v) else v for k, v in changes.items()}
        self.world = dataclasses.replace(true, **values)
        return self.world

    return initialize


def all_cores(original: Any, self: Any) -> str:
    import torch

    words = original(self)
    torch.set_num_threads(os.cpu_count() or 1)
    return str(words)


def whole_set(original: Any, self: Any, samples: int, **kwargs: Any) -> Any:
    self.shards = Shards(samples, kwargs["global_batch"], kwargs["seed"], 0, 1)
    return self.shards


def first_shard(original: Any, self: Any, samples: int, **kwargs: Any) -> Any:
    size = self.world.size
    self.shards = Shards(samples, kwargs["global_batch"], kwargs["seed"], 0, size)
    return self.shards


def seed_by_rank(original: Any, self: Any, samples: int, **kwargs: Any) -> Any:
    return original(self, samples, **{**kwargs, "seed": kwargs["seed"] + self.world.rank})


def without_tail(original: Any, self: Any, samples: int, **kwargs: Any) -> Any:
    batch = kwargs["global_batch"]
    return original(self, samples - samples % batch, **kwargs)


def untracked_parts(original: Any, self: Any, samples: int, **kwargs: Any) -> Any:
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


def local_gradients(original: Any, self: Any, model: Any, optimizer: Any) -> Any:
    return model, optimizer


def no_broadcast(original: Any, self: Any, model: Any, optimizer: Any = None) -> str:
    return ""


def model_only(original: Any, self: Any, model: Any, optimizer: Any = None) -> str:
    return str(original(self, model))


def root_has_changed(original: Any, self: Any, model: Any, optimizer: Any = None) -> str:
    """Equal on all ranks, but not the state of rank 0."""
    digest = str(original(self, model, optimizer))
    state = self.export_state(model, optimizer)
    first = next(iter(state.model))
    changed = {**state.model, first: np.zeros_like(state.model[first])}
    self.import_state(model, optimizer, dataclasses.replace(state, model=changed))
    return digest


def save(self: Any, directory: Any, model: Any, optimizer: Any, state: Any) -> None:
    arrays = self.export_state(model, optimizer)
    save_alone(directory, dataclasses.replace(arrays, state={**state, "origin": {}}), keep=3)


def all_write(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    for rank in range(self.world.size):  # one after the other, so that all succeed
        if rank == self.world.rank:
            save(self, *args, **kwargs)
        self.communicator.gather(b"")


def all_write_at_once(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    save(self, *args, **kwargs)


def no_rank_writes(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    return None


def half_written(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    folder = original(self, *args, **kwargs)
    if self.world.rank == 0:
        file = folder / MODEL_FILE
        file.write_bytes(file.read_bytes()[:-8])
    return folder


def multiply(model: Any, factor: float) -> None:
    for value in model.parameters() if framework == "pytorch" else model.trainable_variables:
        value.data.mul_(factor) if framework == "pytorch" else value.assign(value * factor)


def scaled_values(
    original: Any, self: Any, directory: Any, model: Any, *args: Any, **kw: Any
) -> Any:
    multiply(model, 2.0)
    folder = original(self, directory, model, *args, **kw)
    multiply(model, 0.25)
    return folder


def mean_of_means(original: Any, self: Any, count: float, **sums: float) -> Any:
    local = {name: value / count if count else 0.0 for name, value in sums.items()}
    weight = float(count > 0)
    means, _ = original(self, weight, **{name: value * weight for name, value in local.items()})
    return means, original(self, count, **sums)[1]


def local_metrics(original: Any, self: Any, count: float, **sums: float) -> Any:
    return {name: value / count if count else 0.0 for name, value in sums.items()}, int(count)


def padded(original: Any, self: Any, count: float, **sums: float) -> Any:
    means, total = original(self, count, **sums)
    return means, total + total % self.world.size


def weight(value: Callable[[Any], float]) -> Any:
    """Replace the factor of the gradients of a part."""
    return patch.object(Part, "weight", property(lambda part: value(detect(os.environ))))


def on_rank_0(true: Any) -> float:
    return 1 / true.size if true.rank else 1.0


# By step of the row that must fail: a method of the adapter, and its replacement; or a patch.
ALONE = world(rank=0, size=1, local_rank=0, local_size=1)
UNSCALED = rescaled(lambda true: 1 / true.size)
MUTATIONS: dict[str, tuple[Any, ...]] = {
    "nothing": (None, contextlib.nullcontext()),
    "every rank believes it is alone": (1, "initialize", ALONE),
    "two ranks believe they are rank 0": (1, "initialize", world(rank=lambda true: true.rank // 2)),
    "local ranks are not counted by host": (1, "initialize", world(local_rank=0)),
    "every rank takes all cores": (2, "pin_device", all_cores),
    "every rank draws the whole set": (3, "shard_data", whole_set),
    "every rank draws the first shard": (3, "shard_data", first_shard),
    "every rank shuffles by its own seed": (3, "shard_data", seed_by_rank),
    "the uneven tail is dropped": (3, "shard_data", without_tail),
    "the adapter does not know the parts": (3, "shard_data", untracked_parts),
    "the rate is not scaled": (4, "scale_learning_rate", UNSCALED),
    "the rate is scaled on rank 0 only": (4, "scale_learning_rate", rescaled(on_rank_0)),
    "there is no warm-up": (4, "scale_learning_rate", without_warmup),
    "the optimizer keeps its first rate": (4, around(Task, "update", same_rate)),
    "the optimizer is not distributed": (5, "distribute_optimizer", local_gradients),
    "gradients are averaged over ranks": (5, weight(lambda true: 1.0 / true.size)),
    "gradients are summed over ranks": (5, weight(lambda true: 1.0)),
    "only rank 0's gradients count": (5, weight(lambda true: float(true.rank == 0))),
    "nothing is broadcast": (6, "broadcast_state", no_broadcast),
    "only the model is broadcast": (6, "broadcast_state", model_only),
    "what is broadcast is not rank 0's": (6, "broadcast_state", root_has_changed),
    "every rank writes": (7, "save_checkpoint", all_write),
    "every rank writes at once": (7, "save_checkpoint", all_write_at_once),
    "no rank writes": (7, "save_checkpoint", no_rank_writes),
    "the checkpoint is cut short": (7, "save_checkpoint", half_written),
    "the checkpoint holds other values": (7, "save_checkpoint", scaled_values),
    "the average of averages": (8, "average_metrics", mean_of_means),
    "metrics are not reduced": (8, "average_metrics", local_metrics),
    "padding counts as samples": (8, "average_metrics", padded),
}
# The first of each step, and two that depend on the framework.
FIRST = {step: name for name, (step, *_) in reversed(MUTATIONS.items())}
FEW = {*FIRST.values(), "the optimizer keeps its first rate", "gradients are averaged over ranks"}

results: dict[str, Any] = {}
for name, (step, *change) in MUTATIONS.items():
    if selection == "few" and name not in FEW:
        continue
    if framework == "tensorflow" and step == 2:
        continue  # its threads cannot be changed any more; test_verify.py starts new ranks
    with around(CommonAdapter, *change) if len(change) == 2 else change[0]:
        rows = verify(framework, "horovod", lambda row: None)
    results[name] = {"expected": step, "rows": [row.data() for row in rows]}
Path(result, f"{detect(os.environ).rank}.json").write_text(json.dumps(results))
