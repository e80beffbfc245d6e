"""Signals that ask to stop. In a process of its own: handlers would outlive the test."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.adapters.preemption import Preemption, wait_for_agent
from hvdtrain.collectives.base import Communicator

PROGRAM = """
import time
from hvdtrain.adapters.preemption import on_stop_signal
stops = []
on_stop_signal(stops.append)
print("ready", flush=True)
for _ in range(3000):  # half a minute
    time.sleep(0.01)
    if stops:
        why = stops.pop()  # before it is told: the next signal must not be lost
        print("asked by", why, flush=True)
"""


def started(*words: str) -> subprocess.Popen[str]:
    """Start a program, and return it when it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG, signal.SIGINT]
)
def test_a_signal_asks_and_does_not_kill(number: signal.Signals) -> None:
    with started(PROGRAM) as process:
        try:
            assert process.stdout is not None
            process.send_signal(number)
            assert process.stdout.readline() == f"asked by {number.name}\n"
            process.send_signal(number)
            if number == signal.SIGINT:  # the second one is meant
                assert process.wait(timeout=20) != 0
            else:  # a batch system may send it twice
                assert process.stdout.readline() == f"asked by {number.name}\n"
                assert process.poll() is None
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        (("", "", ""), ("", 0)),
        (("", "SIGTERM", "SIGINT"), ("SIGTERM", 1)),
    ],
)
def test_all_ranks_agree_on_a_reason_and_its_first_rank(
    on_ranks: Any, reasons: tuple[str, ...], expected: tuple[str, int]
) -> None:
    def agree(communicator: Communicator) -> tuple[str, int]:
        preemption = Preemption(communicator)
        preemption.reason = reasons[communicator.rank]
        return preemption.agree()

    assert on_ranks(3, agree) == [expected] * 3


START = """
import sys, time
from pathlib import Path
from hvdtrain.adapters.preemption import leave_on_signal
leave_on_signal(Path(sys.argv[1]), resumes=sys.argv[2] == "resumes")
print("ready", flush=True)
for _ in range(3000):  # one long sleep would begin after the signal now and then, and not end
    time.sleep(0.02)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG])
@pytest.mark.parametrize("case", ["resumes", "begins anew", "has none"])
def test_a_signal_before_the_first_step(number: signal.Signals, case: str, tmp_path: Path) -> None:
    if case != "has none":
        (tmp_path / "step-000000012").mkdir()
    with started(START, str(tmp_path), case) as process:
        process.send_signal(number)
        _, message = process.communicate(timeout=60)
    if case == "resumes":
        there = f"{tmp_path}/step-000000012 exists: run the same command again to continue"
        assert message == f"hvdtrain: {number.name}: stopped before its first step; {there}\n"
        assert process.returncode == 75
    else:
        there = "there is no checkpoint yet"
        assert message == f"hvdtrain: {number.name}: stopped before its first step: {there}\n"
        assert process.returncode == 128 + number


def test_a_rank_waits_for_its_agent_if_it_would_be_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = iter((False, False, True))
    wait_for_agent(lambda: pytest.fail("nobody starts it anew"))
    for name, value in (("RUN_ID", "1"), ("MAX_RESTARTS", "1")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    wait_for_agent(lambda: next(requests))
    assert list(requests) == []
