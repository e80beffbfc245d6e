"""``hvdtrain launch --elastic``: ranks that are killed, slots that come and go, and a stop."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import pickle
import random
import re
import subprocess
import sys
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from hvdtrain.commands.launch.elastic_driver import assign_ranks, choose_slots
from tests.conftest import BIN, LONG, begin, end_session, on_demand, run
from tests.parallel import resident
from tests.parallel.conftest import SCRIPTS, show_seconds_lost, until

HOST_PROCESS = "hvdtrain.commands.launch.host_process"
LAUNCH = [str(BIN / "hvdtrain"), "launch", "--elastic"]
TRAIN = ["--", sys.executable, "-m", "hvdtrain.mnist", "--model=small", "--epochs=400"]
BATCH, STEPS = 125, 240  # 20 epochs of 1,500 samples, whatever the number of ranks
EVERY = 5  # steps between two checkpoints


class Job:
    """A program under --elastic, its ranks, and its checkpoints in ``saved``.

    Args:
        saved: directory of the checkpoints.
        program: a word that only the ranks' command lines have.
        words: options of launch, and the command.
    """

    def __init__(self, saved: Path, program: str, *words: str) -> None:
        self.saved, self.program = saved, program
        self.process = begin([*LAUNCH, *words], start_new_session=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        end_session(self.process.pid)

    def ranks(self) -> dict[str, psutil.Process]:
        """The processes that train, by rank."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it ends just now
                words = process.cmdline()
                if self.program in words and HOST_PROCESS not in words:
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
        """The number of the newest checkpoint; 0: there is none."""
        names = [one.name for one in self.saved.glob("step-*")]
        return max((int(re.findall(r"\d+", name)[0]) for name in names), default=0)

    def saves_again(self, least: int = 0) -> None:
        """Wait for a checkpoint after those that there are, of at least this number."""
        before = self.newest()
        until(lambda: self.newest() > before and self.newest() >= least, self.process)

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and all that was said. Nobody is left."""
        said, _ = self.process.communicate(timeout=150)
        lines = [one.info["cmdline"] or () for one in psutil.process_iter(["cmdline"])]
        assert not [line for line in lines if str(self.saved) in " ".join(line)]
        return self.process.returncode, said


class Training(Job):
    """A training of MNIST."""

    def __init__(self, folder: Path, *options: str) -> None:
        saved, self.file = folder / "checkpoints", folder / "summary.json"
        files = [f"--checkpoint-dir={saved}", f"--summary={self.file}"]
        files += [f"--checkpoint-every={EVERY}", f"--global-batch-size={BATCH}"]
        super().__init__(saved, "hvdtrain.mnist", *options, *files)

    @property
    def summary(self) -> dict[str, Any]:
        """The JSON of --summary."""
        found: dict[str, Any] = json.loads(self.file.read_text())
        return found


def discovery(folder: Path) -> tuple[Path, str]:
    """A file of hosts, of which there is one slot at first, and the option that names it."""
    there, script = folder / "hosts", folder / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {there}\n")
    script.chmod(0o755)
    there.write_text("localhost:1\n")
    return there, f"--discovery={script}"


@pytest.mark.parametrize("number", range(10 if LONG else 1))
def test_a_rank_that_is_killed(number: int, tmp_path: Path) -> None:
    size, chance = (2 + number % 2) if LONG else 2, random.Random(number)
    framework = f"--framework={'tensorflow' if number % 5 == 4 else 'pytorch'}"
    line = [f"--min={size}", f"--max={size}", *TRAIN, f"--num-steps={STEPS}", framework]
    with Training(tmp_path, *line) as job:
        job.saves_again(2 * EVERY)  # the first one is complete on all ranks
        time.sleep(LONG * chance.random() / 2)
        job.ranks()[str(chance.randrange(size))].kill()
        show_seconds_lost(f"Horovod, {framework[12:]}, a rank killed", job.saved, job.process)
        code, said = job.end()
    assert code == 0, said
    lost = re.search(r", step (\d+): rank \d on .* resume from \S*/step-(\d+)", said)
    assert lost, said
    assert 0 <= int(lost[1]) - int(lost[2]) <= 2 * EVERY  # the last save was not complete
    assert "was ended by SIGKILL" in said
    assert job.summary["world_size"] == size
    assert (job.summary["stopped"], job.summary["steps_completed"]) == ("steps", STEPS)
    assert job.summary["samples_trained"] == STEPS * BATCH == 20 * 1500  # each of each epoch once


ANSWERS = """
import json, os, pathlib, sys, time
from hvdtrain.steps.world import World
from hvdtrain.training.summary import environment
summary = environment(World(0, 1, 0, 1, "a", 1))
pathlib.Path(sys.argv[1], "summary.json").write_text(json.dumps(summary))
print("driver", os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], os.environ["HVDTRAIN_SLOT"], flush=True)
time.sleep(100)
"""


class Bomb:
    """An object whose pickle creates ``file`` when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def test_the_driver_answers_only_ranks_of_the_job(tmp_path: Path) -> None:
    words = ("--min=1", "--max=1", "--", sys.executable, "-c", ANSWERS, str(tmp_path))
    with Job(tmp_path, ANSWERS, *words) as job:
        lines = iter(job.process.stdout or ())
        _, address, slot = next(line.split() for line in lines if line.startswith("driver "))
        server, _, secret = address.partition("/")
        host, port = server.split(":")

        def request(path: str, method: str = "GET", body: bytes = b"") -> int:
            connection = http.client.HTTPConnection(server, timeout=20)
            connection.request(method, path, body)
            return connection.getresponse().status

        for guess in ("", "/x", f"/{secret[:-1]}", f"/{secret}0", "/%s:1" % ("0" * len(secret))):
            assert request(f"{guess}/lost/{slot}") == HTTPStatus.FORBIDDEN
            assert request(f"{guess}/scope/key", "PUT") == HTTPStatus.FORBIDDEN
            assert request(f"{guess}/global/0", "DELETE") == HTTPStatus.FORBIDDEN
            assert request(f"{guess}/", "HEAD") == HTTPStatus.FORBIDDEN
        assert request(f"/{secret}/lost/{slot}") == request(f"/{secret}:1/lost/{slot}") == 200
        # Even a rank's message is not unpickled.
        bomb = base64.b64encode(pickle.dumps(Bomb(tmp_path / "executed")))
        assert request(f"/{secret}/worker_addresses/{slot}", "PUT", bomb) == HTTPStatus.OK
        assert not (tmp_path / "executed").exists()
        # No process or file shows the secret to other users, and no other interface has the port.
        files = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
        assert files and secret not in "".join(files)
        shown = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
        assert any(ANSWERS in line for line in shown) and secret not in "".join(shown)
        ports = psutil.Process(job.process.pid).net_connections()
        listening = [each.laddr for each in ports if each.status == psutil.CONN_LISTEN]
        assert listening == [(host, int(port))] == [("127.0.0.1", int(port))]


