"""Memory and utilisation over the ranks, in closed form."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.collectives.base import Communicator
from hvdtrain.system.machine.limits import peak_resident_bytes
from hvdtrain.training.throughput import Clock
from hvdtrain.training.usage import measure
from tests.unit.conftest import OnRanks


class Ranked:
    """What is asked of an adapter, with figures that tell the ranks apart."""

    def __init__(self, communicator: Communicator, threads: int) -> None:
        self.communicator, self.threads = communicator, threads
        self.peak_memory_bytes = 1000 + communicator.rank


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_largest_memory_and_the_mean_utilisation(on_ranks: OnRanks, size: int) -> None:
    def action(communicator: Communicator) -> Any:
        # Ten steps, of which two are dropped: rank r is busy (r + 1) / 4 of its two threads.
        busy = 0.5 * (communicator.rank + 1)
        clock = Clock(seconds=[9.0] * 2 + [1.0] * 8, processor=[0.0] * 2 + [busy] * 8)
        return measure(Ranked(communicator, threads=2), clock)  # type: ignore[arg-type]

    for found in on_ranks(size, action):
        assert found.peak_memory_bytes == 1000 + size - 1
        assert found.utilisation_mean == pytest.approx((size + 1) / 8)
        assert found.utilisation_lowest == 0.25


def test_what_is_not_known_is_none(on_ranks: OnRanks) -> None:
    def on_a_gpu(communicator: Communicator) -> Any:
        clock = Clock(seconds=[1.0], processor=[1.0])
        return measure(Ranked(communicator, threads=0), clock)  # type: ignore[arg-type]

    for found in on_ranks(2, on_a_gpu):
        assert (found.utilisation_mean, found.utilisation_lowest) == (None, None)


def test_peak_memory_grows_by_what_is_taken() -> None:
    before = peak_resident_bytes()
    taken = np.ones(2 * before, np.uint8)
    assert peak_resident_bytes() >= before + taken.nbytes / 2
    resident = re.search(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert resident
    assert peak_resident_bytes() >= 1024 * int(resident[1])


def test_a_kernel_that_does_not_tell_it(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\n")
    assert peak_resident_bytes(tmp_path / "status") == 0
