"""Ranks started by ``--spawn``: their environment, signals and exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from hvdtrain.errors import EXIT_PREEMPTED, UsageError
from hvdtrain.system.runtime.detect import SINGLE_RANK, SPAWN, LaunchInfo, detect
from hvdtrain.system.runtime.spawn import check_no_launcher, join, spawn
from tests.conftest import run as run_program

RANK = """
import json, os, pathlib, signal, sys, time
from hvdtrain.system.runtime import spawn
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
spawn.join()
rank = int(os.environ["RANK"])
"""


@pytest.fixture(autouse=True)
def of_unmeasured_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run ranks without coverage, as in ``unmeasured`` in tests/conftest.py."""
    for name in [name for name in os.environ if name.startswith("COVERAGE_")]:
        monkeypatch.delenv(name)


def run(size: int, program: str) -> int:
    return spawn(size, ["-c", RANK + program])


@pytest.mark.parametrize("setup", ["true", "ip link set lo up; ip addr del 127.0.0.1/8 dev lo"])
def test_a_host_without_loopback_is_wrong_use(setup: str) -> None:
    if run_program(["unshare", "--net", "true"]).code:
        pytest.skip("needs root, for a network namespace")
    program = "from hvdtrain.system.runtime.spawn import spawn; spawn(2, ['-c', ''])"
    shell = f'{setup}; exec {sys.executable} -c "{program}"'
    outcome = run_program(["unshare", "--net", "sh", "-c", shell], timeout=60)
    assert "UsageError: --spawn: 127.0.0.1: " in outcome.err.splitlines()[-1], outcome.err


@pytest.mark.parametrize("size", [1, 3])
def test_the_environment_of_the_ranks(size: int, tmp_path: Path) -> None:
    file = f"pathlib.Path({str(tmp_path)!r}, str(rank))"
    assert run(size, f"{file}.write_text(json.dumps(dict(os.environ)))") == 0
    environs = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(size)]
    assert [detect(environ) for environ in environs] == [
        LaunchInfo(SPAWN, rank, size, rank, size) for rank in range(size)
    ]
    assert len({(environ["MASTER_ADDR"], environ["MASTER_PORT"]) for environ in environs}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(rank) for rank in range(size)]


@pytest.mark.parametrize("first", [0, 2])
def test_the_first_rank_to_fail_ends_the_others(first: int) -> None:
    assert run(3, f"sys.exit(7) if rank == {first} else time.sleep(300)") == 7


@pytest.mark.parametrize(("seconds", "other"), [(0, "time.sleep(300)"), (0.3, "sys.exit(1)")])
def test_a_killed_rank_is_reported(
    seconds: float, other: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also if another rank detects its loss before the kernel has freed its memory."""
    killed = f"(time.sleep({seconds}), os.kill(os.getpid(), 9))"
    assert run(2, f"{killed} if rank == 0 else {other}") == 128 + signal.SIGKILL
    assert capfd.readouterr().err == "hvdtrain: rank 0 was ended by SIGKILL\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_is_forwarded(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # under nohup HUP is ignored
    try:
        ask = f"os.kill(os.getppid(), {int(number)}) if rank == 0 else None"
        assert run(2, f"{ask}; time.sleep(300)") == EXIT_PREEMPTED
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_second_interrupt_kills_ranks_that_ignore_the_first() -> None:
    deaf = "signal.signal(signal.SIGUSR1, signal.SIG_IGN)"
    ask = "[(os.kill(os.getppid(), 2), time.sleep(0.2)) for _ in range(2)]"
    assert run(1, f"{deaf}; {ask}; time.sleep(300)") == 128 + signal.SIGINT


def test_a_rank_without_its_parent_ends() -> None:
    """Its parent has already ended, so that it has another parent process."""
    parent = str(os.getpid() + 1)
    child = os.fork()
    if not child:
        join({"HVDTRAIN_SPAWNED_BY": parent, "RANK": "0", "WORLD_SIZE": "1"})
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_join_does_nothing_in_other_processes() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    join({})
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_spawn_under_a_launcher_is_reported() -> None:
    check_no_launcher({})
    assert detect({}) == SINGLE_RANK
    with pytest.raises(UsageError, match=r"--spawn .* mpirun \(Open MPI\)"):
        check_no_launcher({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"})
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    check_no_launcher(step)  # may be the shell of `srun --pty`
    with pytest.raises(UsageError, match=r"--spawn .* srun started"):
        check_no_launcher({**step, "SLURM_STEP_NUM_TASKS": "2"})
