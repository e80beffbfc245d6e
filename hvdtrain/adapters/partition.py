"""Partitions of gradients and tensors: pure functions of their sizes."""

from __future__ import annotations

from collections.abc import Sequence

BUCKET_BYTES = 25 * 2**20  # size from which on a bucket takes no further gradient


def buckets(gradients: Sequence[tuple[object, int]]) -> list[list[int]]:
    """Group ``gradients``, as (kind, bytes), into buckets of one kind; return their indices.

    The buckets run from the last gradient to the first, the order in which the backward pass
    produces them.
    """
    groups: list[list[int]] = []
    size, kind = 0, None
    for index, (current, nbytes) in reversed(list(enumerate(gradients))):
        if not groups or size >= BUCKET_BYTES or current != kind:
            groups.append([])
            size, kind = 0, current
        groups[-1].append(index)
        size += nbytes
    return groups


def balanced_owners(sizes: Sequence[int], number: int) -> list[int]:
    """Return the rank of each of ``sizes``, among ``number`` ranks with balanced totals.

    Largest first, each to the rank with the smallest total so far (Graham, "Bounds on
    Multiprocessing Timing Anomalies", 1969: at most 4/3 of the optimum).
    """
    totals, owners = [0] * number, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = min(range(number), key=totals.__getitem__)
        totals[owners[index]] += sizes[index]
    return owners
