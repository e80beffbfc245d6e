"""The outcome of a job if the launcher's exit code is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.commands.launch.outcome import JobOutcome
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.runtime.exit import _write_mark
from tests.conftest import run

# As Open MPI 5.0.11 writes them.
RULE = b"-" * 74 + b"\n"
LOST = (
    RULE + b"PRTE has lost communication with a remote daemon.\n\n"
    b"  HNP daemon   : [prterun-node1-6568@0,0] on node node1\n"
    b"  Remote daemon: [prterun-node1-6568@0,1] on node node2\n\n"
    b"This is usually due to either a failure of the TCP network\n" + RULE
)
NOT_BACK = (
    b"-" * 60 + b"\nA daemon failed to report back after being spawned. This could\n"
    b"be due to several factors, including inability to find the\n"
    b"daemon executable, or the executable was unable to find its\n"
    b"required supporting libraries. In some cases, the daemon was\n"
    b"able to execute, but was unable to complete a TCP connection\n"
    b"back to prterun:\n\n"
    b"  Local host:    node1\n  Remote host:   node2\n  Daemon exit status: 0\n"
)


@pytest.fixture
def outcome() -> Iterator[JobOutcome]:
    """The outcome of a running job."""
    with JobOutcome() as outcome:
        yield outcome


def run_rank_0(outcome: JobOutcome, end: str) -> None:
    """Run a rank 0 that leaves its mark, then ``end``."""
    begin = "from hvdtrain.system.runtime import exit; exit.write_end_mark(); "
    run([sys.executable, "-c", begin + end], **outcome.environment)


@pytest.mark.parametrize("text", [LOST, NOT_BACK])
@pytest.mark.parametrize("length", [1, 100, 5000])
def test_a_lost_host_is_no_success(text: bytes, length: int, outcome: JobOutcome) -> None:
    stream = b"a warning\n" * 200 + text + b"last words of the ranks\n" * 200
    for start in range(0, len(stream), length):
        outcome.read(2, stream[start : start + length])
    assert outcome.lost_host == "node2"
    for code in (0, 255):
        message = f"host node2 was lost .*: {code}.*[Nn]o checkpoint"
        with pytest.raises(HvdtrainError, match=message) as error:
            outcome.exit_code(code, None, stop_requested=False)
        assert error.value.exit_code == 1


def test_a_host_that_does_not_exist_is_wrong_use(outcome: JobOutcome) -> None:
    outcome.read(1, NOT_BACK)
    outcome.read(2, b"ssh: Could not resolve hostname nodeB: Name or service not known\r\n")
    outcome.read(2, b"ssh: Could not resolve hostname nodeA: Temporary failure\n")
    with pytest.raises(UsageError, match=r"^nodeA, nodeB: no such host$"):
        outcome.exit_code(255, None, stop_requested=False)


def test_the_newest_checkpoint_is_named(outcome: JobOutcome, tmp_path: Path) -> None:
    for step in (9, 10):
        (tmp_path / f"step-{step:09}").mkdir()
    outcome.read(2, LOST)
    with pytest.raises(HvdtrainError, match=f"{tmp_path}/step-000000010"):
        outcome.exit_code(0, tmp_path, stop_requested=True)


@pytest.mark.parametrize("code", [0, 1, 137, 75])
def test_any_other_exit_code_is_the_launchers(code: int, outcome: JobOutcome) -> None:
    outcome.read(2, b"[node1:1] a rank's own words\n" * 100)
    assert outcome.exit_code(code, None, stop_requested=False) == code
    if code:
        outcome.read(2, LOST)  # a rank has reported why it ends
        assert outcome.exit_code(code, None, stop_requested=False) == code


@pytest.mark.parametrize(
    ("end", "mark"),
    [
        ("", 0),
        ("exit.leave(0)", 0),
        ("exit.leave(75)", 75),
        ("exit.leave(3)", 3),
        ("raise KeyError", 1),
        ("import os; os._exit(0)", 1),  # as if it is killed
        ("import os, sys; os.fork() or sys.exit(0); os.wait(); os._exit(0)", 1),
    ],
)
def test_rank_0_leaves_its_mark(end: str, mark: int, outcome: JobOutcome) -> None:
    run_rank_0(outcome, end)
    assert outcome.mark == mark
    if mark:
        with pytest.raises(HvdtrainError, match="rank 0 ended early"):
            outcome.exit_code(0, None, stop_requested=False)
    else:
        assert outcome.exit_code(0, None, stop_requested=False) == 0
    assert outcome.exit_code(9, None, stop_requested=False) == 9


def test_all_ranks_have_saved_though_a_host_was_lost(outcome: JobOutcome) -> None:
    """TERM to all processes of a job, including the ssh to the other host."""
    run_rank_0(outcome, "exit.leave(75)")
    outcome.read(2, NOT_BACK)
    assert outcome.exit_code(0, None, stop_requested=True) == 75
    with pytest.raises(HvdtrainError, match="host node2 was lost"):  # mpirun itself ended them
        outcome.exit_code(0, None, stop_requested=False)


def test_no_file_of_another_process_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another host the process id of launch may be that of any process."""
    with (tmp_path / "log").open("w+") as file:
        file.write("important\n")
        file.flush()
        path = f"/proc/self/fd/{file.fileno()}"
        _write_mark(path, 1)
        _write_mark("/proc/0/fd/9", 1)
    assert (tmp_path / "log").read_text() == "important\n"
