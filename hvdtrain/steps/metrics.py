"""Step 8, metrics: sums and counts are reduced, then divided; an average of averages is wrong.

Four samples on one rank and three on another weigh four to three: only sum and count keep that.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def pack(sums: Mapping[str, float], count: float) -> Vector:
    """Return a float64 vector of shape (len(sums) + 1,) to reduce: sums by name, the count."""
    return np.array([*(float(sums[name]) for name in sorted(sums)), float(count)])


def unpack(total: Vector, names: list[str]) -> tuple[dict[str, float], int]:
    """Return the means and the count from the reduced vector; a count of 0 gives means of nan."""
    count = float(total[-1])
    means = {
        name: float(value) / count if count else float("nan")
        for name, value in zip(sorted(names), total[:-1], strict=True)
    }
    return means, round(count)
