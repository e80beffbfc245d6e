"""``hvd.elastic`` of hvdtrain.keras: ranks that are killed, slots that come, and no elastic job."""

from __future__ import annotations

import random
import re
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import BIN, LONG, begin, end_session, on_demand, run
from tests.parallel import resident
from tests.parallel.test_launch import until

SCRIPT = str(Path(__file__).parent / "scripts" / "keras_elastic.py")
LAUNCH = [str(BIN / "hvdtrain"), "launch", "--elastic"]


class Job:
    """The script under --elastic, its ranks, and its commits."""

    def __init__(self, folder: Path, *options: str, slots: tuple[str, ...]) -> None:
        self.saved, self.done = folder / "commits", folder / "done"
        words = [sys.executable, SCRIPT, f"--directory={self.saved}", f"--done={self.done}"]
        self.process = begin([*LAUNCH, *slots, "--", *words, *options], start_new_session=True)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        end_session(self.process.pid)

    def has_committed(self, times: int = 1) -> None:
        """Wait for so many commits."""
        until(lambda: self.newest() >= times, self.process)

    def newest(self) -> int:
        """The number of the newest commit; 0: there is none."""
        found = [re.findall(r"\d+", one.name) for one in self.saved.glob("step-*")]
        return max((int(one[0]) for one in found), default=0)

    def kill(self, rank: str) -> None:
        """Kill a rank, not the worker that starts it."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            words = process.cmdline()
            own = SCRIPT in words and "hvdtrain.commands.launch.host_process" not in words
            if own and process.environ().get("HOROVOD_RANK") == rank:
                return process.kill()
        raise AssertionError(f"there is no rank {rank}")

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and all that was said."""
        said, _ = self.process.communicate(timeout=150)
        return self.process.returncode, said


def begun(said: str) -> list[tuple[int, int, int]]:
    """Epoch, batch and number of ranks of each start, as rank 0 and the others tell them."""
    found = re.findall(r"begin at epoch (\d+), batch (\d+), (\d+) ranks", said)
    return list(dict.fromkeys((int(a), int(b), int(c)) for a, b, c in found))


@pytest.mark.parametrize("number", range(6 if LONG else 1))
def test_a_rank_that_is_killed(number: int, tmp_path: Path) -> None:
    """Each batch is trained on once after the last commit: the script compares the weights."""
    size, chance = 2 + number % 2, random.Random(number)
    options = [
        f"--epochs={4 if LONG else 2}",
        "--pause=0.1",
        f"--every={1 + number % 3}",
        *(["--relative"] * (number % 2)),
    ]
    with Job(tmp_path, *options, slots=(f"--min={size}", f"--max={size}")) as job:
        job.has_committed(3)
        time.sleep(LONG * chance.random())
        job.kill(str(chance.randrange(size)))
        code, said = job.end()
    assert code == 0, said
    assert "was ended by SIGKILL" in said
    assert begun(said)[0] == (0, 0, size)
    assert len(begun(said)) == 2, said
    assert job.done.exists()


@on_demand
def test_a_slot_that_joins_and_a_stop(tmp_path: Path) -> None:
    """Two ranks go on within the epoch of one, and nothing is lost; so does the same command."""
    there, script = tmp_path / "hosts", tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {there}\n")
    script.chmod(0o755)
    there.write_text("localhost:1\n")
    slots = ("--min=1", "--max=3", f"--discovery={script}")
    with Job(tmp_path, "--pause=0.3", "--every=1", slots=slots) as job:
        job.has_committed(3)
        there.write_text("localhost:1\n127.0.0.1:1\n")
        until(lambda: job.newest() >= 1 and "2" in _sizes(job), job.process)
        before = job.newest()
        until(lambda: job.newest() > before, job.process)
        job.process.terminate()
        code, said = job.end()
    assert code == 75, said
    assert "the hosts have changed: committed" in said
    assert not job.done.exists()
    with Job(tmp_path, "--every=1", slots=("--min=3", "--max=3")) as job:
        code, said = job.end()
    assert code == 0, said
    assert begun(said)[0][2] == 3
    assert job.done.exists()


def _sizes(job: Job) -> set[str]:
    found = set()
    for process in psutil.Process(job.process.pid).children(recursive=True):
        try:
            found.add(process.environ().get("HOROVOD_SIZE", ""))
        except psutil.Error:
            continue
    return found


def test_without_an_elastic_job_it_is_a_plain_training(tmp_path: Path) -> None:
    """No file is written, nor a directory needed."""
    outcome = resident.ranks(2, SCRIPT, f"--done={tmp_path / 'done'}", framework="tensorflow")
    assert outcome.code == 0, outcome.err[-3000:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["done"]


@on_demand
def test_without_a_directory_one_line_says_so(tmp_path: Path) -> None:
    words = ["--min=2", "--max=2", "--", sys.executable, SCRIPT, f"--done={tmp_path / 'done'}"]
    outcome = run([*LAUNCH, *words])
    assert outcome.code != 0
    assert 'UsageError: KerasState: specify directory="checkpoints"' in outcome.err
