"""Partitions of gradients, layers and tensors: pure functions of their sizes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hvdtrain.config.comm_options import BUCKET_BYTES


def buckets(gradients: Sequence[tuple[object, int]], full: int = BUCKET_BYTES) -> list[list[int]]:
    """Group ``gradients``, as (kind, bytes), into buckets of one kind; return their indices.

    A bucket of ``full`` bytes or more takes no further gradient. The buckets run from the last
    gradient to the first, the order in which the backward pass produces them.
    """
    groups: list[list[int]] = []
    size, kind = 0, None
    for index, (current, nbytes) in reversed(list(enumerate(gradients))):
        if not groups or size >= full or current != kind:
            groups.append([])
            size, kind = 0, current
        groups[-1].append(index)
        size += nbytes
    return groups


def balanced_cuts(costs: Sequence[int], number: int) -> list[range]:
    """Cut a sequence of layers into ``number`` stages, minimizing the cost of the costliest stage.

    There are at least as many layers as stages; the result is the indices of each stage's layers.
    Of equally good cuts the last is taken: behind layers without cost, e.g. a pooling layer, whose
    output is smaller to send.
    """
    ends = [*itertools.accumulate(costs, initial=0)]
    # Least cost of the costliest stage, and the cuts for it, by the number of layers covered.
    best: list[tuple[int, list[int]]] = [(end, [0]) for end in ends]
    for stage in range(1, number):
        before = best
        best = [
            min(
                (
                    (max(before[cut][0], ends[end] - ends[cut]), -cut, [*before[cut][1], cut])
                    for cut in range(stage, end)
                ),
                default=(0, 0, []),
            )[::2]
            for end in range(len(ends))
        ]
    cuts = [*best[-1][1], len(costs)]
    return [range(*pair) for pair in itertools.pairwise(cuts)]


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
