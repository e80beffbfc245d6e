"""Several ranks in threads, and an environment in which no launcher has started the tests."""

from __future__ import annotations

import os
import pty
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, configuration, settings

from hvdtrain import cli
from hvdtrain.collectives.base import Communicator
from hvdtrain.system.runtime.detect import LAUNCHERS, TORCHRUN_MARK

# No deadline: the cores are shared. No database, and the rest below /tmp: nothing is left behind.
settings.register_profile(
    "hvdtrain",
    deadline=None,
    database=None,
    max_examples=100,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("hvdtrain")
HOME = tempfile.TemporaryDirectory(prefix="hypothesis-")  # goes when the process ends
configuration.set_hypothesis_home_dir(Path(HOME.name))

LAUNCHER_VARIABLES = {
    *(name for one in LAUNCHERS for name in (one.rank, one.size, one.local_rank, one.local_size)),
    TORCHRUN_MARK,
    "SLURM_STEP_ID",
}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES & set(os.environ):
        monkeypatch.delenv(name)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Give ``hvdtrain`` words that it refuses: exit code 2, and one line, which is returned."""

    def refuse(*words: str) -> str:
        assert cli.main(words) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1), err
        return err

    return refuse


@pytest.fixture
def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Give standard output to a terminal of so many columns."""
    ours, its = pty.openpty()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with os.fdopen(its, "w") as screen:

        def give(columns: int) -> None:
            monkeypatch.setattr(sys, "stdout", screen)
            monkeypatch.setenv("COLUMNS", str(columns))  # which counts before the device's own

        yield give
        monkeypatch.undo()
    os.close(ours)


class Meeting:
    """Where the threads that play the ranks exchange what they hold."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.slots: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        everyone = list(self.slots)
        self.barrier.wait()
        return everyone


class ThreadCommunicator(Communicator):
    """A rank that is a thread."""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        self.rank, self.size, self.meeting = rank, size, meeting

    def gather(self, data: bytes) -> list[bytes]:
        assert isinstance(data, bytes)
        return self.meeting.exchange(self.rank, data)

    def broadcast(self, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        everyone = self.meeting.exchange(self.rank, data.copy())
        assert len({len(one) for one in everyone}) == 1, "ranks disagree about the length"
        return everyone[0]

    def sum(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        everyone = self.meeting.exchange(self.rank, values.copy())
        return np.sum(everyone, axis=0)

    def tensor(self, length: int, value: float) -> np.ndarray[Any, Any]:
        return np.full(length, value, np.float32)

    def sum_tensor(self, tensor: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
        everyone = self.meeting.exchange(self.rank, (name, tensor.copy()))
        assert len({one for one, _ in everyone}) == 1, "ranks sum different tensors"
        return np.sum([values for _, values in everyone], axis=0)


OnRanks = Callable[[int, Callable[[Communicator], Any]], list[Any]]


def run_on_ranks(size: int, action: Callable[[Communicator], Any]) -> list[Any]:
    """What ``action`` returns, or raises, on each of ``size`` ranks."""
    meeting = Meeting(size)
    outcomes: list[Any] = [None] * size

    def play(rank: int) -> None:
        try:
            outcomes[rank] = action(ThreadCommunicator(rank, size, meeting))
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return outcomes


@pytest.fixture
def on_ranks() -> OnRanks:
    """Call a function once for each rank, in threads, with a communicator."""
    return run_on_ranks
