"""The analysis of timelines with known numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.commands.timeline import report
from hvdtrain.commands.timeline.verdict import analyse
from tests.timelines import Timeline, facts_of, straggling

Facts = dict[str, Any]


def phase(facts: Facts, name: str) -> Facts:
    row: Facts = next(row for row in facts["phases"] if row["name"] == name)
    return row


def near(seconds: float) -> Any:
    return pytest.approx(seconds, abs=1e-9)


def test_states_and_steps(tmp_path: Path) -> None:
    facts = facts_of(straggling(10), tmp_path)
    steps = facts["steps"]
    assert (steps["seen"], steps["whole"], facts["ranks"]) == (10, 9, 3)
    assert steps["seconds"]["median"] == steps["seconds"]["mean"] == near(0.070)
    assert steps["states"]["waiting"]["median"] == near(0.050210)
    assert steps["states"]["communicating"]["median"] == near(0.002200)
    assert steps["states"]["neither"]["median"] == near(0.017590)
    assert sum(state["share"] for state in steps["states"].values()) == near(1)
    assert steps["overlap"]["exposed_seconds"] == near(9 * 0.0022)
    assert facts["seconds"] == sum(facts["states"].values()) == near(9 * 0.070 + 0.0525)


def test_lateness(tmp_path: Path) -> None:
    lateness = facts_of(straggling(10), tmp_path)["lateness"]
    assert (lateness["negotiations"], lateness["with_ticks"], lateness["recorded"]) == (
        30,
        30,
        True,
    )
    rank0, rank1, rank2 = lateness["ranks"]
    assert rank2["rank"] == 2
    assert (rank2["late_steps"], rank2["late_steps_share"]) == (9, 1.0)
    assert rank2["late_negotiations"] == 30
    for key in ("late_in_step_seconds", "late_in_negotiation_seconds"):
        assert rank2[key]["median"] == rank2[key]["mean"] == near(0.050009)
    assert rank2["cost_seconds"] == lateness["cost_seconds"] == near(9 * 0.050009)
    behind = [row["behind_first_seconds"] for row in (rank0, rank1, rank2)]
    assert behind == [0, near(1e-6), near(0.050010)]
    assert rank0["late_steps"] == rank1["late_steps"] == rank0["late_negotiations"] == 0
    assert lateness["spread_seconds"]["median"] == near(0.050010)


def test_phases_and_collectives(tmp_path: Path) -> None:
    facts = facts_of(straggling(10), tmp_path)
    assert [(row["kind"], row["name"], row["bars"]) for row in facts["phases"]] == [
        ("negotiate", "NEGOTIATE_ALLREDUCE", 30),
        ("operation", "ALLREDUCE", 30),
        ("memcpy in", "MEMCPY_IN_FUSION_BUFFER", 30),
        ("collective", "MPI_ALLREDUCE", 30),
        ("memcpy out", "MEMCPY_OUT_FUSION_BUFFER", 30),
    ]
    for name, wall, tensors in (
        ("NEGOTIATE_ALLREDUCE", 0.50210, 30 * 0.050010),
        ("ALLREDUCE", 0.022, 0.066),
        ("MEMCPY_IN_FUSION_BUFFER", 0.001, 0.003),
        ("MPI_ALLREDUCE", 0.020, 0.060),
    ):
        assert phase(facts, name)["seconds"] == near(wall)
        assert phase(facts, name)["tensor_seconds"] == near(tensors)
    assert facts["collectives"] == [{"name": "ALLREDUCE", "negotiated": 30, "carried_out": 30}]


def test_fusion(tmp_path: Path) -> None:
    timeline = straggling(4)
    timeline.allreduce(["alone"], 2_000_000, 50, (7,))
    timeline.allreduce(["alone"], 2_000_050, 50, (7,))
    (row,) = facts_of(timeline, tmp_path)["operations"]
    assert row["name"] == "MPI_ALLREDUCE"
    assert (row["count"], row["tensors"]) == (6, 14)
    assert row["bytes"] == 4 * 3 * 40_000 + 2 * 28
    assert row["seconds"] == near(4 * 0.002 + 0.0001)
    assert row["small_seconds"] == row["seconds"]


def test_operations_are_separated_by_their_ends(tmp_path: Path) -> None:
    timeline = Timeline()  # as on a GPU, where several are begun before the first is carried out
    for tensor in "abcd":
        timeline.begin(tensor, "ALLREDUCE", 0)
    for time, group in ((10, "ab"), (30, "cd")):
        for tensor in group:
            timeline.begin(tensor, "NCCL_ALLREDUCE", time)
        for tensor in group:
            timeline.end(tensor, time + 20)
    for tensor in "abcd":
        timeline.end(tensor, 60, (5,))
    (row,) = facts_of(timeline, tmp_path)["operations"]
    assert (row["name"], row["count"], row["tensors"]) == ("NCCL_ALLREDUCE", 2, 4)
    assert row["seconds"] == near(40e-6)


def test_tensors(tmp_path: Path) -> None:
    facts = facts_of(straggling(10), tmp_path)
    assert facts["tensor_rows"] == 3
    first = facts["tensors"][0]
    assert (first["times"], first["bytes"]) == (10, 40_000)
    assert first["phases"]["negotiate"] == near(0.50010)
    assert first["seconds"] == near(0.50010 + 0.022)


def test_two_parts_of_an_operation_are_one_operation(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.begin("a", "ALLREDUCE", 0)
    for name, start, end in (("NCCL_REDUCESCATTER", 0, 10), ("MPI_ALLREDUCE", 20, 40)):
        timeline.begin("a", name, start)
        timeline.end("a", end)
    timeline.end("a", 50, (5,))
    (row,) = facts_of(timeline, tmp_path)["operations"]
    assert (row["name"], row["count"], row["seconds"]) == ("NCCL_REDUCESCATTER", 1, near(40e-6))


def test_cycles(tmp_path: Path) -> None:
    timeline = Timeline()
    for cycle in range(10):
        timeline.cycle(1000 * cycle)
        if cycle in (3, 7):
            timeline.allreduce(["a", "b"], 1000 * cycle + 10, 50, (10,))
            timeline.allreduce(["c"], 1000 * cycle + 100, 50, (10,))
    cycles = facts_of(timeline, tmp_path)["cycles"]
    assert cycles["count"] == 9
    assert cycles["configured_estimate_seconds"] == cycles["median_seconds"] == near(0.001)
    assert cycles["with_work"] == 2
    assert cycles["operations_per_cycle"] == 2
    assert cycles["tensors_per_cycle"] == 3
    assert cycles["bytes_per_cycle"] == 120


def test_ticks_of_one_cycle_are_a_tie(tmp_path: Path) -> None:
    timeline = Timeline()
    for step in range(4):
        start = 10_000 * step
        timeline.cycle(start)
        timeline.begin("a", "NEGOTIATE_ALLREDUCE", start + 1)
        timeline.tick("a", 0, start + 1)
        if step < 2:  # the same cycle, though 3 ms apart: gathering took so long
            timeline.tick("a", 1, start + 3_001)
        else:  # the next cycle
            timeline.cycle(start + 200)
            timeline.tick("a", 1, start + 201)
        timeline.end("a", start + 3_001)
    lateness = facts_of(timeline, tmp_path)["lateness"]
    late = lateness["ranks"][1]
    assert (late["late_negotiations"], late["late_steps"]) == (2, 1)  # the last is not whole
    assert late["late_in_negotiation_seconds"]["median"] == near(200e-6)


def test_without_marks_less_than_a_cycle_is_a_tie(tmp_path: Path) -> None:
    timeline = Timeline()
    for step, late in enumerate((999, 1000, 999)):
        timeline.negotiate("a", 10_000 * step, {0: 0, 1: late})
    lateness = facts_of(timeline, tmp_path)["lateness"]
    assert lateness["ranks"][1]["late_negotiations"] == 1


def test_two_slow_ranks_are_not_hidden_and_only_the_last_is_blamed(tmp_path: Path) -> None:
    timeline = Timeline()
    for step in range(5):
        timeline.negotiate("a", 100_000 * step, {0: 0, 2: 40_000, 1: 45_000})
    lateness = facts_of(timeline, tmp_path)["lateness"]
    assert lateness["cost_seconds"] == near(4 * 0.005)
    assert lateness["ranks"][1]["cost_seconds"] == near(4 * 0.005)
    assert lateness["spread_seconds"]["total"] == near(4 * 0.045)


def test_overlap(tmp_path: Path) -> None:
    timeline = Timeline()
    for step in range(3):
        start = 10_000 * step
        timeline.negotiate("a", start, {0: 0, 1: 10})
        timeline.allreduce(["a"], start + 100, 500, (10,))  # while b is still being computed
        timeline.negotiate("b", start + 1000, {0: 0, 1: 10})
        timeline.allreduce(["b"], start + 1100, 300, (10,))
    overlap = facts_of(timeline, tmp_path)["steps"]["overlap"]
    assert overlap["overlapped_seconds"] == near(2 * 500e-6)
    assert overlap["exposed_seconds"] == near(2 * 300e-6)
    assert overlap["overlapped_share"] == near(5 / 8)


def test_unnamed_and_gathered_tensors_do_not_begin_steps(tmp_path: Path) -> None:
    timeline = Timeline()
    time = 0
    for step in range(4):
        timeline.negotiate("gradient", time, {0: 0, 1: 10})
        timeline.negotiate(f"allreduce.noname.{step}", time + 100, {0: 0, 1: 10})
        timeline.allreduce([f"allreduce.noname.{step}"], time + 150, 10, (2,))
        for _ in range(3):
            timeline.negotiate("HorovodAllreduce", time + 200, {0: 0, 1: 10})
            timeline.begin("lengths", "NEGOTIATE_ALLGATHER", time + 300)
            timeline.end("lengths", time + 310)
            time += 500
    facts = facts_of(timeline, tmp_path)
    assert facts["steps"]["seen"] == 4
    names = {row["name"]: row["times"] for row in facts["tensors"]}
    assert names == {"gradient": 4, "allreduce.noname.*": 4, "HorovodAllreduce": 12, "lengths": 12}


def test_a_metric_between_the_steps_is_not_a_step(tmp_path: Path) -> None:
    timeline = Timeline()
    time = 0
    for step in range(6):
        for name in "abcd":
            timeline.negotiate(name, time, {0: 0, 1: 10})
            time += 100
        if step == 2:
            for _ in range(7):
                timeline.negotiate("metric", time, {0: 0, 1: 10})
                time += 1000
    assert facts_of(timeline, tmp_path)["steps"]["seen"] == 6


def test_negotiations_before_the_first_large_step_are_start_up(tmp_path: Path) -> None:
    timeline = Timeline()
    time = 0
    for _ in range(5):
        timeline.negotiate("check", time, {0: 0, 1: 900_000})
        time += 1_000_000
    for _ in range(4):
        for name in "abcd":
            timeline.negotiate(name, time, {0: 0, 1: 10})
            time += 100
    steps = facts_of(timeline, tmp_path)["steps"]
    assert steps["whole"] == 2  # the first large one began with the start-up
    assert steps["seconds"]["median"] == near(400e-6)


def test_the_cached_form_has_no_ticks(tmp_path: Path) -> None:
    text = straggling(10).text
    first = text.index('"ts": 1070000')  # the second step
    cached = text[:first] + re.sub(r'\{"ph": "X"[^}]*\},', "", text[first:])
    lateness = facts_of(cached, tmp_path)["lateness"]
    assert (lateness["negotiations"], lateness["with_ticks"]) == (30, 3)
    assert (lateness["steps_with_ticks"], lateness["recorded"]) == (1, False)


def test_without_ticks_of_two_ranks_no_rank_is_late(tmp_path: Path) -> None:
    timeline = Timeline()
    for step in range(4):
        for rank, name in enumerate("ab"):
            timeline.negotiate(name, 1_000 * step + 20 * rank, {rank: 10})
        timeline.allreduce(["a", "b"], 1_000 * step + 100, 100, (10,))
    facts = facts_of(timeline, tmp_path)
    assert facts["lateness"]["recorded"] is False
    assert "straggler" not in [finding["kind"] for finding in facts["verdict"]]


def test_lost_ends_do_not_stay_open(tmp_path: Path) -> None:
    text = straggling(10).text
    start = text.index('{"ph": "E", "ts": 1050010')
    holed = text[:start] + text[text.index('{"ph": "B"', start) :]
    facts = facts_of(holed, tmp_path)
    assert phase(facts, "NEGOTIATE_ALLREDUCE")["bars"] < 30
    assert facts["steps"]["states"]["waiting"]["median"] == near(0.050210)
    assert facts["file"]["open_bars"] == 0


def test_a_slice_in_the_middle_of_bars(tmp_path: Path) -> None:
    facts = facts_of(straggling(10), tmp_path, span=(0.1, 0.36))
    assert facts["steps"]["seen"] == 4  # those that begin at 0.14, 0.21, 0.28 and 0.35
    assert facts["file"]["begin"] == near(0.12001)
    assert facts["file"]["headless_events"] > 0
    assert not facts["file"]["unfamiliar"]


def test_unfamiliar_events_are_counted(tmp_path: Path) -> None:
    timeline = straggling(3)
    timeline.pieces += [
        '{"ph": "s", "id": 1, "ts": 5, "pid": 1},',
        '{"ph": "i", "name": "HOROVOD_LATER", "ts": 9},',
        '{"ph": "M", "name": "thread_name", "pid": 1, "args": {"name": "x"}},',
        '{"ph": "B", "name": "NEW_ACTIVITY", "pid": 1},',
    ]
    timeline.begin("gradient.0", "ALLREDUCE", 2_000_000)
    timeline.begin("gradient.0", "NEW_ACTIVITY", 2_000_000)
    timeline.end("gradient.0", 2_000_010)
    timeline.end("gradient.0", 2_000_010)
    facts = facts_of(timeline, tmp_path)
    assert facts["file"]["unfamiliar"] == {"s": 1, "i": 1, "M": 1, "B": 1}
    assert phase(facts, "NEW_ACTIVITY")["kind"] == "other"
    assert facts["steps"]["seen"] == 3


def test_a_tensor_whose_name_was_lost(tmp_path: Path) -> None:
    text = straggling(3).text
    start = text.index('{"name": "process_name", "ph": "M", "pid": 2')
    end = text.index('{"ph": "B"', start)
    facts = facts_of(text[:start] + text[end:], tmp_path)
    assert {row["name"] for row in facts["tensors"]} == {"gradient.0", "tensor 2", "gradient.2"}
    assert facts["steps"]["seen"] == 3


def test_the_state_history_of_a_file_adds_up(tmp_path: Path) -> None:
    path = straggling(200).write(tmp_path)
    _, analysis = analyse(path)
    columns = analysis.history.columns(analysis.times)
    assert [sum(column) for column in columns] == [near(time) for time in analysis.times]
    width = analysis.history.width
    assert all(sum(parts) == near(width) for parts in list(zip(*columns, strict=True))[:-1])


# Operations outside the steps do not affect the numbers of the steps

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
    times = {row.name: row.seconds_per_step for row in facts.phases}
    assert times["BROADCAST"] is times["MPI_BCAST"] is times["NEGOTIATE_BROADCAST"] is None
    assert times["ALLREDUCE"] == pytest.approx(OPERATIONS * LENGTH * 1e-6)
    lines = report.text(facts).splitlines()
    (line,) = (line for line in lines if line.split()[:2] == ["collective", "MPI_BCAST"])
    assert line.split()[-1] == "-"
    rows = {row.name: row for row in report.compare(facts, facts).rows}
    assert "MPI_BCAST" not in rows
    assert rows["MPI_ALLREDUCE"].before == pytest.approx(OPERATIONS * LENGTH * 1e-6)
