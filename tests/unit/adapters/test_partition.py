"""Gradients in buckets, tensors shared out among ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.adapters.partition import BUCKET_BYTES, balanced_owners, buckets


def test_buckets_go_from_the_back_and_hold_one_kind() -> None:
    whole = BUCKET_BYTES
    assert buckets([]) == []
    assert buckets([("f", 4), ("f", 8), ("f", 2)]) == [[2, 1, 0]]
    assert buckets([("f", 4), ("f", whole), ("f", 4)]) == [[2, 1], [0]]
    assert buckets([("f", 4), ("d", 4), ("f", 4)]) == [[2], [1], [0]]


def test_each_rank_gets_about_as_much() -> None:
    assert balanced_owners([], 3) == []
    assert balanced_owners([5, 3, 2], 1) == [0, 0, 0]
    assert balanced_owners([1, 8, 4, 3], 2) == [1, 0, 1, 1]
    assert balanced_owners([7], 2) == [0]


@given(st.lists(st.integers(0, 10**6), max_size=30), st.integers(1, 8))
def test_no_rank_gets_much_more_than_its_share(sizes: list[int], number: int) -> None:
    owners = balanced_owners(sizes, number)
    totals = [sum(s for s, o in zip(sizes, owners, strict=True) if o == k) for k in range(number)]
    assert sum(totals) == sum(sizes)
    # The rank with most had no more than the mean before it got its last one.
    assert max(totals) <= sum(sizes) / number + max(sizes, default=0)
