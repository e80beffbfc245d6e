"""Running statistics: each rank's own while it trains, their mean where a result must be one.

BatchNorm keeps running means of what its rank has seen. To evaluate and to save, the ranks' are
averaged, weighted by samples seen; the ranks' own go on unchanged, and a checkpoint keeps them
too, so that neither an evaluation nor a save changes the training that follows.
"""

from __future__ import annotations

import numpy as np

from hvdtrain.collectives.base import Communicator
from hvdtrain.steps.checkpoint_files import Arrays, Tensors

PREFIX = "rank_buffers/"  # arrays of shape (world size, *shape of the buffer)
SEEN = "rank_samples"  # int64, shape (world size,)


def average(communicator: Communicator, own: Arrays, seen: int) -> Arrays:
    """Return the mean of the ranks' buffers, weighted by ``seen``, the samples of each rank."""
    flat = np.concatenate([value.ravel().astype(np.float64) for value in own.values()])
    total = communicator.sum(np.append(flat * seen, float(seen)))
    if total[-1] == 0:  # nothing trained yet: all ranks have the same
        return own
    mean = total[:-1] / total[-1]
    result, offset = {}, 0
    for name, value in own.items():
        part = mean[offset : offset + value.size]
        result[name] = part.reshape(value.shape).astype(value.dtype)
        offset += value.size
    return result


def gather(communicator: Communicator, own: Arrays, seen: int) -> Arrays:
    """Return all ranks' buffers and sample counts, for a checkpoint."""
    counts = communicator.gather(seen.to_bytes(8, "big"))
    arrays: Arrays = {SEEN: np.array([int.from_bytes(count, "big") for count in counts])}
    everyone = communicator.gather(b"".join(value.tobytes() for value in own.values()))
    offset = 0
    for name, value in own.items():
        rows = [np.frombuffer(data, value.dtype, value.size, offset) for data in everyone]
        arrays[PREFIX + name] = np.stack([row.reshape(value.shape) for row in rows])
        offset += value.nbytes
    return arrays


def take_out(training: Tensors) -> tuple[Tensors, Arrays]:
    """Part the arrays of a checkpoint into optimizer state and what ``gather`` put there."""
    ranks = {k: np.asarray(v) for k, v in training.items() if k == SEEN or k.startswith(PREFIX)}
    return {k: v for k, v in training.items() if k not in ranks}, ranks


def own_row(ranks: Arrays, rank: int, size: int) -> tuple[Arrays, int] | None:
    """Return this rank's buffers and sample count from a checkpoint; None on another world size."""
    if SEEN not in ranks or len(ranks[SEEN]) != size:
        return None
    own = {k.removeprefix(PREFIX): v[rank] for k, v in ranks.items() if k != SEEN}
    return own, int(ranks[SEEN][rank])
