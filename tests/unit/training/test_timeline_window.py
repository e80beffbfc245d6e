"""``--timeline``: what Horovod finds in the environment, and which steps are recorded."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.config.options import Options
from hvdtrain.errors import UsageError
from hvdtrain.training.windows import TimelineWindow, prepare_timeline

TIMELINE, CACHE = "HOROVOD_TIMELINE", "HOROVOD_CACHE_CAPACITY"
FILE = Options(timeline=Path("t.json"))


@pytest.mark.parametrize(
    ("options", "environ", "result"),
    [
        (Options(), {}, {}),
        (FILE, {}, {TIMELINE: "DYNAMIC", CACHE: "0"}),
        (FILE, {CACHE: "9"}, {TIMELINE: "DYNAMIC", CACHE: "9"}),
        (Options(), {TIMELINE: "a.json"}, {TIMELINE: "a.json", CACHE: "0"}),
        (Options(), {TIMELINE: "DYNAMIC"}, {TIMELINE: "DYNAMIC"}),
    ],
)
def test_variables_for_horovod(
    options: Options, environ: dict[str, str], result: dict[str, str]
) -> None:
    prepare_timeline(options, "horovod", environ)
    assert environ == result


@pytest.mark.parametrize(
    ("strategy", "environ", "message"),
    [
        ("single", {}, "--timeline .* --strategy single .* omit it"),
        ("horovod", {"HOROVOD_TIMELINE": "a.json"}, "HOROVOD_TIMELINE=a.json cannot be combined"),
    ],
)
def test_contradictions_are_refused(strategy: str, environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prepare_timeline(FILE, strategy, environ)


class Log:
    """An adapter that notes what it is asked for."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.world = SimpleNamespace(is_writer=True)
        self.communicator = SimpleNamespace(gather=lambda _: self.done.append("together"))

    def start_timeline(self, file: str) -> None:
        self.done.append(f"start {file}")

    def stop_timeline(self) -> None:
        self.done.append("stop")


def run(
    steps: range,
    span: tuple[int, int | None] | None,
    environ: dict[str, str] | None = None,
    file: Path | None = Path("t.json"),
) -> tuple[list[str], list[int], TimelineWindow]:
    """What is asked of the adapter in those steps, and which of them are recorded."""
    log: Any = Log()
    log.strategy = log
    options = Options(timeline=file, timeline_steps=span)
    window = TimelineWindow(options, cast(CommonAdapter, log), environ or {})
    recorded = []
    for step in steps:
        window.enter(step)
        log.done.append(str(step))
        if window.leave(step + 1):
            recorded.append(step)
    window.close()
    return log.done, recorded, window


@pytest.mark.parametrize(
    ("steps", "span", "done", "recorded"),
    [
        (range(6), (2, 4), "0, 1, start t.json, together, 2, 3, stop, 4, 5", [2, 3]),
        (range(3), None, "start t.json, together, 0, 1, 2, stop", [0, 1, 2]),
        (range(3), (0, None), "start t.json, together, 0, 1, 2, stop", [0, 1, 2]),
        (range(3), (2, 99), "0, 1, start t.json, together, 2, stop", [2]),
        (range(10, 13), (5, 12), "start t.json, together, 10, 11, stop, 12", [10, 11]),  # resumed
    ],
)
def test_the_steps_of_the_window_are_recorded(
    steps: range, span: tuple[int, int | None] | None, done: str, recorded: list[int]
) -> None:
    calls, steps_recorded, window = run(steps, span)
    assert ", ".join(calls) == done
    assert steps_recorded == recorded
    assert window.recorded == "t.json"


def test_a_window_that_was_missed_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        done, recorded, window = run(range(3), (5, 9))
    assert done == ["0", "1", "2"]
    assert recorded == []
    assert window.recorded is None
    assert "--timeline-steps 5:9: no such step was taken" in caplog.text


@pytest.mark.parametrize(
    ("environ", "recorded", "file"),
    [({}, [], None), ({"HOROVOD_TIMELINE": "a.json"}, [0, 1], "a.json")],
)
def test_without_the_option_horovods_own_recording_is_left_alone(
    environ: dict[str, str], recorded: list[int], file: str | None
) -> None:
    done, steps, window = run(range(2), None, environ, file=None)
    assert (done, steps, window.recorded) == (["0", "1"], recorded, file)
