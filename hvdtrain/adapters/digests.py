"""Digests of the state of a rank, and their comparison over all ranks, bit for bit."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from xxhash import xxh3_128

from hvdtrain.collectives.base import Communicator
from hvdtrain.errors import HvdtrainError
from hvdtrain.steps.checkpoint_files import OF_OPTIMIZER, Checkpoint
from hvdtrain.steps.integrity import rank_names
from hvdtrain.system.runtime.exit import agreed

DIFFERENT = (
    "nothing was saved. The ranks have made different updates (gradients or options of the "
    "optimizer were changed on some of them, or broadcast_state was not called at the start), or "
    "the memory of a host is faulty"
)
OPTIONS = "optimizer_options"  # in the state of a ``Checkpoint``
Groups = list[dict[str, object]]
"""Options of an optimizer (learning rate, momentum, ...) by name, for each parameter group."""
Digests = dict[str, bytes]
"""XXH3 digests of tensors and options, by a name for messages."""


def ordered(options: Groups, digests: Digests) -> Digests:
    """Return the digests of the options, then those of tensors in the same order on all ranks."""
    labels = sorted(digests, key=lambda label: (label.endswith(OF_OPTIMIZER), label))
    of_options = digests_of(Checkpoint({}, {}, {OPTIONS: options}))
    return of_options | {label: digests[label] for label in labels}


def digests_of(state: Checkpoint) -> Digests:
    """Return the XXH3 digest of each option and tensor of ``state``."""
    digests = {
        f"{name} of group {number}{OF_OPTIMIZER}": xxh3_128(repr(value).encode()).digest()
        for number, group in enumerate(state.state.get(OPTIONS, ()))
        for name, value in sorted(group.items())
    }
    for tensors, suffix in ((state.model, ""), (state.training, OF_OPTIMIZER)):
        digests |= {f"{name}{suffix}": digest_of(name, tensors[name]) for name in sorted(tensors)}
    return digests


def compare(
    communicator: Communicator, digests: Mapping[str, bytes], reason: str, *, when: str = ""
) -> str:
    """Compare the state of all ranks by its ``digests_of``, and return the common digest.

    All ranks must call it together. The error message begins with ``when`` and ends with
    ``reason``: cause and remedy.

    Raises:
        HvdtrainError: on every rank, naming the ranks that differ, their hosts and the first
            tensor.
    """
    whole = xxh3_128(b"".join(digests.values())).digest()
    gathered = communicator.gather(whole)
    right = Counter(gathered).most_common(1)[0][0]  # of most ranks, or of rank 0
    if different := [rank for rank, digest in enumerate(gathered) if digest != right]:
        mine = {name: digest.hex() for name, digest in digests.items()}
        rows = communicator.gather_json([socket.gethostname(), mine])
        hosts, tensors = zip(*rows, strict=True)
        good, bad = tensors[gathered.index(right)], tensors[different[0]]
        first = next(name for name in {**good, **bad} if good.get(name) != bad.get(name))
        others = "the other ranks'" if 0 in different else "rank 0's"
        where = rank_names(different, dict(enumerate(hosts)))
        raise agreed(
            HvdtrainError(
                f"{when}the model of {where} differs from {others}, first in {first}: {reason}"
            )
        )
    return whole.hex()


def digest_of(name: str, array: np.ndarray[Any, Any]) -> bytes:
    """Return the XXH3 digest of a tensor's name and bytes, which are not copied."""
    digest = xxh3_128(name.encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()
