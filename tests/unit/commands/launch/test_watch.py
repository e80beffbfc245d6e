"""The output of a job on its way to the reader."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.commands.launch.watch import DRAIN, write_all
from tests.conftest import environment, executable, until


def test_a_pipe_that_does_not_block_gets_every_byte() -> None:
    source, target = os.pipe()
    os.set_blocking(target, False)
    text = os.urandom(300_000)  # more than a pipe holds
    writer = threading.Thread(target=write_all, args=(target, text))
    writer.start()
    time.sleep(0.2)  # the pipe is full
    with os.fdopen(source, "rb") as reader, os.fdopen(target, "wb"):
        assert reader.read(len(text)) == text
    writer.join()


def test_output_is_dropped_if_its_reader_is_gone() -> None:
    source, target = os.pipe()
    os.set_blocking(target, False)
    writer = threading.Thread(target=write_all, args=(target, bytes(300_000)))
    writer.start()
    time.sleep(0.2)
    os.close(source)
    writer.join(10)
    assert not writer.is_alive()
    os.close(target)


# The launcher writes more than the pipe to the reader holds, and ends.
MPIRUN = """#!/bin/sh
[ "$1" = --version ] && exec echo "mpirun (Open MPI) 5.0.11"
seq 1 20000
echo > "${0%/*}/ended"
"""


@pytest.fixture
def ended(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A launch whose mpirun has ended, and whose output nobody has read."""
    executable(tmp_path / "mpirun", MPIRUN)
    with subprocess.Popen(
        [sys.executable, "-m", "hvdtrain.cli", "launch", "-n", "1", "--", "true"],
        env=environment(PATH=f"{tmp_path}:{os.environ['PATH']}"),
        stdout=subprocess.PIPE,
    ) as process:
        until((tmp_path / "ended").exists)
        yield process
        process.kill()


def test_a_reader_may_pause(ended: subprocess.Popen[bytes]) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        ended.wait(DRAIN + 3)
    output, _ = ended.communicate(timeout=20)
    assert output.split() == [b"%d" % number for number in range(1, 20_001)]
    assert ended.returncode == 0


def test_ctrl_c_ends_the_wait_for_a_reader(ended: subprocess.Popen[bytes]) -> None:
    ended.send_signal(signal.SIGINT)
    assert ended.wait(DRAIN - 1) == 130
