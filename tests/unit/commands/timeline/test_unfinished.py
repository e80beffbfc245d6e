"""Files that end with open tensors, e.g. of hung jobs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.commands.timeline.analyse import Recorder
from hvdtrain.commands.timeline.trace_page import render
from hvdtrain.commands.timeline.verb import add_arguments, run_verb
from hvdtrain.commands.timeline.verdict import GROUPS, NAMES, analyse
from tests.timelines import Timeline, facts_of, straggling

Facts = dict[str, Any]


def waiting(tensors: int, ready: tuple[int, ...], after: Timeline | None = None) -> Timeline:
    """Return negotiations without an end, one per ms from 500 ms on."""
    timeline = after or Timeline()
    timeline.closed = False
    for number in range(tensors):
        at = 500_000 + 1_000 * number
        timeline.begin(f"t{number}", "NEGOTIATE_ALLREDUCE", at)
        for rank in ready:
            timeline.tick(f"t{number}", rank, at)
    return timeline


def normal(steps: int = 3) -> Timeline:
    """Return steps of 100 ms of two tensors, on three ranks."""
    timeline = Timeline()
    for step in range(steps):
        for name in ("t0", "t1"):
            timeline.negotiate(name, 100_000 * step, {0: 0, 1: 5, 2: 10})
            timeline.allreduce([name], 100_000 * step + 10, 5_000, (10,))
    return timeline


def test_a_job_that_hangs_in_its_first_negotiation_is_unfinished(tmp_path: Path) -> None:
    facts = facts_of(waiting(2, (0, 2)).text, tmp_path)
    (finding,) = facts["verdict"]
    assert finding["kind"] == "unfinished"
    assert "2 tensors are open" in finding["text"]
    assert "t0, t1 in NEGOTIATE_ALLREDUCE since 0 µs" in finding["text"]
    assert "submitted by ranks 0, 2, and no other rank is in the file" in finding["text"]
    assert "no tensor was submitted" not in finding["text"]


def test_ranks_are_those_seen_until_a_negotiation_has_ended(tmp_path: Path) -> None:
    path = waiting(1, (0,)).write(tmp_path)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    report = run_verb(parser.parse_args([str(path)]))
    assert "1 rank seen," in report.text
    assert "a single rank" not in report.text
    recorder = Recorder()
    assert "1 rank seen," in render(*analyse(path, recorder=recorder), recorder)


def test_the_rank_that_a_hung_job_waits_for_is_named_first(tmp_path: Path) -> None:
    timeline = waiting(2, (0, 2), normal())
    timeline.cycle(10_000_000)  # Horovod checks for work while it hangs
    facts = facts_of(timeline.text, tmp_path)
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
    assert [row["kind"] for row in facts_of(text, tmp_path)["verdict"]] == ["straggler"]


def test_a_recording_that_was_stopped_within_a_step_is_not_unfinished(tmp_path: Path) -> None:
    """``--timeline-steps 0:10``: a rank may submit tensors of the next step before rank 0 stops."""
    timeline = straggling(10)
    timeline.begin("gradient.0", "NEGOTIATE_ALLREDUCE", 1_700_000)
    timeline.tick("gradient.0", 1, 1_700_001)
    timeline.cycle(1_700_100)
    facts = facts_of(timeline.text, tmp_path)
    assert [finding["kind"] for finding in facts["verdict"]] == ["straggler"]
    assert len(facts["open"]) == 1
    timeline.closed = False  # a run that was killed, or still runs
    verdict = facts_of(timeline.text, tmp_path)["verdict"]
    assert [finding["kind"] for finding in verdict] == ["straggler", "unfinished"]


def test_a_short_recording_that_was_stopped_is_not_unfinished(tmp_path: Path) -> None:
    timeline = normal(1)  # no whole step with a length
    timeline.begin("t2", "NEGOTIATE_ALLREDUCE", 20_000)
    facts = facts_of(timeline.text, tmp_path)
    assert [finding["kind"] for finding in facts["verdict"]] == ["too little"]


def test_a_hung_job_that_shut_down_regularly_is_reported(tmp_path: Path) -> None:
    """HOROVOD_STALL_SHUTDOWN_TIME_SECONDS shuts it down."""
    timeline = waiting(2, (0, 2), normal())
    timeline.cycle(10_000_000)
    timeline.closed = True
    assert facts_of(timeline.text, tmp_path)["verdict"][0]["kind"] == "unfinished"


def test_a_hung_operation_is_reported(tmp_path: Path) -> None:
    timeline = normal()
    timeline.negotiate("t0", 400_000, {0: 0, 1: 5, 2: 10})
    timeline.begin("t0", "ALLREDUCE", 400_010)
    timeline.begin("t0", "MPI_ALLREDUCE", 400_020)
    timeline.closed = False
    facts = facts_of(timeline.text, tmp_path)
    (finding,) = (row for row in facts["verdict"] if row["kind"] == "unfinished")
    assert "t0 in MPI_ALLREDUCE since 400 ms" in finding["text"]
    assert finding["ranks"] == []
    assert facts["open"][0]["ready"] is facts["open"][0]["missing"] is None


def test_without_ticks_no_rank_is_blamed(tmp_path: Path) -> None:
    facts = facts_of(waiting(1, (), normal()).text, tmp_path)  # Horovod's cache is on
    (finding,) = (row for row in facts["verdict"] if row["kind"] == "unfinished")
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
    (finding,) = (f for f in facts_of(timeline.text, tmp_path)["verdict"] if "ranks" in f)
    assert finding["text"].count("NEGOTIATE") == GROUPS
    assert finding["text"].count("and 2 more in") == GROUPS
    assert finding["text"].endswith("and more")
    assert finding["ranks"] == [0, 1, 2]


def test_a_slice_is_not_unfinished(tmp_path: Path) -> None:
    text = waiting(2, (0, 2), normal()).text
    kinds = [row["kind"] for row in facts_of(text, tmp_path, span=(0.0, 0.6))["verdict"]]
    assert "unfinished" not in kinds
    kinds = [row["kind"] for row in facts_of(text, tmp_path, span=(0.0, float("inf")))["verdict"]]
    assert "unfinished" in kinds


def test_bars_cut_by_another_timeline_are_reported(tmp_path: Path) -> None:
    (finding,) = facts_of(waiting(1, (0,)).text + Timeline().text, tmp_path)["verdict"]
    assert finding["kind"] == "too little"
    assert "not contain the end" in finding["text"]