@on_demand
def test_a_rank_that_is_killed_while_all_connect(tmp_path: Path) -> None:
    """The others wait for it within Horovod, where they hear nothing; their workers start them."""
    with Training(tmp_path, "--min=2", "--max=2", *TRAIN, f"--num-steps={STEPS}") as job:
        until(lambda: job.world_size() == 2, job.process)
        time.sleep(1)
        job.ranks()["1"].kill()
        code, said = job.end()
    assert code == 0, said
    assert (job.summary["world_size"], job.summary["steps_completed"]) == (2, STEPS)
    assert job.summary["samples_trained"] == STEPS * BATCH


def test_a_slot_that_joins_and_a_stop(tmp_path: Path) -> None:
    there, option = discovery(tmp_path)
    with Training(tmp_path, "--min=1", "--max=3", option, *TRAIN) as job:
        job.saves_again()
        assert job.world_size() == 1
        there.write_text("localhost:1\n127.0.0.1:1\n")
        until(lambda: job.world_size() == 2, job.process)
        job.saves_again()
        if LONG:
            there.write_text("127.0.0.1:1\n")
            until(lambda: job.world_size() == 1, job.process)
            job.saves_again()
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


# hvd.elastic of hvdtrain.keras

KERAS = str(SCRIPTS / "keras_elastic.py")


