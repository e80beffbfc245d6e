"""Timelines and profiles of real runs: a late rank, and the trainers' windows of steps."""

from __future__ import annotations

import gzip
import json
import random
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.commands.timeline.verdict import analyse
from tests.conftest import ROOT
from tests.parallel import resident
from tests.parallel.conftest import FRAMEWORKS

LATE = ROOT / "tests" / "parallel" / "scripts" / "late.py"
STEPS = 25


@pytest.fixture(scope="module")
def late_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """Return the timeline of three ranks, of which rank 2 sleeps 50 ms in each of 25 steps.

    And the median of the seconds that it slept.
    """
    path = tmp_path_factory.mktemp("late") / "timeline.json"
    outcome = resident.ranks(
        3,
        str(LATE),
        "2",
        "50",
        str(STEPS),
        HOROVOD_TIMELINE=str(path),
        HOROVOD_TIMELINE_MARK_CYCLES="1",
        HOROVOD_CACHE_CAPACITY="0",
    )
    assert outcome.code == 0, outcome.err
    return path, float(outcome.out)


@pytest.fixture
def late(late_run: tuple[Path, float]) -> Path:
    """Return the timeline."""
    return late_run[0]


@pytest.mark.timing
def test_the_late_rank_and_its_50_ms_are_reported(late_run: tuple[Path, float]) -> None:
    late, slept = late_run
    facts = asdict(analyse(late)[0])
    assert (facts["ranks"], facts["steps"]["seen"]) == (3, STEPS)
    finding = facts["verdict"][0]
    assert (finding["kind"], finding["rank"]) == ("straggler", 2)
    row = facts["lateness"]["ranks"][2]
    assert row["late_steps_share"] > 0.8
    assert 0.6 * slept < row["late_in_step_seconds"]["median"] < 1.8 * slept
    assert row["cost_seconds"] == pytest.approx(
        row["late_in_step_seconds"]["mean"] * row["late_steps"]
    )
    assert finding["share"] > 0.5
    gradients = 8
    assert facts["lateness"]["negotiations"] == gradients * STEPS + gradients  # and the broadcast
    assert facts["cycles"]["count"] > STEPS


def test_a_file_cut_at_random_bytes_is_analysed_up_to_the_cut(late: Path, tmp_path: Path) -> None:
    content = late.read_bytes()
    ends = [match.end() for match in re.finditer(rb"\}(?=,\{|,\n\{|\])", content)]
    events = json.loads(content)
    assert len(ends) == len(events)
    cut, clean = tmp_path / "cut.json", tmp_path / "clean.json"
    rng = random.Random(2)
    for size in rng.sample(range(200, len(content)), 200):
        cut.write_bytes(content[:size])
        whole = sum(end <= size for end in ends)
        # Without the final bracket: a closed file is not reported as unfinished.
        clean.write_text(json.dumps(events[:whole])[:-1] + ",\n" if whole else "[\n")
        facts, expected = asdict(analyse(cut)[0]), asdict(analyse(clean)[0])
        assert facts["file"]["events"] == whole
        assert {**facts, "file": None} == {**expected, "file": None}


def record(framework: str, folder: Path, *options: str, **extra: str) -> dict[str, Any]:
    """Train MNIST for 9 steps on two ranks; return the summary."""
    outcome = resident.ranks(
        2,
        *("-m", "hvdtrain.mnist", "--framework", framework, "--model", "small"),
        *("--num-steps", "9", "--quiet", f"--summary={folder / 'summary.json'}", *options),
        **extra,
    )
    assert outcome.code == 0, outcome.err
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_window_contains_exactly_its_steps(framework: str, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    summary = record(framework, tmp_path, f"--timeline={path}", "--timeline-steps=3:7")
    facts = asdict(analyse(path)[0])
    assert facts["steps"]["seen"] == 4
    gradients = [row for row in facts["tensors"] if "gradients." in row["name"]]
    assert gradients
    assert {row["times"] for row in gradients} == {4}
    lateness = facts["lateness"]
    assert lateness["recorded"]
    assert lateness["with_ticks"] >= 4 * len(gradients)
    assert facts["ranks"] == 2
    assert facts["cycles"]["count"] > 4
    assert not facts["file"]["cut"]
    assert not facts["file"]["unfamiliar"]
    assert summary["timeline"] == str(path)
    assert summary["steps_completed"] == 9
    assert summary["images_per_second_mean"] > 0


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_profile_contains_exactly_its_updates(framework: str, tmp_path: Path) -> None:
    path, folder = tmp_path / "timeline.json", tmp_path / "traces"
    window = ("--profile=3:7", f"--profile-dir={folder}", "--profile-ranks=1")
    summary = record(framework, tmp_path, f"--timeline={path}", "--timeline-steps=3:7", *window)
    assert [file.name for file in folder.iterdir()] == ["rank-1.json.gz"]
    assert summary["profile"] == str(folder)
    assert summary["images_per_second_mean"] > 0
    with gzip.open(folder / "rank-1.json.gz") as file:
        trace = json.load(file)
    assert trace["distributedInfo"]["rank"] == 1
    spans = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    updates = [e for e in spans if e["name"].startswith("ProfilerStep#")]
    assert {event["name"] for event in updates} == {f"ProfilerStep#{n}" for n in (4, 5, 6, 7)}
    waits = [event for event in spans if event["name"].startswith("communication: ")]
    for update in updates:
        begin, end = update["ts"], update["ts"] + update["dur"]
        assert any(event.get("cat") == "cpu_op" and begin <= event["ts"] < end for event in spans)
        if framework == "pytorch":  # TensorFlow does not record the sums within a traced function
            assert any(begin <= event["ts"] < end for event in waits)


def test_other_programs_read_the_profiles(tmp_path: Path) -> None:
    hta = pytest.importorskip("hta.trace_analysis")
    ranks = ("--profile-ranks=0,1", f"--profile-dir={tmp_path / 'traces'}")
    summary = record("pytorch", tmp_path, "--profile=3:9", *ranks)
    assert summary["steps_completed"] == 9
    trace = hta.TraceAnalysis(trace_dir=str(tmp_path / "traces"))
    assert sorted(trace.t.get_ranks()) == [0, 1]
    assert list(trace.get_profiler_steps()) == [4, 5, 6, 7, 8]  # it leaves out the last one


def test_a_timeline_requested_by_the_environment_is_written(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    summary = record("pytorch", tmp_path, HOROVOD_TIMELINE=str(path))
    facts = asdict(analyse(path)[0])
    assert {r["times"] for r in facts["tensors"] if "gradients." in r["name"]} == {9}
    assert facts["lateness"]["recorded"]
    assert summary["timeline"] == str(path)
    assert summary["images_per_second_mean"] is None


def test_an_invalid_request_is_rejected_in_one_line(tmp_path: Path) -> None:
    arguments = ["-m", "hvdtrain.mnist", f"--timeline={tmp_path / 't.json'}", "--strategy=single"]
    outcome = resident.ranks(1, *arguments, code=2)
    (message,) = outcome.said
    assert "--timeline records Horovod's activity, and --strategy single" in message
