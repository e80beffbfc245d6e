"""Verdicts on timelines with a known bottleneck, and on those that end with open tensors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.commands.timeline import report
from hvdtrain.commands.timeline.verdict import GROUPS, NAMES, analyse
from tests.timelines import Timeline, facts_of, straggling

Facts = dict[str, Any]


def verdict_of(timeline: Timeline | str, folder: Path) -> list[Facts]:
    findings: list[Facts] = facts_of(timeline, folder)["verdict"]
    return findings


def kinds(timeline: Timeline | str, folder: Path, **options: Any) -> list[str]:
    return [finding["kind"] for finding in facts_of(timeline, folder, **options)["verdict"]]


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


def hidden() -> Timeline:
    """Steps whose long operation is hidden by computing."""
    timeline = Timeline()
    for step in range(20):
        start = 100_000 * step
        timeline.negotiate("a", start, {0: 0, 1: 10})
        timeline.allreduce(["a"], start + 10, 40_000, (1000,))
        timeline.negotiate("b", start + 60_000, {0: 0, 1: 10})
        timeline.allreduce(["b"], start + 60_010, 1_000, (1000,))
    return timeline


def normal(count: int = 3) -> Timeline:
    """Steps of 100 ms of two tensors, on three ranks."""
    timeline = Timeline()
    for step in range(count):
        for name in ("t0", "t1"):
            timeline.negotiate(name, 100_000 * step, {0: 0, 1: 5, 2: 10})
            timeline.allreduce([name], 100_000 * step + 10, 5_000, (10,))
    return timeline


def waiting(
    tensors: int, ready: tuple[int, ...], after: Timeline | None = None, until: int = 0
) -> Timeline:
    """Negotiations without an end, one per ms from 500 ms on; Horovod checks ``until`` then."""
    timeline = after or Timeline()
    timeline.closed = False
    for number in range(tensors):
        at = 500_000 + 1_000 * number
        timeline.begin(f"t{number}", "NEGOTIATE_ALLREDUCE", at)
        for rank in ready:
            timeline.tick(f"t{number}", rank, at)
    if until:
        timeline.cycle(until)
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


UNEVEN = {0: 0, 1: 30_000, 2: 30_100, 3: 30_200}
LARGE = {"each": 20_000, "shape": (5_000_000,)}


@pytest.mark.parametrize(
    ("timeline", "kind", "share", "words"),
    [
        (steps(ready=UNEVEN), "uneven ranks", 0.302, ["ranks 1, 2, 3"]),
        (
            steps(operations=40),
            *("small tensors", 0.4),
            ["40.0 operations per step of 3.9 KiB", "HOROVOD_FUSION_THRESHOLD"],
        ),
        (steps(operations=2, **LARGE), "bandwidth", 0.4, ["953.7 MiB/s"]),
        (
            steps(length=4_000, each=50, cycle=1_000),
            *("cycle time", 0.125),
            ["set HOROVOD_CYCLE_TIME=0.1 (ms)"],
        ),
        # As short as the advice, or much shorter than the step.
        (steps(length=400, each=10, cycle=50), "nothing wrong", 0, []),
        (steps(length=800, each=10, cycle=101), "nothing wrong", 0, []),
        (steps(length=400, each=10, cycle=100), "nothing wrong", 0, []),
        (steps(length=40_000, each=50, cycle=1_000), "nothing wrong", 0, []),
        (hidden(), "nothing wrong", 0, []),
        (steps(count=1), "too little", 0, ["occurs twice"]),
        (steps(ready={0: 0}), "too little", 0, ["a single rank"]),
    ],
)
def test_each_kind_of_finding(
    timeline: Timeline | str, kind: str, share: float, words: list[str], tmp_path: Path
) -> None:
    (finding,) = verdict_of(timeline, tmp_path)
    assert finding["kind"] == kind
    assert finding["share"] == pytest.approx(share)
    for word in words:
        assert word in f"{finding['text']} {finding['advice']}"


def test_without_ticks_the_advice_is_to_disable_the_cache(tmp_path: Path) -> None:
    cached = re.sub(r'\{"ph": "X"[^}]*\},', "", straggling(20).text)
    (finding,) = verdict_of(cached, tmp_path)
    assert finding["kind"] == "ranks wait"
    assert "HOROVOD_CACHE_CAPACITY=0" in finding["advice"]


def test_the_most_expensive_finding_comes_first(tmp_path: Path) -> None:
    both = steps(ready={0: 0, 1: 60_000}, **LARGE)
    assert kinds(both, tmp_path) == ["straggler", "bandwidth"]
    both = steps(ready={0: 0, 1: 15_000}, each=60_000, shape=(5_000_000,))
    assert kinds(both, tmp_path) == ["bandwidth", "straggler"]


def test_a_job_that_hangs_in_its_first_negotiation_is_unfinished(tmp_path: Path) -> None:
    (finding,) = verdict_of(waiting(2, (0, 2)), tmp_path)
    assert finding["kind"] == "unfinished"
    assert "2 tensors are open" in finding["text"]
    assert "t0, t1 in NEGOTIATE_ALLREDUCE since 0 µs" in finding["text"]
    assert "submitted by ranks 0, 2, and no other rank is in the file" in finding["text"]
    assert "no tensor was submitted" not in finding["text"]
    facts = analyse(tmp_path / "timeline.json")[0]
    assert "2 ranks seen" in report.text(facts)  # no negotiation has ended: there may be more


@pytest.mark.parametrize("closed", [False, True])  # HOROVOD_STALL_SHUTDOWN_TIME_SECONDS closes it
def test_the_rank_that_a_hung_job_waits_for_is_named_first(closed: bool, tmp_path: Path) -> None:
    timeline = waiting(2, (0, 2), normal(), until=10_000_000)
    timeline.closed = closed
    facts = facts_of(timeline, tmp_path)
    first, *others = facts["verdict"]
    assert (first["kind"], first["ranks"]) == ("unfinished", [1])
    assert "since 500 ms, 9.50 s before the last event: not submitted by rank 1" in first["text"]
    assert "rank 1" in first["advice"]
    assert others
    assert facts["open"][1] == {
        "tensor": "t1",
        "phase": "NEGOTIATE_ALLREDUCE",
        "kind": "negotiate",
        "since": pytest.approx(0.501),
        "seconds": pytest.approx(9.499),
        "ready": [0, 2],
        "missing": [1],
    }


def test_a_file_cut_within_a_step_reports_its_steps_first(tmp_path: Path) -> None:
    text = straggling(10).text
    tick = text.rindex("{", 0, text.index('"name": "2", "ts": 1400010'))
    facts = facts_of(text[:tick], tmp_path)
    assert [finding["kind"] for finding in facts["verdict"]] == ["straggler", "unfinished"]
    assert facts["verdict"][1]["ranks"] == [2]
    assert facts["verdict"][1]["seconds"] < facts["steps"]["slowest"][0]["seconds"]


def test_a_recording_that_was_stopped_within_a_step_is_not_unfinished(tmp_path: Path) -> None:
    """``--timeline-steps 0:10``: a rank may submit tensors of the next step before rank 0 stops."""
    timeline = straggling(10)
    timeline.begin("gradient.0", "NEGOTIATE_ALLREDUCE", 1_700_000)
    timeline.tick("gradient.0", 1, 1_700_001)
    timeline.cycle(1_700_100)
    facts = facts_of(timeline, tmp_path)
    assert [finding["kind"] for finding in facts["verdict"]] == ["straggler"]
    assert len(facts["open"]) == 1
    timeline.closed = False  # a run that was killed, or still runs
    assert kinds(timeline, tmp_path) == ["straggler", "unfinished"]
    short = normal(1)  # no whole step with a length
    short.begin("t2", "NEGOTIATE_ALLREDUCE", 20_000)
    assert kinds(short, tmp_path) == ["too little"]


def test_a_hung_operation_is_reported(tmp_path: Path) -> None:
    timeline = normal()
    timeline.negotiate("t0", 400_000, {0: 0, 1: 5, 2: 10})
    timeline.begin("t0", "ALLREDUCE", 400_010)
    timeline.begin("t0", "MPI_ALLREDUCE", 400_020)
    timeline.closed = False
    facts = facts_of(timeline, tmp_path)
    (finding,) = (row for row in facts["verdict"] if row["kind"] == "unfinished")
    assert "t0 in MPI_ALLREDUCE since 400 ms" in finding["text"]
    assert finding["ranks"] == []
    assert facts["open"][0]["ready"] is facts["open"][0]["missing"] is None


def test_without_ticks_no_rank_is_blamed(tmp_path: Path) -> None:
    findings = verdict_of(waiting(1, (), normal()), tmp_path)  # Horovod's cache is on
    (finding,) = (row for row in findings if row["kind"] == "unfinished")
    assert "does not record which rank" in finding["text"]
    assert finding["ranks"] == []


def test_many_open_tensors_are_summarized(tmp_path: Path) -> None:
    timeline = normal()
    timeline.closed = False
    for ranks in ((0,), (1,), (2,), (0, 1), (1, 2)):
        for number in range(NAMES + 2):
            name = f"t.{ranks}.{number}"
            timeline.begin(name, "NEGOTIATE_ALLREDUCE", 500_000)
            for rank in ranks:
                timeline.tick(name, rank, 500_000)
    (finding,) = (f for f in verdict_of(timeline, tmp_path) if "ranks" in f)
    assert finding["text"].count("NEGOTIATE") == GROUPS
    assert finding["text"].count("and 2 more in") == GROUPS
    assert finding["text"].endswith("and more")
    assert finding["ranks"] == [0, 1, 2]


def test_a_slice_is_not_unfinished(tmp_path: Path) -> None:
    timeline = waiting(2, (0, 2), normal())
    assert "unfinished" not in kinds(timeline, tmp_path, span=(0.0, 0.6))
    assert "unfinished" in kinds(timeline, tmp_path, span=(0.0, float("inf")))


def test_a_slice_within_a_negotiation_is_too_little(tmp_path: Path) -> None:
    (finding,) = facts_of(waiting(3, (0,)), tmp_path, span=(0, 0.002))["verdict"]
    assert finding["kind"] == "too little"
    assert "the file does not contain the end of any tensor's bars" in finding["text"]
