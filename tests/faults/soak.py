"""Train MNIST among random faults for a long time; compare the end with an undisturbed training.

python -m tests.faults.soak --data DIR [--framework tensorflow] [--minutes 30] [--seed 0]

At 2 and 3 ranks in turn, each time with another strategy, a fault every 5 to 20 s. At the end the
parameters must be those of one training without faults, each sample must have been used once in
each epoch, and a rank must not have grown.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from tests.faults.job import Job
from tests.faults.run import OWN, end_of, step_of
from tests.faults.table import FAULTS, GOES_ON
from tests.faults.task import RECORD

ENDING = (
    *("rank: SIGKILL", "rank: SIGTERM", "rank: SIGINT", "rank: SIGUSR1", "mpirun: SIGKILL"),
    *("mpirun: SIGTERM", "mpirun: SIGHUP", "mpirun: SIGUSR2", "user's code: exception"),
    *("user's code: sys.exit", "user's code: os._exit", "user's code: segmentation fault"),
    *("user's code: NaN", "disk: a bit flipped", "disk: half a file"),
)
GOING_ON = ("rank: SIGHUP", "rank: suspended for 20 s", "directory: another job")
PAUSE = (5.0, 20.0)  # seconds between two faults
BATCH = 96  # over all ranks
TOLERANCE = 1e-9  # relative
CHOICES = {"pytorch": ("horovod", "ddp", "zero", "fsdp", "mpi"), "tensorflow": ("tensorflow",)}


@dataclass(frozen=True)
class Figures:
    """What a rank uses."""

    minute: float
    memory: int  # resident bytes
    descriptors: int
    threads: int


class Soak:
    """A training that is disturbed and resumed again and again."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.chance = random.Random(options.seed)
        self.began = time.monotonic()
        self.survived: Counter[str] = Counter()
        self.figures: list[list[Figures]] = []  # of each run
        self.records: list[Path] = []

    @property
    def minutes(self) -> float:
        """Return the minutes since the begin."""
        return (time.monotonic() - self.began) / 60

    def job(self, folder: Path, strategy: str, ranks: int, steps: int) -> Job:
        """Return a run of the training, which resumes the one before in its folder."""
        record = folder / f"record-{len(self.records)}"
        record.mkdir(parents=True)
        self.records.append(record)
        job = Job(
            folder,
            strategy,
            ("mpirun", "--oversubscribe", "-n", str(ranks)),
            extra={RECORD: str(record)},
            training=(
                *(
                    "tests.faults.mnist",
                    "--model=small",
                    "--dropout=0",
                    f"--data={self.options.data}",
                ),
                *(f"--global-batch-size={BATCH}", "--lr=0.01", "--lr-scaling=none", "--seed=1"),
            ),
            steps=steps,
            every=50,
        )
        job.start()
        return job

    def disturb(self, number: int) -> None:
        """Run the training until a fault ends it."""
        strategies = CHOICES[self.options.framework]
        strategy, ranks = strategies[number // 2 % len(strategies)], 2 + number % 2
        job = self.job(self.folder, strategy, ranks, steps=10**6)
        self.figures.append([])
        try:
            saved = job.wait_for_training()
            for _ in range(self.chance.randint(0, 4)):
                self.measure(job)
                time.sleep(self.chance.uniform(*PAUSE))
                saved = self.inject(job, self.chance.choice(GOING_ON))
            time.sleep(self.chance.uniform(*PAUSE))
            self.measure(job)
            name = self.chance.choice(ENDING)
            saved = self.inject(job, name)
            outcome = job.finish(60)
            left = job.left().keys() & OWN
        finally:
            job.end()
        assert outcome.code in FAULTS[name].codes, f"{name}: {outcome.code}: {outcome.err}"
        assert "processes" not in left, left
        assert job.newest >= saved or FAULTS[name].lost, f"{name}: {saved}, then {job.newest}"
        print(
            f"{self.minutes:.1f} min: {ranks} ranks, {strategy}: {name}: exit code {outcome.code}, "
            f"{job.newest}",
            flush=True,
        )

    def inject(self, job: Job, name: str) -> str:
        """Inject a fault; return the newest checkpoint before it."""
        saved = job.newest
        FAULTS[name].inject(job)
        self.survived[name] += 1
        if FAULTS[name].codes == (GOES_ON,):
            time.sleep(1)
            assert job.process.poll() is None, f"{name}: {job.process.poll()}: {job.output}"
        return saved

    def measure(self, job: Job) -> None:
        """Record what rank 0 uses."""
        rank: psutil.Process = job.ranks()[0]
        with rank.oneshot():
            figures = Figures(
                self.minutes, rank.memory_info().rss, rank.num_fds(), rank.num_threads()
            )
        self.figures[-1].append(figures)

    def finish(self) -> int:
        """Train to the end of an epoch without faults; return the number of updates."""
        parts = [part for record in self.records for part in recorded(record).values()]
        self.samples = 1 + max(int(part.max()) for part in parts if part.size)
        per_epoch = math.ceil(self.samples / BATCH)
        self.epochs = step_of(Job(self.folder, "horovod").newest) // per_epoch + 1
        steps = self.epochs * per_epoch
        strategy = CHOICES[self.options.framework][0]
        for folder in (self.folder, self.folder / "undisturbed"):
            job = self.job(folder, strategy, 2, steps)
            self.figures.append([])
            job.wait_for_training()
            while job.process.poll() is None:
                self.measure(job)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.process.wait(60)
            assert job.process.returncode == 0, job.output
        return steps

    def wrong_epochs(self) -> list[int]:
        """Return the epochs in which a sample was not used exactly once.

        What counts for a global batch is the last run that trained on it: the work of an earlier
        one after its last save is lost.
        """
        history: dict[tuple[int, int], np.ndarray] = {}
        for record in self.records[:-1]:  # without the undisturbed training
            history |= recorded(record)
        wrong = []
        for epoch in range(self.epochs):
            parts = [part for (number, _), part in history.items() if number == epoch]
            if not np.array_equal(np.sort(np.concatenate(parts)), np.arange(self.samples)):
                wrong.append(epoch)
        return wrong

    def difference(self, steps: int) -> float:
        """Return the largest difference of a tensor from the undisturbed one, relative."""
        ended, expected = (
            end_of(Job(folder, "horovod", steps=steps))
            for folder in (self.folder, self.folder / "undisturbed")
        )
        return max(
            float(np.linalg.norm(ended[name] - value) / max(np.linalg.norm(value), 1e-30))
            for name, value in expected.items()
        )


def recorded(folder: Path) -> dict[tuple[int, int], np.ndarray]:
    """Return the indices of the samples of all ranks, by epoch and start of the global batch."""
    parts: dict[tuple[int, int], list[np.ndarray]] = {}
    for file in folder.iterdir():
        numbers = np.fromfile(file, np.int32)
        start = 0
        while start + 3 <= len(numbers):
            epoch, consumed, count = (int(number) for number in numbers[start : start + 3])
            indices = numbers[start + 3 : start + 3 + count]
            parts.setdefault((epoch, consumed), []).append(indices)
            start += 3 + count
    return {key: np.concatenate(arrays) for key, arrays in parts.items()}


def main() -> int:
    """Soak; return 1 if a promise is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--framework", choices=CHOICES, default="pytorch")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.data = options.data.resolve()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(options, Path(folder))
        number = 0
        while soak.minutes < options.minutes:
            soak.disturb(number)
            number += 1
        steps = soak.finish()
        difference, wrong = soak.difference(steps), soak.wrong_epochs()
    for name, count in soak.survived.most_common():
        print(f"{count:4} times {name}")
    for figures in soak.figures[-1]:
        print(f"undisturbed, {figures}")
    print(
        f"{sum(soak.survived.values())} faults in {options.minutes:g} min, {number} runs, {steps} "
        f"updates; parameters differ by {difference:.1e} of their norm; epochs with a sample not "
        f"used once: {wrong or 'none'} of {soak.epochs}"
    )
    return int(difference > TOLERANCE or bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
