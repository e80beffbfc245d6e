"""Programs that are started: interrupted at any moment, nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from hvdtrain.launch import run as running
from hvdtrain.launch.run import TIMED_OUT, Command

# A program that is ended while it starts another, which would go on for a minute.
STARTS = """
import sys
from hvdtrain.launch.run import Command, run, termination_as_interrupt
with termination_as_interrupt():
    print("starting", flush=True)
    run(Command(("sleep", sys.argv[1])), timeout=60)
"""


def sleeping(seconds: str) -> list[int]:
    found = psutil.process_iter(["cmdline"])
    return [one.pid for one in found if one.info["cmdline"] == ["sleep", seconds]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_program_is_started_ends_both(number: signal.Signals) -> None:
    seconds = f"61.{os.getpid()}"
    for delay in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", STARTS, seconds],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        with process, process.stdout:
            assert process.stdout.readline() == "starting\n"
            time.sleep(delay / 3000)
            process.send_signal(number)
            assert process.wait(timeout=40) != 0
        assert not sleeping(seconds)


def test_a_signal_that_came_in_between_is_heard_once_it_can_be_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the worst moment: the program runs, and its caller has not been told."""
    started: list[subprocess.Popen[str]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *words: object, **options: object) -> None:
            super().__init__(*words, **options)  # type: ignore[call-overload]
            started.append(self)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(running.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        running.run(Command(("sleep", "60")), timeout=60)
    assert started[0].poll() == -signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_its_time_runs_out() -> None:
    outcome = running.run(Command(("sh", "-c", "echo late; sleep 60")), timeout=0.5)
    assert (outcome.exit_code, outcome.output) == (TIMED_OUT, "late\n")
