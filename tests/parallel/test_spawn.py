"""``--spawn N``: ranks without a launcher, none of which survives the end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.conftest import BIN, ended, run
from tests.parallel.conftest import (
    Start,
    Training,
    assert_bit_equal,
    assert_gone,
    family,
    train,
    until,
)
from tests.terminal import record, screen

SPAWN = (sys.executable, "-m", "hvdtrain.mnist", "--spawn=2", "--strategy=ddp", "--model=small")


def test_it_trains_as_under_mpirun_and_shows_it_on_a_terminal(tmp_path: Path) -> None:
    options = ("--epochs=2", "--precision=fp64")
    under_mpirun = train(
        2, tmp_path / "mpirun", "mnist", "--strategy=ddp", "--model=small", *options
    )
    folder = tmp_path / "spawn"
    files = (f"--summary={folder / 'summary.json'}", f"--checkpoint-dir={folder / 'checkpoints'}")
    seen = record((*SPAWN, *options, *files))
    assert seen.code == 0, seen.text
    spawned = Training(under_mpirun.outcome, folder)
    assert spawned.summary["world_size"] == 2
    assert_bit_equal(under_mpirun, spawned)
    rows = screen(seen.text)
    assert any("2 ranks on 1 host" in row for row in rows)
    assert sum("images/s" in row and "━" in row for row in rows) == 1  # the last frame of the bar
    assert sum(row.startswith("epoch 2 done: loss") for row in rows) == 1


LISTENS = """
import psutil
from hvdtrain.collectives.torch_distributed import TorchDistributed
ranks = TorchDistributed(gpu=False)
ports = psutil.Process().net_connections()
print("listens at", {port.laddr.ip for port in ports if port.status == "LISTEN"}, flush=True)
ranks.wait_for_all()
"""
SPAWNED = f"from hvdtrain.system.runtime.spawn import spawn; spawn(2, ['-c', {LISTENS!r}])"


@pytest.mark.parametrize(
    "command",
    [
        (sys.executable, "-c", SPAWNED),
        (str(BIN / "mpirun"), "--oversubscribe", "-n", "2", sys.executable, "-c", LISTENS),
    ],
)
def test_the_ranks_of_one_host_listen_on_loopback_only(command: tuple[str, ...]) -> None:
    outcome = run([*command], OMPI_MCA_btl="self,sm")  # no TCP of MPI's own
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("listens at {'127.0.0.1'}\n") == 2


def test_wrong_use_is_one_line() -> None:
    outcome = run([*SPAWN], OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="1", code=2)
    (message,) = outcome.err.splitlines()
    assert message.startswith("hvdtrain: error: ")
    assert "mpirun (Open MPI) start" in message


def endless(started: Start, folder: Path) -> subprocess.Popen[str]:
    """Start a training without end, which resumes the previous one."""
    options = ("--quiet", "--epochs=10000", "--checkpoint-every=5", f"--checkpoint-dir={folder}")
    return started(*SPAWN, *options, process_group=0)  # as a shell starts it


def steps(folder: Path) -> set[str]:
    """Return the names of the checkpoints."""
    return {path.name for path in folder.glob("step-*")}


def test_no_process_survives_the_end(started: Start, tmp_path: Path) -> None:
    def ended(stop: Callable[[subprocess.Popen[str]], object]) -> tuple[int, str]:
        """Return code and output of a run that is stopped in the middle of its training."""
        before, process = steps(tmp_path), endless(started, tmp_path)
        until(lambda: steps(tmp_path) - before, process)
        processes = family(process)
        assert len(processes) > 2
        stop(process)
        said, _ = process.communicate(timeout=60)
        assert_gone(processes)
        return process.returncode, said

    code, said = ended(lambda process: process.send_signal(signal.SIGTERM))
    assert (code, "run the same command again" in said) == (75, True), said
    # Ctrl-C comes from the terminal to all of the group.
    code, said = ended(lambda process: os.killpg(process.pid, signal.SIGINT))
    assert (code, "SIGINT" in said) == (75, True), said

    code, said = ended(lambda process: rank_of(process, 1).kill())
    assert code == 128 + signal.SIGKILL
    assert "hvdtrain: rank 1 was ended by SIGKILL" in said.splitlines()
    lost = f"rank 1 on {socket.gethostname()} exited unexpectedly"
    assert lost in said
    assert f"it resumes from {tmp_path}" in said

    code, said = ended(lambda process: process.kill())
    assert (code, said) == (-signal.SIGKILL, "")


def test_ctrl_c_during_the_start_is_handled(started: Start, tmp_path: Path) -> None:
    process = endless(started, tmp_path)
    until(lambda: rank_of(process, 1), process)
    processes = family(process)
    os.killpg(process.pid, signal.SIGINT)
    said = ended(process, 128 + signal.SIGINT, seconds=60)
    assert [line for line in said.splitlines() if line] == [
        "hvdtrain: SIGINT: stopped before its first step: there is no checkpoint yet"
    ]
    assert_gone(processes)


def rank_of(process: subprocess.Popen[str], rank: int) -> psutil.Process | None:
    """Return the process of a rank, if it has been started."""
    for child in psutil.Process(process.pid).children():
        try:
            if child.environ().get("RANK") == str(rank):
                return child
        except psutil.Error:
            continue
    return None
