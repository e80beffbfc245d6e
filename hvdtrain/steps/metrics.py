"""Step 8, metrics: reduce sums and counts, then divide.

The mean of the ranks' means would be wrong if ranks have different numbers of samples.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def pack(sums: Mapping[str, float], count: float) -> Vector:
    """Return a float64 vector of shape (len(sums) + 1,) to reduce: sums in order of name, count."""
    return np.array([*(float(sums[name]) for name in sorted(sums)), float(count)])


def unpack(total: Vector, names: list[str]) -> tuple[dict[str, float], int]:
    """Return means and count from the reduced vector; means are NaN if the count is 0."""
    count = float(total[-1])
    means = {
        name: float(value) / count if count else float("nan")
        for name, value in zip(sorted(names), total[:-1], strict=True)
    }
    return means, round(count)
