"""Signals that ask to stop. In a process of its own: handlers would outlive the test."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import time
from hvdtrain.training.preemption import on_stop_signal
stops = []
on_stop_signal(lambda: stops.append(1))
print("ready", flush=True)
for _ in range(3000):  # half a minute
    time.sleep(0.01)
    if stops:
        stops.pop()  # before it is told: the next signal must not be lost
        print("asked", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_asks_and_does_not_kill(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
            assert process.stdout.readline() == "asked\n"
            process.send_signal(number)
            if number == signal.SIGINT:  # the second one is meant
                assert process.wait(timeout=20) != 0
            else:  # a batch system may send it twice
                assert process.stdout.readline() == "asked\n"
                assert process.poll() is None
        finally:
            process.kill()
