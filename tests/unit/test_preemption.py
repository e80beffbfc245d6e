"""Signals that ask to stop. In a process of its own: handlers would outlive the test."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from hvdtrain.training.preemption import FIRST_SAVE, RESERVE, Walltime

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


def test_without_a_walltime_nothing_ends() -> None:
    assert not Walltime(ends=None).is_near(longest_step=1e9)


@pytest.mark.parametrize("step", [0.0, 3.0, 500.0])
@pytest.mark.parametrize("save", [0.5, FIRST_SAVE, 90.0])
def test_a_training_stops_two_steps_and_two_saves_before_the_end(step: float, save: float) -> None:
    needed = RESERVE + 2 * step + 2 * max(save, FIRST_SAVE)
    for spare, near in ((5.0, False), (-5.0, True)):
        walltime = Walltime(ends=time.time() + needed + spare)
        walltime.saved(save)
        assert walltime.is_near(step) is near
