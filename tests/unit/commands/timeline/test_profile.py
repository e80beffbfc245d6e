"""``--profile``: steps of a profile beside those of the timeline."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import cli
from hvdtrain.commands.timeline import profile
from hvdtrain.commands.timeline.profile import ProfileFacts, profile_facts, table
from hvdtrain.commands.timeline.steps import WholeStep
from hvdtrain.commands.timeline.verdict import analyse
from hvdtrain.errors import UsageError
from tests.timelines import EPOCH, straggling


def event(name: str, start: float, length: float, kind: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length, "pid": 7, "tid": "t"}


def write(path: Path, events: list[dict[str, Any]], base: int = EPOCH, **more: Any) -> Path:
    trace = {"schemaVersion": 1, "baseTimeNanoseconds": base * 1000, "traceEvents": events, **more}
    with gzip.open(path, "wt") as file:
        json.dump(trace, file)
    return path


@pytest.fixture
def timeline(tmp_path: Path) -> Path:
    path = tmp_path / "timeline.json"
    path.write_text(straggling(10).text)
    return path


def steps_of(timeline: Path) -> list[WholeStep]:
    kept = analyse(timeline, keeps_steps=True)[1].steps.kept
    assert kept
    return kept


def read(path: Path, timeline: Path) -> ProfileFacts:
    return profile_facts(path, timeline, analyse(timeline, keeps_steps=True)[1])


@pytest.mark.parametrize("late", [-500, 45_000])  # the last rank is late by 50 ms
def test_each_update_has_its_step_however_late_the_rank_is(
    late: int, timeline: Path, tmp_path: Path
) -> None:
    first, second, *_ = steps_of(timeline)
    events = [
        event("ProfilerStep#41", first.start + late, first.end - first.start, "user_annotation"),
        event("ProfilerStep#42", second.start + late, second.end - second.start, "user_annotation"),
        event("ProfilerStep#90", 1e9, 100, "user_annotation"),  # after the timeline
        {"ph": "M", "name": "process_name", "pid": "Spans", "args": {"name": "python"}},
    ]
    path = write(tmp_path / "p.json.gz", events, distributedInfo={"rank": 3, "world_size": 4})
    facts = read(path, timeline)
    assert (facts.rank, [step.step for step in facts.steps]) == (3, [41, 42, 90])
    assert [step.timeline_step for step in facts.steps] == [1, 2, None]
    exact = analyse(timeline)[0].steps
    assert exact
    assert facts.steps[0].timeline_seconds == pytest.approx((second.start - first.start) * 1e-6)
    assert facts.steps[0].waiting_seconds == pytest.approx(exact.states["waiting"].median, rel=0.2)
    assert facts.steps[2].waiting_seconds is None


@pytest.mark.parametrize(
    ("events", "computing", "communication"),
    [
        ([], 0, 0),
        # Nested and overlapping operations count once; those of other categories do not.
        ([("a", 0, 30), ("b", 10, 10), ("c", 20, 30), ("d", 0, 90, "cpu_runtime")], 50, 0),
        # The span of a wait is no computing, whatever runs in it or around it.
        ([("a", 0, 60), ("communication: x", 40, 40), ("b", 50, 5)], 40, 40),
        # A message of another thread is hidden by computing.
        ([("a", 0, 60), ("gloo:all_reduce", 40, 40)], 60, 20),
        # On a GPU operations of the processor do not count.
        (
            [("a", 0, 90), ("gemm", 10, 30, "kernel"), ("ncclDevKernel", 20, 40, "kernel")],
            30,
            20,
        ),
        ([("gemm", 10, 30, "kernel"), ("communication: x", 0, 50)], 30, 20),
        # What only starts a kernel, and the copies of spans for the kernels started in them.
        (
            [
                ("gemm", 10, 30, "kernel"),
                ("nccl:all_reduce", 50, 5),
                ("communication: x", 60, 20, "gpu_user_annotation"),
                ("ProfilerStep#1", 5, 70, "gpu_user_annotation"),
            ],
            30,
            0,
        ),
        # What begins in an update counts in it, up to its end.
        ([("a", 90, 50), ("b", -10, 5), ("c", 100, 5)], 10, 0),
    ],
)
def test_the_time_of_an_update_is_split(
    events: list[Any], computing: float, communication: float, timeline: Path, tmp_path: Path
) -> None:
    start = steps_of(timeline)[0].ready
    spans = [event("ProfilerStep#1", start, 100, "user_annotation")]
    spans += [event(name, start + at, *rest) for name, at, *rest in events]
    (step,) = read(write(tmp_path / "p.json.gz", spans), timeline).steps
    times = (step.computing_seconds, step.communication_seconds, step.other_seconds)
    expected = (computing, communication, 100 - computing - communication)
    assert [time * 1e6 for time in times] == pytest.approx(expected, abs=1e-6)


def test_the_table_ends_with_the_mean(
    timeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = steps_of(timeline)[0]
    events = [
        event("ProfilerStep#1", step.start, step.end - step.start, "user_annotation"),
        *(event(f"ProfilerStep#{n}", n * 1e8, 2000, "user_annotation") for n in (2, 3)),
        event("a", 2e8, 1000),
    ]
    monkeypatch.setattr(profile, "ROWS", 2)
    shown = table(read(write(tmp_path / "p.json.gz", events), timeline))
    assert [row[0] for row in shown.rows] == ["1", "2", "mean"]
    assert shown.rows[1][1:5] == ["2.00 ms", "1.00 ms", "0 µs", "1.00 ms"]
    assert shown.rows[1][5:] == ["-", "-", "-"]
    assert shown.note == "and 1 more updates"
    assert shown.title.startswith("Updates of rank 0 in ")


def test_the_verb_shows_it_in_each_form(
    timeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = steps_of(timeline)[0]
    spans = [event("ProfilerStep#7", step.start, step.end - step.start, "user_annotation")]
    path, page = write(tmp_path / "p.json.gz", spans), tmp_path / "page.html"
    line = ["timeline", str(timeline), "--profile", str(path)]
    assert cli.main([*line, "--html", str(page)]) == 0
    assert f"Updates of rank 0 in {path}" in capsys.readouterr().out.replace("\n", " ")
    assert "Updates of rank 0 in" in page.read_text()
    assert cli.main([*line, "--json"]) == 0
    (profiled,) = json.loads(capsys.readouterr().out)["profiles"]
    assert (profiled["rank"], profiled["steps"][0]["step"]) == (0, 7)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        (b"[]", "is no profile in Chrome's JSON format"),
        (b"{", "is no profile in Chrome's JSON format"),
        (b'{"traceEvents": [{"ts": "x"}]}', "is no profile in Chrome's JSON format"),
        (b'{"traceEvents": []}', "has no spans ProfilerStep#N: record it with --profile A:B"),
        (gzip.compress(b"{" * 999, mtime=0)[:-20], "cannot be read: "),
    ],
)
def test_what_is_no_profile(
    content: bytes | None,
    words: str,
    timeline: Path,
    tmp_path: Path,
    refused: Callable[..., str],
) -> None:
    path = tmp_path / "p.json"
    if content is not None:
        path.write_bytes(content)
    error = refused("timeline", str(timeline), "--profile", str(path))
    assert str(path) in error and words in error


def test_a_profile_of_another_run_and_one_that_is_too_large(
    timeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = [event("ProfilerStep#7", 0, 100, "user_annotation")]
    path = write(tmp_path / "p.json.gz", spans, base=EPOCH - 10**9)
    with pytest.raises(UsageError, match=r"none of its steps is in .*: record both in one run"):
        read(path, timeline)
    monkeypatch.setattr(profile, "LARGEST", 20)
    with pytest.raises(UsageError, match="too large: profile fewer updates"):
        read(path, timeline)


def test_what_remains_of_spans() -> None:
    spans = [(0.0, 10.0), (20.0, 30.0), (40.0, 50.0)]
    assert profile._without(spans, []) == spans
    assert profile._without(spans, [(5.0, 25.0), (26.0, 27.0)]) == [
        (0.0, 5.0), (25.0, 26.0), (27.0, 30.0), (40.0, 50.0)
    ]  # fmt: skip
    assert profile._without(spans, [(-5.0, 100.0)]) == []
    assert profile._without(spans, [(10.0, 20.0), (45.0, 50.0)]) == [*spans[:2], (40.0, 45.0)]
    assert profile._merged([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (2.0, 3.0)]) == [(0.0, 4.0)]
