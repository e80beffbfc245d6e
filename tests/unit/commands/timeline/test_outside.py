"""Operations outside the steps, such as initial broadcasts, do not affect the steps' numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.commands.timeline import report
from hvdtrain.commands.timeline.verdict import analyse
from tests.timelines import Timeline, facts_of

OPERATIONS = 10  # per step
LENGTH = 900  # microseconds of an operation
SHAPE = (100,)
REST = 2_000  # microseconds of a step without an operation
BROADCASTS = 20


def started(
    broadcasts: int = BROADCASTS, *, between: int = 0, after: Timeline | None = None
) -> Timeline:
    """Return broadcasts of 20 MB, 200 ms each; then steps of small allreduces and broadcasts.

    ``after``: timeline of the first 10 ms.
    """
    timeline, time = after or Timeline(), 10_000
    for number in range(broadcasts):
        time = broadcast(timeline, f"parameter.{number}", time, 200_000)
    for _ in range(20):
        for number in range(OPERATIONS):
            timeline.negotiate(f"gradient.{number}", time, {0: 0, 1: 5})
            time += 5
        for number in range(OPERATIONS):  # all are submitted by now: computing hides nothing
            timeline.allreduce([f"gradient.{number}"], time, LENGTH, SHAPE)
            time += LENGTH
        for number in range(between):
            time = broadcast(timeline, f"buffer.{number}", time, LENGTH)
        time += REST
    return timeline


def broadcast(timeline: Timeline, name: str, time: int, length: int) -> int:
    """Add a broadcast as Horovod writes it; return its end."""
    timeline.begin(name, "NEGOTIATE_BROADCAST", time)
    for rank in (0, 1):
        timeline.tick(name, rank, time + 5 * rank)
    timeline.end(name, time + 5)
    timeline.begin(name, "BROADCAST", time + 5)
    timeline.begin(name, "MPI_BCAST", time + 5)
    timeline.end(name, time + 5 + length)
    timeline.end(name, time + 5 + length, (5_000_000,))
    return time + 5 + length


def test_initial_broadcasts_do_not_affect_the_verdict(tmp_path: Path) -> None:
    (finding,) = facts_of(started(), tmp_path)["verdict"]
    assert finding["kind"] == "small tensors"
    assert f"about {OPERATIONS}.0 operations per step of 400 B" in finding["text"]


def test_only_operations_of_whole_steps_count(tmp_path: Path) -> None:
    facts = facts_of(started(between=3), tmp_path)
    whole = facts["steps"]["whole"]
    small = whole * OPERATIONS * LENGTH * 1e-6
    assert facts["steps"]["operations"] == {
        "count": whole * (OPERATIONS + 3),
        "bytes": whole * (OPERATIONS * 400 + 3 * 20_000_000),
        "seconds": pytest.approx(small + whole * 3 * LENGTH * 1e-6),
        "small_seconds": pytest.approx(small),
    }
    counts = {row["name"]: row["count"] for row in facts["operations"]}  # of the whole file
    assert counts["MPI_BCAST"] == BROADCASTS + 3 * (whole + 1)


def test_start_up_that_was_mistaken_for_steps_does_not_count(tmp_path: Path) -> None:
    timeline = Timeline()
    for step in range(5):  # one recurring tensor before the first real step
        timeline.negotiate("check", 1_000 * step, {0: 0, 1: 10})
        timeline.allreduce(["check"], 1_000 * step + 10, LENGTH, (5_000_000,))
    facts = facts_of(started(0, after=timeline), tmp_path)
    whole = facts["steps"]["whole"]
    assert facts["steps"]["operations"]["bytes"] == whole * OPERATIONS * 400


def test_a_phase_outside_the_steps_has_no_time_per_step(tmp_path: Path) -> None:
    facts = analyse(started().write(tmp_path))[0]
    times = {row.name: row.a_step_seconds for row in facts.phases}
    assert times["BROADCAST"] is times["MPI_BCAST"] is times["NEGOTIATE_BROADCAST"] is None
    assert times["ALLREDUCE"] == pytest.approx(OPERATIONS * LENGTH * 1e-6)
    lines = report.text(facts).splitlines()
    (line,) = (line for line in lines if line.split()[:2] == ["collective", "MPI_BCAST"])
    assert line.split()[-1] == "-"
    rows = {row.name: row for row in report.compare(facts, facts).rows}
    assert "MPI_BCAST" not in rows
    assert rows["MPI_ALLREDUCE"].one == pytest.approx(OPERATIONS * LENGTH * 1e-6)


def test_whole_steps_of_several_timelines_in_a_file_are_summed(tmp_path: Path) -> None:
    steps = facts_of(started().text + started(3).text, tmp_path)["steps"]
    assert steps["seen"] == steps["whole"] + 2
    assert steps["operations"]["bytes"] == steps["whole"] * OPERATIONS * 400
