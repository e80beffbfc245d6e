"""``hvdtrain launch --elastic``: ranks that are killed, slots that come and go, and a stop."""

from __future__ import annotations

import contextlib
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvdtrain.commands.launch.elastic_driver import assign_ranks, choose_slots
from tests.conftest import BIN, LONG, begin, end_session, on_demand, run
from tests.parallel.conftest import show_seconds_lost, until

HOST_PROCESS = "hvdtrain.commands.launch.host_process"
LAUNCH = [str(BIN / "hvdtrain"), "launch", "--elastic"]
TRAIN = ["--", sys.executable, "-m", "hvdtrain.mnist", "--model=small", "--epochs=400"]
BATCH, STEPS = 125, 60  # five epochs of 1,500 samples, whatever the number of ranks
EVERY = 5  # steps between two checkpoints


class Job:
    """A training under --elastic, its ranks, and what it leaves behind."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.saved, self.file = folder / "checkpoints", folder / "summary.json"
        files = [f"--checkpoint-dir={self.saved}", f"--summary={self.file}"]
        files += [f"--checkpoint-every={EVERY}", f"--global-batch-size={BATCH}"]
        self.process = begin([*LAUNCH, *options, *files], start_new_session=True)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        end_session(self.process.pid)

    def has_saved(self) -> None:
        """Wait for the first checkpoint."""
        until(lambda: list(self.saved.glob("step-*")), self.process)

    def ranks(self) -> dict[str, psutil.Process]:
        """The processes that train, by rank."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it ends just now
                words = process.cmdline()
                if (
                    "hvdtrain.mnist" in words
                    and "hvdtrain.commands.launch.host_process" not in words
                ):
                    found[process.environ().get("HOROVOD_RANK", "")] = process
        found.pop("", None)  # the launcher's, before it becomes the discovery script
        return found

    def world_size(self) -> int:
        """How many ranks there are, as they themselves were told."""
        with contextlib.suppress(psutil.Error):
            sizes = [int(rank.environ()["HOROVOD_SIZE"]) for rank in self.ranks().values()]
            return len(sizes) if sizes == [len(sizes)] * len(sizes) else 0
        return 0

    def newest(self) -> int:
        """The step of the newest checkpoint."""
        return max(int(re.findall(r"\d+", one.name)[0]) for one in self.saved.glob("step-*"))

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and all that was said. Nobody is left."""
        said, _ = self.process.communicate(timeout=150)
        mine = f"--summary={self.file}"
        lines = [one.info["cmdline"] or () for one in psutil.process_iter(["cmdline"])]
        assert not [line for line in lines if mine in line]
        return self.process.returncode, said

    @property
    def summary(self) -> dict[str, Any]:
        """The JSON of --summary."""
        found: dict[str, Any] = json.loads(self.file.read_text())
        return found


@pytest.mark.parametrize("number", range(10 if LONG else 1))
def test_a_rank_that_is_killed(number: int, tmp_path: Path) -> None:
    size, chance = (2 + number % 2) if LONG else 2, random.Random(number)
    framework = f"--framework={'tensorflow' if number % 5 == 4 else 'pytorch'}"
    line = [f"--min={size}", f"--max={size}", *TRAIN, f"--num-steps={STEPS}", framework]
    with Job(tmp_path, *line) as job:
        job.has_saved()
        time.sleep(LONG * chance.random() / 2)
        job.ranks()[str(chance.randrange(size))].kill()
        show_seconds_lost(f"Horovod, {framework[12:]}, a rank killed", job.saved, job.process)
        code, said = job.end()
    assert code == 0, said
    lost = re.search(r", step (\d+): rank \d on .* resume from \S*/step-(\d+)", said)
    assert lost, said
    assert 0 <= int(lost[1]) - int(lost[2]) <= EVERY
    assert "was ended by SIGKILL" in said
    assert job.summary["world_size"] == size
    assert (job.summary["stopped"], job.summary["steps_completed"]) == ("steps", STEPS)
    assert job.summary["samples_trained"] == STEPS * BATCH == 5 * 1500  # each of each epoch once


@on_demand
def test_a_rank_that_is_killed_while_all_connect(tmp_path: Path) -> None:
    """The others wait for it within Horovod, where they hear nothing; their workers start them."""
    with Job(tmp_path, "--min=2", "--max=2", *TRAIN, f"--num-steps={STEPS}") as job:
        until(lambda: job.world_size() == 2, job.process)
        time.sleep(1)
        job.ranks()["1"].kill()
        code, said = job.end()
    assert code == 0, said
    assert (job.summary["world_size"], job.summary["steps_completed"]) == (2, STEPS)
    assert job.summary["samples_trained"] == STEPS * BATCH


def test_a_slot_that_joins_and_a_stop(tmp_path: Path) -> None:
    there, script = tmp_path / "hosts", tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {there}\n")
    script.chmod(0o755)
    there.write_text("localhost:1\n")
    with Job(tmp_path, "--min=1", "--max=3", f"--discovery={script}", *TRAIN) as job:
        job.has_saved()
        assert job.world_size() == 1
        there.write_text("localhost:1\n127.0.0.1:1\n")
        until(lambda: job.world_size() == 2, job.process)
        before = job.newest()
        until(lambda: job.newest() > before, job.process)
        if LONG:
            there.write_text("127.0.0.1:1\n")
            until(lambda: job.world_size() == 1, job.process)
            before = job.newest()
            until(lambda: job.newest() > before, job.process)
        job.process.terminate()
        code, said = job.end()
    assert code == 75, said
    assert job.summary["stopped"] == "preempted"
    assert job.summary["world_size"] == (1 if LONG else 2)
    assert job.summary["samples_trained"] == job.summary["steps_completed"] * BATCH
    stops = re.findall(r"stopped after step (\d+), saved", said)
    assert re.findall(r"resumed from .*: step (\d+),", said) == stops[:-1]  # nothing is lost


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "without --checkpoint-dir"),
        (("--checkpoint-dir=.", "--strategy=ddp"), "--strategy ddp"),
    ],
)
def test_what_cannot_go_on_is_refused(options: tuple[str, ...], message: str) -> None:
    outcome = run([*LAUNCH, "--min=1", "--max=2", *TRAIN, *options])
    assert outcome.code == 2, outcome.err
    assert [message in line for line in outcome.said if " error: " in line] == [True]


# 255 is also ssh's own, and 170 would be a signal's if there were so many.
@pytest.mark.parametrize(("code", "ranks"), [(3, "01"), (170, "01"), (255, "01"), (3, "1")])
def test_a_program_that_fails_ends(code: int, ranks: str) -> None:
    program = f"import os; raise SystemExit({code} * (os.environ['HOROVOD_RANK'] in '{ranks}'))"
    outcome = run([*LAUNCH, "--min=2", "--max=2", "--", sys.executable, "-c", program])
    assert outcome.code == code, outcome.err


def test_ranks_that_stopped_in_order_are_not_told_of_as_lost() -> None:
    """As near the walltime, which each rank is told of by itself."""
    outcome = run(
        [*LAUNCH, "--min=2", "--max=2", "--", sys.executable, "-c", "raise SystemExit(75)"]
    )
    assert outcome.code == 75, outcome.err
    assert "was ended by" not in outcome.err


def test_what_would_be_run(tmp_path: Path) -> None:
    line = ["--min=1", "--max=3", "--hosts=a:2,localhost:2", "--dry-run", "--", "python", "x.py"]
    outcome = run([*LAUNCH, *line])
    assert outcome.code == 0, outcome.err
    ranks = outcome.out.splitlines()
    assert [re.findall(r"HOROVOD_(?:RANK|LOCAL_RANK|SIZE)=(\d)", rank) for rank in ranks] == [
        ["0", "0", "3"],
        ["1", "1", "3"],
        ["0", "2", "3"],
    ]
    assert [" a 'exec env " in rank for rank in ranks] == [True, True, False]
    assert subprocess.run(["sh", "-n"], input=outcome.out, text=True).returncode == 0


def test_slots_in_use_stay_so() -> None:
    assert choose_slots(["a+0", "b+0", "b+1"], (), 2) == ["a+0", "b+0"]
    assert choose_slots(["a+0", "b+0", "b+1"], ["b+0", "b+1"], 2) == ["b+0", "b+1"]
    assert choose_slots(["a+0", "b+0"], ["a+0"], 4) == ["a+0", "b+0"]


def test_ranks_are_assigned_host_by_host() -> None:
    slots = assign_ranks(["b+10", "a+1", "b+2"], ["b", "a"])
    assert [slot.hostname for slot in slots] == ["b+2", "b+10", "a+1"]
    # rank, size, local rank and size, cross rank and size, as Horovod counts them
    assert [slot.to_response_string() for slot in slots] == [
        "0,3,0,2,0,2",
        "1,3,1,2,0,1",
        "2,3,0,1,1,2",
    ]
    assert [(slot.rank, slot.local_rank, slot.local_size) for slot in slots] == [
        (rank, 0, 1) for rank in range(3)
    ]
