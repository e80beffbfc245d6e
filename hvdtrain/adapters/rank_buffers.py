"""Running statistics, which are local to each rank in training, as BatchNorm's are.

For evaluating and saving they are averaged over the ranks, weighted by samples seen. The local ones
stay unchanged and are saved in the checkpoint too, so neither an evaluation nor a save alters the
training that follows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import safetensors.numpy
from xxhash import xxh3_128

from hvdtrain.collectives.base import Communicator
from hvdtrain.steps.checkpoint_files import Arrays, Checkpoint, Tensors

PREFIX = "rank_buffers/"  # arrays of shape (world size, *shape of the buffer)
SEEN = "rank_samples"  # int64, shape (world size,)


def different_buffers(communicator: Communicator, local: Arrays) -> Arrays:
    """Return those of ``local`` that are not equal on all ranks."""
    mine = {name: xxh3_128(value.tobytes()).hexdigest() for name, value in local.items()}
    rows = communicator.gather_json(mine)
    return {k: v for k, v in local.items() if any(row[k] != mine[k] for row in rows)}


def gather_buffers(communicator: Communicator, local: Arrays, seen: int) -> Arrays:
    """Return all ranks' buffers and sample counts."""
    mine = {SEEN: np.array(seen), **{PREFIX + name: value for name, value in local.items()}}
    rows = [safetensors.numpy.load(d) for d in communicator.gather(safetensors.numpy.save(mine))]
    return {name: np.stack([row[name] for row in rows]) for name in mine}


def mean_buffers(ranks: Arrays) -> Arrays:
    """Return the mean of the ``ranks``' buffers, weighted by the samples that each has seen.

    Without samples, as in a loop with a sampler of its own, all ranks weigh the same. What is equal
    on all ranks, as a mask of infinities, stays so to the bit.
    """
    seen = ranks[SEEN] if ranks[SEEN].any() else np.ones(len(ranks[SEEN]))
    trained = seen > 0  # times 0, an infinity would become nan

    def mean(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if len({row.tobytes() for row in rows}) == 1:
            return np.asarray(rows[0])
        return np.asarray(np.average(rows[trained], axis=0, weights=seen[trained]), rows.dtype)

    return {name.removeprefix(PREFIX): mean(rows) for name, rows in ranks.items() if name != SEEN}


def separate_buffers(checkpoint: Checkpoint) -> tuple[Tensors, Arrays]:
    """Split the arrays of a checkpoint into optimizer state and those of ``gather_buffers``.

    Raises:
        DAMAGE: the latter are not arrays of a value, or of a buffer of the model, per rank.
    """
    training = checkpoint.training
    optimizer = {k: v for k, v in training.items() if k != SEEN and not k.startswith(PREFIX)}
    ranks = {k: np.asarray(v) for k, v in training.items() if k not in optimizer}
    for name, rows in ranks.items():
        buffer = checkpoint.model.get(name.removeprefix(PREFIX), rows[0])
        if rows.shape != (len(ranks[SEEN]), *(() if name == SEEN else buffer.shape)):
            raise ValueError(f"{name} has the shape {rows.shape}")
    return optimizer, ranks


def buffers_of_rank(ranks: Arrays, rank: int, size: int) -> tuple[Arrays, int] | None:
    """Return this rank's saved buffers and sample count; None if the world size differs."""
    if SEEN not in ranks or len(ranks[SEEN]) != size:
        return None
    local = {k.removeprefix(PREFIX): v[rank] for k, v in ranks.items() if k != SEEN}
    return local, int(ranks[SEEN][rank])
