"""A training into which faults are injected, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

from hvdtrain.steps.checkpoint import newest_name
from tests.cluster.hosts import TwoHosts, send
from tests.conftest import ROOT, Outcome, environment, until
from tests.faults.task import FAULT, PACE

STEPS, EVERY = 120, 5  # updates of a training, and between its checkpoints
TENSORFLOW = "--framework=tensorflow"
STRATEGIES: dict[str, tuple[str, ...]] = {  # of five in a row one is TensorFlow's
    **{name: (f"--strategy={name}",) for name in ("horovod", "ddp", "zero")},
    "tensorflow": (TENSORFLOW,),
    **{name: (f"--strategy={name}",) for name in ("fsdp", "mpi")},
    "tensorflow-mpi": (TENSORFLOW, "--strategy=mpi"),
}
LAUNCHERS = {
    "mpirun": ("mpirun", "--oversubscribe", "-n", "2"),
    "launch": ("hvdtrain", "launch", "-n", "2", "--"),
    "timeout": ("hvdtrain", "launch", "-n", "2", "--timeout", "45", "--"),
}
OWN = ("hvdtrain.train", "tests/faults/task.py", "--batch-size=8")
RESNET = ("hvdtrain.resnet", "--model=resnet18", "--image-size=32", "--workers=1", "--batch-size=2")
SHARED_MEMORY = Path("/dev/shm")
FILLER = "full"  # the file with which a test fills a file system
BIND = f'mount --bind "$0" {SHARED_MEMORY} && exec "$@"'


@dataclass
class Job:
    """A training on two ranks in ``folder``, which is of this job alone.

    A job of the same folder resumes from the checkpoints of the one before.
    """

    folder: Path
    strategy: str
    launcher: Sequence[str] = LAUNCHERS["mpirun"]
    extra: Mapping[str, str] = field(default_factory=dict)  # variables
    options: Sequence[str] = ("--quiet",)
    prefix: Sequence[str] = ()  # of the command
    seed: int = 0
    hosts: TwoHosts | None = None  # on which it runs; None: on this one
    training: Sequence[str] = OWN
    images: bool = False  # train on images, which a process beside each rank reads
    steps: int = STEPS
    every: int = EVERY
    pace: float = 0.02  # seconds of a step, at least
    process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.temporary.mkdir(parents=True, exist_ok=True)
        self.shared.mkdir(exist_ok=True)
        self.before = names(self.temporary), names(self.shared)
        if self.images:
            self.training = (*RESNET, f"--data={make_images(self.folder / 'images')}")
            self.steps = STEPS // 4  # they take longer

    @property
    def checkpoints(self) -> Path:
        """Return the directory of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def temporary(self) -> Path:
        """Return the directory for temporary files."""
        return self.folder / "tmp"

    @property
    def shared(self) -> Path:
        """Return what the job sees as /dev/shm; only root can give it another one."""
        return SHARED_MEMORY if os.geteuid() else self.folder / "shm"

    @property
    def request(self) -> Path:
        """Return the file by which ``tests/faults/task.py`` is asked to fail."""
        return self.folder / "fault"

    @property
    def output(self) -> str:
        """Return what the job wrote so far."""
        return (self.folder / "output").read_text(errors="replace")

    @property
    def newest(self) -> str:
        """Return the name of the newest checkpoint; empty if there is none."""
        return newest_name(self.checkpoints) or ""

    def start(self) -> None:
        """Start the job in a new session."""
        variables = {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.temporary),
            FAULT: str(self.request),
            PACE: str(self.pace),
            **self.extra,
        }
        prefix = ["env", "--default-signal=HUP"]
        if self.shared != SHARED_MEMORY:
            prefix += ["unshare", "--mount", "sh", "-c", BIND, str(self.shared)]
        with (self.folder / "output").open("w") as output:
            self.process = subprocess.Popen(
                [*prefix, *self.prefix, *self.launcher, *self.program],
                cwd=ROOT,
                env=environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start the job; kill what is left of it at the end."""
        self.start()
        try:
            yield
        finally:
            self.kill()

    @property
    def program(self) -> list[str]:
        """Return the command of each rank."""
        return [
            *(sys.executable, "-m", *self.training),
            *("--precision=fp64", "--epochs=99", f"--num-steps={self.steps}"),
            *(f"--checkpoint-every={self.every}", f"--checkpoint-dir={self.checkpoints}"),
            *STRATEGIES[self.strategy],
            *self.options,
        ]

    def wait_for_training(self) -> str:
        """Wait until a checkpoint is saved, and a random time more; return the newest then."""
        before = self.newest
        until(
            lambda: self.newest > before or self.process.poll() is not None,
            detail=lambda: self.output,
        )
        assert self.process.poll() is None, f"{self.process.poll()}: {self.output}"
        time.sleep(self.chance.uniform(0, 2))  # in an update, a save or an evaluation
        return self.newest

    def finish(self, seconds: float) -> Outcome:
        """Wait for the end of the launcher, at most so many seconds, and of all other processes.

        Returns exit code and output. Of others, those that take longer than ten seconds are left.
        """
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {seconds} s:\n{self.output}") from None
        deadline = time.monotonic() + 10
        while self.members() and time.monotonic() < deadline:
            time.sleep(0.02)
        return Outcome(code, self.output, "")

    def kill(self) -> None:
        """Kill the processes of the job, and those that they start meanwhile."""

        def ended() -> bool:
            members = self.members()
            send(signal.SIGKILL, (process.pid for process in members))
            return not members

        until(ended, seconds=10)
        self.process.wait(10)

    def members(self) -> list[psutil.Process]:
        """Return the running processes that the job started, in whichever session."""
        members = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                is_member = process.environ().get(FAULT) == str(self.request)
                if is_member and process.status() != psutil.STATUS_ZOMBIE:
                    members.append(process)
        return members

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks, by rank."""
        ranks = {}
        for process in self.members():
            with contextlib.suppress(psutil.Error):
                words, variables = process.cmdline(), process.environ()
                if "--precision=fp64" in words and "OMPI_COMM_WORLD_RANK" in variables:
                    rank = int(variables["OMPI_COMM_WORLD_RANK"])
                    parent = process.parent()
                    if parent is None or parent.name() != process.name():
                        ranks[rank] = process
        return [ranks[rank] for rank in sorted(ranks)]

    def launchers(self, name: str) -> list[psutil.Process]:
        """Return the processes of the job whose program is ``name``."""
        return [process for process in self.members() if process.name() == name]

    def left(self) -> dict[str, list[str]]:
        """Return the names of what the job left behind, by kind."""
        temporary, shared = self.before
        left = {
            "processes": [str(process.pid) for process in self.members()],
            "shared memory": sorted(names(self.shared) - shared - {FILLER}),
            "temporary files": sorted(names(self.temporary) - temporary),
            "locks": [path.name for path in hidden(self.checkpoints) if "lock" in path.name],
            "partial checkpoints": [
                path.name for path in hidden(self.checkpoints) if "lock" not in path.name
            ],
        }
        return {kind: names for kind, names in left.items() if names}


def make_images(folder: Path) -> Path:
    """Write some small images of two classes, always the same; return their folder."""
    chance = np.random.default_rng(0)
    for number, split in enumerate(("train", "train", "train", "val") * 12):
        file = folder / split / "ab"[number // 4 % 2] / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(chance.integers(256, size=(40, 40, 3), dtype=np.uint8)).save(file)
    return folder


def hidden(folder: Path) -> list[Path]:
    """Return the hidden files of a folder."""
    return list(folder.glob(".*")) if folder.is_dir() else []


def names(folder: Path) -> set[str]:
    """Return the names in a folder."""
    return {path.name for path in folder.iterdir()}


def lines(output: str) -> list[str]:
    """Return what hvdtrain reported."""
    return [line for line in output.splitlines() if re.search(r"hvdtrain(:| launch:)", line)]
