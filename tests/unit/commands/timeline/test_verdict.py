"""Verdicts on timelines with a known bottleneck."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.timelines import Timeline, facts_of, straggling

Facts = dict[str, Any]


def verdict_of(timeline: Timeline | str, folder: Path) -> list[Facts]:
    findings: list[Facts] = facts_of(timeline, folder)["verdict"]
    return findings


def steps(
    *,
    count: int = 20,
    length: int = 100_000,
    ready: dict[int, int] | None = None,
    operations: int = 1,
    each: int = 1_000,
    shape: tuple[int, ...] = (1000,),
    cycle: int | None = None,
) -> Timeline:
    """Steps of ``length`` with tensors that are summed one by one at their end."""
    timeline = Timeline()
    for step in range(count):
        start = length * step
        if cycle:
            for mark in range(max(0, start - length + cycle), start, cycle):
                timeline.cycle(mark)
        for number in range(operations):
            timeline.negotiate(f"t{number}", start, ready or {0: 0, 1: 10})
            start += 10
        start += max((ready or {0: 0}).values())
        for number in range(operations):
            timeline.allreduce([f"t{number}"], start, each, shape)
            start += each
    return timeline


def test_a_straggler_is_named_with_what_it_costs(tmp_path: Path) -> None:
    (finding,) = verdict_of(straggling(20), tmp_path)
    assert (finding["kind"], finding["rank"]) == ("straggler", 2)
    assert finding["seconds"] == pytest.approx(19 * 0.050009)
    assert finding["share"] == pytest.approx(0.050009 / 0.070)
    assert finding["text"] == (
        "bound by a straggler: rank 2 was ready last in 19 of 19 steps (100 %), by 50.0 ms in the "
        "median, 50.0 ms in the mean; that cost 950 ms of 1.33 s (71 %)"
    )
    assert "rank 2" in finding["advice"]


def test_without_ticks_the_advice_is_to_disable_the_cache(tmp_path: Path) -> None:
    cached = re.sub(r'\{"ph": "X"[^}]*\},', "", straggling(20).text)
    (finding,) = verdict_of(cached, tmp_path)
    assert finding["kind"] == "ranks wait"
    assert "HOROVOD_CACHE_CAPACITY=0" in finding["advice"]


def test_uneven_ranks_without_a_straggler(tmp_path: Path) -> None:
    (finding,) = verdict_of(steps(ready={0: 0, 1: 30_000, 2: 30_100, 3: 30_200}), tmp_path)
    assert finding["kind"] == "uneven ranks"
    assert "ranks 1, 2, 3" in finding["text"]
    assert finding["share"] == pytest.approx(0.302)


def test_small_tensors(tmp_path: Path) -> None:
    (finding,) = verdict_of(steps(operations=40), tmp_path)
    assert finding["kind"] == "small tensors"
    assert finding["share"] == pytest.approx(0.4)
    assert "40.0 operations per step of 3.9 KiB" in finding["text"]
    assert "HOROVOD_FUSION_THRESHOLD" in finding["advice"]


def test_bandwidth(tmp_path: Path) -> None:
    (finding,) = verdict_of(steps(operations=2, each=20_000, shape=(5_000_000,)), tmp_path)
    assert finding["kind"] == "bandwidth"
    assert finding["share"] == pytest.approx(0.4)
    assert "953.7 MiB/s" in finding["text"]


def test_hidden_communication_is_not_a_finding(tmp_path: Path) -> None:
    timeline = Timeline()
    for step in range(20):
        start = 100_000 * step
        timeline.negotiate("a", start, {0: 0, 1: 10})
        timeline.allreduce(["a"], start + 10, 40_000, (1000,))
        timeline.negotiate("b", start + 60_000, {0: 0, 1: 10})
        timeline.allreduce(["b"], start + 60_010, 1_000, (1000,))
    (finding,) = verdict_of(timeline, tmp_path)
    assert finding["kind"] == "nothing wrong"


def test_cycle_time(tmp_path: Path) -> None:
    (finding,) = verdict_of(steps(length=4_000, each=50, cycle=1_000), tmp_path)
    assert finding["kind"] == "cycle time"
    assert finding["advice"] == "set HOROVOD_CYCLE_TIME=0.1 (ms)"
    assert finding["seconds"] == pytest.approx(19 * 0.0005)


@pytest.mark.parametrize(("cycle", "length"), [(50, 400), (101, 800), (100, 400)])
def test_a_cycle_as_short_as_the_advice_is_not_a_finding(
    cycle: int, length: int, tmp_path: Path
) -> None:
    (finding,) = verdict_of(steps(length=length, each=10, cycle=cycle), tmp_path)
    assert finding["kind"] == "nothing wrong"


def test_a_cycle_much_shorter_than_the_step_is_not_a_finding(tmp_path: Path) -> None:
    (finding,) = verdict_of(steps(length=40_000, each=50, cycle=1_000), tmp_path)
    assert finding["kind"] == "nothing wrong"


def test_the_most_expensive_finding_comes_first(tmp_path: Path) -> None:
    both = steps(ready={0: 0, 1: 60_000}, operations=1, each=20_000, shape=(5_000_000,))
    assert [f["kind"] for f in verdict_of(both, tmp_path)] == ["straggler", "bandwidth"]
    both = steps(ready={0: 0, 1: 15_000}, operations=1, each=60_000, shape=(5_000_000,))
    assert [f["kind"] for f in verdict_of(both, tmp_path)] == ["bandwidth", "straggler"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[\n", "no tensor was submitted"),
        (steps(count=1).text, "occurs twice"),
        (steps(ready={0: 0}).text, "a single rank"),
    ],
)
def test_too_little(text: str, word: str, tmp_path: Path) -> None:
    (finding,) = verdict_of(text, tmp_path)
    assert finding["kind"] == "too little"
    assert word in finding["text"]
