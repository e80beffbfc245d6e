"""Following a job: its states, the lines of its log, its exit code."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest

from hvdtrain.batch import chain, follow
from hvdtrain.batch.dialect import ENDED, RUNNING, WAITING, Query, State
from hvdtrain.batch.follow import Ended, Tail
from hvdtrain.batch.local import Local
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.run import Command


class Folder(Local):
    """Jobs whose next states stand in a file each; asking for one makes it happen.

    A line is the phase, the exit code or ``-``, and what the job then writes to its log, without a
    newline where it ends in ``...``.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def add(self, job: str, *lines: str) -> None:
        (self.directory / job).write_text("".join(f"{line}\n" for line in lines))

    def queries(self, job_id: str) -> Sequence[Query]:
        file = self.directory / job_id

        def read(output: str) -> State | None:
            first, _, rest = output.partition("\n")
            file.write_text(rest)
            phase, code, *words = first.split()
            text = " ".join(words)
            log = self.directory / f"{job_id}.log"
            if text:
                with log.open("a") as lines:
                    lines.write(text[:-3] if text.endswith("...") else text + "\n")
            return State(phase, phase, None if code == "-" else int(code), (log,))

        return (Query(Command(("cat", str(file))), read),)

    def delete(self, job_ids: Sequence[str]) -> Command:
        return Command(("rm", *job_ids))


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A batch system in which no one has to wait."""
    for name in ("LOOK", "ASK_FIRST", "ASK_LAST", "DELIVERY"):
        monkeypatch.setattr(follow, name, 0.001)
    return Folder(tmp_path)


def test_a_job_from_start_to_end(jobs: Folder, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    jobs.add(
        "7",
        f"{WAITING} -",
        f"{WAITING} -",
        f"{RUNNING} - one",
        f"{RUNNING} - half a line...",
        f"{RUNNING} -  of it",
        f"{ENDED} 3 no newline...",
    )
    out = io.StringIO()
    assert follow.follow(jobs, ["7"], None, out) == Ended(ENDED, 3)
    assert out.getvalue() == "one\nhalf a lineof it\nno newline"
    assert caplog.messages == ["job 7: waiting", "job 7: running", "job 7: ended, exit code 3"]


def test_ctrl_c_ends_the_following_only(
    jobs: Folder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")

    def press(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(follow.time, "sleep", press)
    jobs.add("7", f"{RUNNING} - one")
    out = io.StringIO()
    assert follow.follow(jobs, ["7", "8"], None, out) == Ended("running", 130)
    assert out.getvalue() == "one\n"
    assert caplog.messages[-1] == "\njob 7 goes on; to end it: rm 7 8"


def test_a_batch_system_that_no_longer_answers(jobs: Folder) -> None:
    with pytest.raises(HvdtrainError, match=r"nobody can tell how job 7 stands: cat: .*No such"):
        follow.follow(jobs, ["7"], None, io.StringIO())


def test_an_exit_code_that_nobody_knows(jobs: Folder) -> None:
    jobs.add("7", f"{ENDED} - done")
    with pytest.raises(HvdtrainError, match=r"does not tell with which exit code; see .*/7\.log"):
        follow.follow(jobs, ["7"], None, io.StringIO())


def test_a_chain_is_followed_to_its_end(jobs: Folder, tmp_path: Path) -> None:
    file = tmp_path / "chain"
    jobs.add("1", f"{ENDED} 75 first")
    jobs.add("2", f"{ENDED} 0 second")
    jobs.add("3", f"{ENDED} 0 third")
    out = io.StringIO()
    assert follow.follow(jobs, ["1", "2", "3"], file, out) == Ended(ENDED, 0)
    assert out.getvalue() == "first\nsecond\nthird\n"

    chain.write(file, event="over", job="2.server", why="finished")  # the third has no say
    jobs.add("1", f"{ENDED} 75 again")
    jobs.add("2", f"{ENDED} 3 again")
    out = io.StringIO()
    assert follow.follow(jobs, ["1", "2", "3"], file, out).code == 3


def test_a_log_that_is_not_there_yet(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    assert tail.new() == ""
    tail.path.write_bytes(b"\xff one\ntwo")
    assert tail.new() == "\ufffd one\n"
    assert tail.new() == ""
    assert tail.new(all_of_it=True) == "two"
