"""Whether what all ranks should have alike is the same on them, bit for bit."""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.collectives.base import Communicator
from hvdtrain.errors import HvdtrainError
from hvdtrain.steps.checkpoint_files import Checkpoint
from hvdtrain.steps.integrity import places
from hvdtrain.system.runtime.exit import agreed


def compare(
    communicator: Communicator,
    state: Checkpoint,
    why: str,
    *,
    when: str = "",
    ranks: Sequence[int] = (),
) -> str:
    """Compare the ``state`` of all ranks; all of them call it together.

    Args:
        communicator: of this rank.
        state: arrays of the same names on all ranks.
        why: what comes after the names of those that differ: the cause and the remedy.
        when: what comes before them.
        ranks: what those of ``communicator`` are called; by default as there.

    Returns:
        The common SHA-256.

    Raises:
        HvdtrainError: on every rank, naming the ranks that differ, their hosts and the first
            tensor.
    """
    digests = {
        **{name: _digest(name, state.model[name]) for name in sorted(state.model)},
        **{
            f"{name} of the optimizer": _digest(name, state.training[name])
            for name in sorted(state.training)
        },
    }
    whole = hashlib.sha256(b"".join(digests.values())).digest()
    everyone = communicator.gather(whole)
    right = Counter(everyone).most_common(1)[0][0]  # most ranks have it; else rank 0 has
    if different := [rank for rank, other in enumerate(everyone) if other != right]:
        told = {name: digest.hex() for name, digest in digests.items()}
        mine = json.dumps([socket.gethostname(), told]).encode()
        hosts, tensors = zip(*map(json.loads, communicator.gather(mine)), strict=True)
        one, other = tensors[everyone.index(right)], tensors[different[0]]
        first = next(name for name in {**one, **other} if one.get(name) != other.get(name))
        ranks = ranks or range(communicator.size)
        others = "the other ranks'" if 0 in different else f"rank {ranks[0]}'s"
        where = dict(zip(ranks, hosts, strict=True))
        raise agreed(
            HvdtrainError(
                f"{when}the model of {places([ranks[one] for one in different], where)} differs "
                f"from {others}, first in {first}: {why}"
            )
        )
    return whole.hex()


def _digest(name: str, array: np.ndarray[Any, Any]) -> bytes:
    """Return the SHA-256 of a tensor's name and bytes, which are not copied."""
    digest = hashlib.sha256(name.encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()
