"""Ranks in threads, and an environment without a launcher."""

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
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.system.runtime.detect import LAUNCHERS, TORCHRUN_MARK

# No deadline, as cores are shared; no database, and other files in /tmp, to leave nothing behind.
settings.register_profile(
    "hvdtrain",
    deadline=None,
    database=None,
    max_examples=100,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("hvdtrain")
HOME = tempfile.TemporaryDirectory(prefix="hypothesis-")  # removed when the process ends
configuration.set_hypothesis_home_dir(Path(HOME.name))

LAUNCHER_VARIABLES = {
    *(
        name
        for entry in LAUNCHERS
        for name in (entry.rank, entry.size, entry.local_rank, entry.local_size)
    ),
    TORCHRUN_MARK,
    "SLURM_STEP_ID",
}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES & set(os.environ):
        monkeypatch.delenv(name)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run ``hvdtrain`` with invalid arguments; check exit code 2 and return the one-line error."""

    def refuse(*words: str) -> str:
        assert cli.main(words) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1), err
        return err

    return refuse


@pytest.fixture
def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Redirect standard output to a terminal with a number of columns."""
    controller, device = pty.openpty()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with os.fdopen(device, "w") as screen:

        def give(columns: int) -> None:
            monkeypatch.setattr(sys, "stdout", screen)
            monkeypatch.setenv("COLUMNS", str(columns))  # takes precedence over the device's size

        yield give
        monkeypatch.undo()
    os.close(controller)


class Meeting:
    """Exchange of data between the threads that act as ranks."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.slots: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        gathered = list(self.slots)
        self.barrier.wait()
        return gathered


class ThreadCommunicator(Communicator):
    """Communicator of a rank that is a thread."""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        self.rank, self.size, self.meeting = rank, size, meeting

    def gather(self, data: bytes) -> list[bytes]:
        assert isinstance(data, bytes)
        return self.meeting.exchange(self.rank, data)

    def broadcast(self, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        gathered = self.meeting.exchange(self.rank, data.copy())
        assert len({len(each) for each in gathered}) == 1, "ranks disagree about the length"
        return gathered[0]

    def sum(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        gathered = self.meeting.exchange(self.rank, values.copy())
        return np.sum(gathered, axis=0)

    def tensor(self, length: int, value: float) -> np.ndarray[Any, Any]:
        return np.full(length, value, np.float32)

    def sum_tensor(self, tensor: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
        gathered = self.meeting.exchange(self.rank, (name, tensor.copy()))
        assert len({sum_name for sum_name, _ in gathered}) == 1, "ranks sum different tensors"
        return np.sum([values for _, values in gathered], axis=0)


OnRanks = Callable[[int, Callable[[Communicator], Any]], list[Any]]


def run_on_ranks(size: int, action: Callable[[Communicator], Any]) -> list[Any]:
    """Return the results of ``action`` on ``size`` ranks, or the errors it raises."""
    meeting = Meeting(size)
    outcomes: list[Any] = [None] * size

    def act(rank: int) -> None:
        try:
            outcomes[rank] = action(ThreadCommunicator(rank, size, meeting))
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=act, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return outcomes


@pytest.fixture
def on_ranks() -> OnRanks:
    """Return a function that calls a function on each rank, in threads, with a communicator."""
    return run_on_ranks


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The writing thread stands still until this is set, as if the disk were slow."""
    opened, writer = threading.Event(), checkpoints.Writer

    def late(*arguments: Any) -> Any:
        assert opened.wait(60)
        return writer(*arguments)

    monkeypatch.setattr(checkpoints, "Writer", late)
    return opened