def keras_job(folder: Path, *options: str, slots: tuple[str, ...]) -> Job:
    """The script of Keras, which commits to a directory."""
    saved = folder / "commits"
    words = [sys.executable, KERAS, f"--directory={saved}", f"--done={folder / 'done'}"]
    return Job(saved, KERAS, *slots, "--", *words, *options)


def begun(said: str) -> list[tuple[int, int, int]]:
    """Epoch, batch and number of ranks of each start, as rank 0 and the others tell them."""
    found = re.findall(r"begin at epoch (\d+), batch (\d+), (\d+) ranks", said)
    return list(dict.fromkeys((int(a), int(b), int(c)) for a, b, c in found))


@on_demand  # keras_fit.py has the commits, the test above the driver
@pytest.mark.parametrize("number", range(6))
def test_a_rank_of_keras_that_is_killed(number: int, tmp_path: Path) -> None:
    """Each batch is trained on once after the last commit: the script compares the weights."""
    size, chance = 2 + number % 2, random.Random(number)
    options = ["--epochs=4", "--pause=0.1", f"--every={1 + number % 3}"]
    options += ["--relative"] * (number % 2)
    slots = (f"--min={size}", f"--max={size}")
    with keras_job(tmp_path, *options, slots=slots) as job:
        job.saves_again(3)
        time.sleep(chance.random())
        job.ranks()[str(chance.randrange(size))].kill()
        code, said = job.end()
    assert code == 0, said
    assert "was ended by SIGKILL" in said
    assert begun(said)[0] == (0, 0, size)
    assert len(begun(said)) == 2, said
    assert (tmp_path / "done").exists()


@on_demand
def test_a_slot_that_joins_keras_and_a_stop(tmp_path: Path) -> None:
    """Two ranks go on within the epoch of one, and nothing is lost; so does the same command."""
    there, option = discovery(tmp_path)
    slots = ("--min=1", "--max=3", option)
    with keras_job(tmp_path, "--pause=0.3", "--every=1", slots=slots) as job:
        job.saves_again(3)
        there.write_text("localhost:1\n127.0.0.1:1\n")
        until(lambda: job.world_size() == 2, job.process)
        job.saves_again()
        job.process.terminate()
        code, said = job.end()
    assert code == 75, said
    assert "the hosts have changed: committed" in said
    assert not (tmp_path / "done").exists()
    with keras_job(tmp_path, "--every=1", slots=("--min=3", "--max=3")) as job:
        code, said = job.end()
    assert code == 0, said
    assert begun(said)[0][2] == 3
    assert (tmp_path / "done").exists()


def test_keras_without_an_elastic_job_is_a_plain_training(tmp_path: Path) -> None:
    """No file is written, nor a directory needed."""
    outcome = resident.ranks(2, KERAS, f"--done={tmp_path / 'done'}", framework="tensorflow")
    assert outcome.code == 0, outcome.err[-3000:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["done"]


@on_demand
def test_keras_without_a_directory_is_refused_in_one_line(tmp_path: Path) -> None:
    words = ["--min=2", "--max=2", "--", sys.executable, KERAS, f"--done={tmp_path / 'done'}"]
    outcome = run([*LAUNCH, *words])
    assert outcome.code != 0
    assert 'UsageError: KerasState: specify directory="checkpoints"' in outcome.err
