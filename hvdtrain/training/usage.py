"""What a training takes of its devices: peak memory, and how busy they are."""

from __future__ import annotations

import statistics

import numpy as np

from hvdtrain.adapters.common import CommonAdapter
from hvdtrain.steps.summary import Summary
from hvdtrain.training.throughput import Clock


def measure(adapter: CommonAdapter, clock: Clock) -> Summary:
    """Return a summary of memory and utilisation alone; all ranks call it.

    Memory is the largest over the ranks. Utilisation is known where CPUs compute: processor time
    of a rank over the time of the steps that count times its threads; mean and lowest over ranks.
    """
    busy, seconds = clock.processor_seconds(), clock.counted_seconds()
    share = busy / (seconds * adapter.threads) if seconds and adapter.threads else np.nan
    mine = np.array([adapter.peak_memory_bytes, share], np.float64)
    ranks = [np.frombuffer(one) for one in adapter.communicator.gather(mine.tobytes())]
    memory, shares = (list(map(float, column)) for column in zip(*ranks, strict=True))
    known = not np.isnan(shares).any()
    return Summary(
        peak_memory_bytes=int(max(memory)) or None,
        utilisation_mean=statistics.fmean(shares) if known else None,
        utilisation_lowest=min(shares) if known else None,
    )
