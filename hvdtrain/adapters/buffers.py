"""Running statistics: local to each rank in training, averaged over the ranks elsewhere.

BatchNorm keeps running means over the samples of its rank. For evaluating and saving they are
averaged over the ranks, weighted by samples seen. The local ones stay unchanged and are saved in
the checkpoint too, so neither an evaluation nor a save alters the training that follows.
"""

from __future__ import annotations

import numpy as np

from hvdtrain.collectives.base import Communicator
from hvdtrain.steps.checkpoint_files import Arrays, Tensors

PREFIX = "rank_buffers/"  # arrays of shape (world size, *shape of the buffer)
SEEN = "rank_samples"  # int64, shape (world size,)


def average(communicator: Communicator, local: Arrays, seen: int) -> Arrays:
    """Return the mean of the ranks' buffers, weighted by ``seen``, each rank's sample count."""
    flat = np.concatenate([value.ravel().astype(np.float64) for value in local.values()])
    total = communicator.sum(np.append(flat * seen, float(seen)))
    if total[-1] == 0:  # nothing trained yet: all ranks have the same
        return local
    mean = total[:-1] / total[-1]
    result, offset = {}, 0
    for name, value in local.items():
        part = mean[offset : offset + value.size]
        result[name] = part.reshape(value.shape).astype(value.dtype)
        offset += value.size
    return result


def gather(communicator: Communicator, local: Arrays, seen: int) -> Arrays:
    """Return all ranks' buffers and sample counts, for a checkpoint."""
    counts = communicator.gather(seen.to_bytes(8, "big"))
    arrays: Arrays = {SEEN: np.array([int.from_bytes(count, "big") for count in counts])}
    gathered = communicator.gather(b"".join(value.tobytes() for value in local.values()))
    offset = 0
    for name, value in local.items():
        rows = [np.frombuffer(data, value.dtype, value.size, offset) for data in gathered]
        arrays[PREFIX + name] = np.stack([row.reshape(value.shape) for row in rows])
        offset += value.nbytes
    return arrays


def take_out(training: Tensors) -> tuple[Tensors, Arrays]:
    """Split the arrays of a checkpoint into optimizer state and those added by ``gather``."""
    ranks = {k: np.asarray(v) for k, v in training.items() if k == SEEN or k.startswith(PREFIX)}
    return {k: v for k, v in training.items() if k not in ranks}, ranks


def rank_row(ranks: Arrays, rank: int, size: int) -> tuple[Arrays, int] | None:
    """Return this rank's saved buffers and sample count; None if the world size differs."""
    if SEEN not in ranks or len(ranks[SEEN]) != size:
        return None
    local = {k.removeprefix(PREFIX): v[rank] for k, v in ranks.items() if k != SEEN}
    return local, int(ranks[SEEN][rank])
