"""Bit-for-bit comparison of the state that must be identical on all ranks."""

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
from hvdtrain.steps.integrity import rank_names
from hvdtrain.system.runtime.exit import agreed


def compare(
    communicator: Communicator,
    state: Checkpoint,
    reason: str,
    *,
    when: str = "",
    ranks: Sequence[int] = (),
) -> str:
    """Compare the ``state`` of all ranks; all of them must call it together.

    Args:
        communicator: communicator of the ranks to compare.
        state: arrays, with the same names on all ranks.
        reason: end of the error message: cause and remedy.
        when: beginning of the error message.
        ranks: world ranks of those of ``communicator``, for the message; default: the same.

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
    gathered = communicator.gather(whole)
    right = Counter(gathered).most_common(1)[0][0]  # of most ranks, or of rank 0
    if different := [rank for rank, digest in enumerate(gathered) if digest != right]:
        mine = {name: digest.hex() for name, digest in digests.items()}
        rows = communicator.gather(json.dumps([socket.gethostname(), mine]).encode())
        hosts, tensors = zip(*map(json.loads, rows), strict=True)
        good, bad = tensors[gathered.index(right)], tensors[different[0]]
        first = next(name for name in {**good, **bad} if good.get(name) != bad.get(name))
        ranks = ranks or range(communicator.size)
        others = "the other ranks'" if 0 in different else f"rank {ranks[0]}'s"
        where = rank_names(
            [ranks[rank] for rank in different], dict(zip(ranks, hosts, strict=True))
        )
        raise agreed(
            HvdtrainError(
                f"{when}the model of {where} differs from {others}, first in {first}: {reason}"
            )
        )
    return whole.hex()


def _digest(name: str, array: np.ndarray[Any, Any]) -> bytes:
    """Return the SHA-256 of a tensor's name and bytes, which are not copied."""
    digest = hashlib.sha256(name.encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()
