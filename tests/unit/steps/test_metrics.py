"""Sums and counts, reduced and then divided, give the metric over all samples."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.steps.metrics import pack, unpack
from hvdtrain.steps.sharding import bounds


def test_names_keep_their_values_in_any_order() -> None:
    first = pack({"loss": 1.0, "accuracy": 2.0, "top5": 4.0}, 1)
    second = pack({"top5": 40.0, "accuracy": 20.0, "loss": 10.0}, 1)
    for names in (["loss", "top5", "accuracy"], ["accuracy", "loss", "top5"]):
        means, count = unpack(first + second, names)
        assert means == {"loss": 5.5, "accuracy": 11.0, "top5": 22.0}
        assert count == 2


def test_no_samples_give_nan_and_count_zero() -> None:
    means, count = unpack(pack({"loss": 0.0}, 0), ["loss"])
    assert math.isnan(means["loss"])
    assert count == 0


def test_the_vector_is_float64_and_the_count_an_exact_whole_number() -> None:
    vector = pack({"loss": 1}, 3)
    assert vector.dtype == np.float64
    assert vector.shape == (2,)
    assert isinstance(unpack(vector, ["loss"])[1], int)
    total = pack({"correct": 2**24 + 1}, 2**24 + 1) + pack({"correct": 0}, 2)
    assert unpack(total, ["correct"])[1] == 2**24 + 3  # beyond float32


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=80), st.integers(1, 9))
def test_any_split_of_the_samples_gives_the_metric_of_all(values: list[int], size: int) -> None:
    total = np.zeros(3)
    for rank in range(size):
        low, high = bounds(len(values), rank, size)
        mine = values[low:high]
        total += pack({"loss": sum(mine), "positive": sum(v > 0 for v in mine)}, len(mine))
    means, count = unpack(total, ["loss", "positive"])
    assert count == len(values)
    assert means["loss"] == float(Fraction(sum(values), len(values)))
    assert means["positive"] == float(Fraction(sum(v > 0 for v in values), len(values)))
