"""``--profile``: which updates are profiled, where, and what happens if a trace is not written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typing_extensions import override

from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.adapters.framework import Profiler
from hvdtrain.config.options import Options
from hvdtrain.system.runtime.waits import SUM, Waits
from hvdtrain.training.windows import ProfileWindow


class Log(Profiler):
    """A profiler that notes its calls in ``done``."""

    def __init__(self, done: list[str], error: Exception | None = None) -> None:
        self.done, self.error = done, error
        done.append("start")

    @contextlib.contextmanager
    def _span(self, name: str) -> Iterator[None]:
        self.done.append(f"<{name}")
        yield
        self.done.append(f"{name}>")

    @override
    def step(self, number: int) -> Any:
        return self._span(str(number))

    @override
    def mark(self, name: str) -> Any:
        return self._span(name)

    @override
    def stop(self, path: Path) -> None:
        self.done.append("stop")
        path.write_text("half")
        if self.error:
            raise self.error


class Run:
    """A training of which a window is profiled on rank 0, seen from a rank."""

    def __init__(
        self,
        folder: Path,
        rank: int = 0,
        error: Exception | None = None,
        starts: Callable[[list[str], Exception | None], Profiler] = Log,
    ) -> None:
        self.done: list[str] = []
        self.waits = Waits(rank, ["h", "h"])
        adapter: Any = SimpleNamespace(
            world=SimpleNamespace(rank=rank, is_writer=rank == 0),
            communicator=SimpleNamespace(wait_for_all=lambda: self.done.append("all")),
            waits=self.waits,
            start_profiler=lambda: starts(self.done, error),
        )
        options = Options(profile=(2, 4), profile_dir=folder / "traces", profile_ranks=(0, 5))
        self.window = ProfileWindow(options, cast(CommonAdapter, adapter))
        self.recorded: list[int] = []

    def update(self, step: int, *, pauses: bool = False) -> None:
        self.window.enter(step)
        with self.waits.during(SUM):
            self.done.append(f"({step + 1})")
        if self.window.leave(step + 1, pauses=pauses):
            self.recorded.append(step + 1)


def test_the_updates_of_the_window_are_profiled(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in range(6):
        run.update(step)
    run.window.close()
    wait = f"communication: {SUM}"
    assert " ".join(run.done) == (
        f"(1) (2) start <3 <{wait} (3) {wait}> 3> <4 <{wait} (4) {wait}> 4> stop all (5) (6)"
    )
    assert run.recorded == [3, 4]
    assert run.window.recorded == str(tmp_path / "traces")
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["rank-0.json.gz"]


def test_other_ranks_exclude_the_same_updates_and_wait(tmp_path: Path) -> None:
    run = Run(tmp_path, rank=1)
    for step in range(6):
        run.update(step)
    run.window.close()
    assert " ".join(run.done) == "(1) (2) (3) (4) all (5) (6)"
    assert run.recorded == [3, 4]
    assert not list(tmp_path.iterdir())


def test_an_evaluation_is_in_no_span(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.update(2, pauses=True)
    run.done.append("evaluation")
    run.update(3)
    spans = [word for word in run.done if word.strip("<>").isdigit() or word == "evaluation"]
    assert " ".join(spans) == "<3 3> evaluation <4 4>"


def test_a_resumed_training_within_the_window(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.update(3)
    assert run.recorded == [4]
    assert run.done[0] == "start" and run.done[-2:] == ["stop", "all"]


def test_a_repeated_update_has_its_number_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.update(2)
    run.window.enter(3)  # which fails, and two are repeated
    for step in (1, 2, 3):
        run.update(step)
    spans = [word for word in run.done if word.strip("<>").isdigit()]
    assert " ".join(spans) == "<3 3> <4 4> <2 2> <3 3> <4 4>"
    assert run.done.count("start") == run.done.count("stop") == 1


def test_an_end_within_the_window(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path)
    run.update(2)
    run.window.close()  # --num-steps 3
    assert (tmp_path / "traces" / "rank-0.json.gz").exists()
    assert run.done[-1] == "stop"  # it waits for no other rank
    assert not caplog.records
    run = Run(tmp_path / "preempted")
    run.update(2)
    run.window.close(discards=True)
    assert "stop" not in run.done and run.window.recorded is None
    assert "--profile: stopped before update 4, no trace is written" in caplog.text
    caplog.clear()
    run = Run(tmp_path, rank=5)  # profiled, too
    run.update(2)
    run.window.close(discards=True)
    assert not caplog.records  # rank 0 warns


def test_a_link_in_a_shared_directory_is_not_followed(tmp_path: Path) -> None:
    shared, target = tmp_path / "traces", tmp_path / "target"
    shared.mkdir()
    for name in (".rank-0.partial.json.gz", "rank-0.json.gz"):
        (shared / name).symlink_to(target)
    run = Run(tmp_path)
    for step in range(6):
        run.update(step)
    assert (shared / "rank-0.json.gz").is_file() and not target.exists()


def test_a_window_that_was_missed_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.update(0)
    run.window.close()
    assert "--profile 2:4: no such update was made" in caplog.text
    assert run.window.recorded is None


def test_a_profiler_that_does_not_start_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start(done: list[str], error: Exception | None) -> Profiler:
        raise RuntimeError("another one is running")

    run = Run(tmp_path, starts=start)
    for step in range(6):
        run.update(step)
    run.window.close()
    assert " ".join(run.done) == "(1) (2) (3) (4) all (5) (6)"
    (record,) = caplog.records
    assert record.getMessage() == "--profile: rank 0: another one is running"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [OSError(28, "No space left"), ValueError("no trace")])
def test_a_trace_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    run = Run(tmp_path, error=error)
    for step in range(6):
        run.update(step)
    assert run.recorded == [3, 4] and run.done[-1] == "(6)"
    assert "rank-0.json.gz cannot be written: " in caplog.text
    assert not list((tmp_path / "traces").iterdir())
