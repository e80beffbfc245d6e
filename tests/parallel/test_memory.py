"""ZeRO needs less memory per rank than DDP, and FSDP less than ZeRO, as theory says.

How much, at more ranks and with a larger net: ``python -m benchmarks.memory``, of ``make soak``.
"""

from __future__ import annotations

from benchmarks.memory import BLOCK, STRATEGIES, measure, theory
from tests.conftest import on_demand


@on_demand
def test_each_strategy_takes_the_memory_that_theory_says() -> None:
    layers = 24  # 101 MB of parameters
    peaks = {name: measure(name, 2, layers) for name in STRATEGIES}
    due = {name: theory(name, 2, layers * BLOCK) for name in STRATEGIES}
    assert sorted(peaks, key=peaks.__getitem__) == sorted(due, key=due.__getitem__)
    for name, peak in peaks.items():
        assert 0.9 < peak / due[name] < 1.5, (peaks, due)
