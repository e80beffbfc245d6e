"""Train MNIST among random faults for a long time; compare the end with an undisturbed training.

python -m tests.faults.soak --data DIR [--framework tensorflow] [--minutes 30] [--seed 0]

At 2 and 3 ranks in turn, each time with another strategy, a fault every 5 to 20 s. At the end the
parameters must be those of one training without faults, each sample must have been used once in
each epoch, and no rank of the training without faults may have grown: the others end too soon to
judge their memory. Faults that need surroundings of their own, e.g. a second host, are left to the
table.
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
from pathlib import Path

import numpy as np
import psutil

from hvdtrain.steps.checkpoint import load_newest
from hvdtrain.workloads.mnist.data import load
from tests.conftest import until
from tests.faults.job import Job
from tests.faults.run import TOLERANCE, check_saved, end_of, step_of
from tests.faults.table import FAULTS
from tests.faults.task import RECORD
from tests.parallel.conftest import difference

ENDING = (
    *("rank: SIGKILL", "rank: SIGTERM", "rank: SIGINT", "rank: SIGUSR1", "mpirun: SIGKILL"),
    *("mpirun: SIGTERM", "mpirun: SIGHUP", "mpirun: SIGUSR2", "user's code: exception"),
    *("user's code: sys.exit", "user's code: os._exit", "user's code: segmentation fault"),
    *("user's code: NaN", "disk: a bit flipped", "disk: half a file"),
)
GOING_ON = ("rank: SIGHUP", "rank: suspended for 20 s", "directory: another job")
PAUSE = (5.0, 20.0)  # seconds between two faults
BATCH = 96  # over all ranks
CHOICES = {
    "pytorch": ("horovod", "ddp", "zero", "fsdp", "mpi"),
    "tensorflow": ("tensorflow", "tensorflow-mpi"),
}
# Maximum ratio of the last third to the first, of the run without faults; the best checkpoint may
# come to be none of the recent ones.
GROWTH = {"MiB resident": 1.05, "descriptors": 1.0, "threads": 1.0, "files saved": 1.4}
MAX_SAVED = 6  # entries: three recent checkpoints, the best, a partial one and the lock


class Soak:
    """A training that is disturbed and resumed again and again."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.chance = random.Random(options.seed)
        self.began = time.monotonic()
        self.survived: Counter[str] = Counter()
        self.records: dict[Path, int] = {}  # of each run, with the step that it resumed
        self.samples = len(load(options.data)[0].labels)
        self.per_epoch = math.ceil(self.samples / BATCH)

    @property
    def minutes(self) -> float:
        """Return the minutes since the begin."""
        return (time.monotonic() - self.began) / 60

    def job(self, folder: Path, strategy: str, ranks: int, steps: int) -> Job:
        """Return a run of the training, which resumes the one before in its folder."""
        record = folder / f"record-{len(self.records)}"
        record.mkdir(parents=True)
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
            pace=0.0,
        )
        newest = load_newest(job.checkpoints)
        self.records[record] = newest.state["step"] if newest else 0
        return job

    def run(self, number: int) -> None:
        """Run the training until a fault ends it."""
        strategies = CHOICES[self.options.framework]
        strategy, ranks = strategies[number // 2 % len(strategies)], 2 + number % 2
        job = self.job(self.folder, strategy, ranks, steps=10**6)
        name = self.chance.choice(ENDING)
        fault = FAULTS[name]
        with job.running():
            job.wait_for_training()
            for _ in range(self.chance.randint(0, 4)):
                time.sleep(self.chance.uniform(*PAUSE))
                self.disturb(job, self.chance.choice(GOING_ON))
            time.sleep(self.chance.uniform(*PAUSE))
            saved = job.newest
            fault.inject(job)
            outcome = job.finish(60)
            left = job.left()
        assert outcome.code in fault.codes, f"{name}: {outcome.code}: {outcome.out}"
        # mpirun kills ranks half a second after a signal; on shared cores a save may take longer.
        # The next run removes the lock of a killed rank, and what it had written of a save.
        killed = {"locks", "partial checkpoints"} if "locks" in left else set()
        assert left.keys() <= {*fault.leaves, *killed}, f"{name}: {left}"
        entries = len(list(job.checkpoints.iterdir()))
        assert entries <= MAX_SAVED, f"{name}: {entries} entries in {job.checkpoints}"
        assert job.newest >= saved or fault.lost, f"{name}: {saved}, then {job.newest}"
        check_saved(outcome, job)
        self.survived[name] += 1
        print(
            f"{self.minutes:.1f} min: {ranks} ranks, {strategy}: {name}: exit code {outcome.code}, "
            f"{job.newest}",
            flush=True,
        )

    def disturb(self, job: Job, name: str) -> None:
        """Inject a fault after which the training must go on."""
        FAULTS[name].inject(job)
        saved = job.newest
        until(lambda: job.newest > saved, seconds=FAULTS[name].seconds, detail=lambda: job.output)
        assert job.process.poll() is None, f"{name}: {job.process.poll()}: {job.output}"
        self.survived[name] += 1

    def finish(self) -> int:
        """Train to the end of an epoch without faults; return the number of updates."""
        self.epochs = step_of(Job(self.folder, "horovod").newest) // self.per_epoch + 1
        steps = self.epochs * self.per_epoch
        strategy = CHOICES[self.options.framework][0]
        for folder in (self.folder, self.folder / "undisturbed"):
            job = self.job(folder, strategy, 2, steps)
            figures = []
            with job.running():
                job.wait_for_training()
                ranks = job.ranks()
                while job.process.poll() is None:
                    with contextlib.suppress(psutil.Error):  # it ends
                        figures.append(
                            [
                                (
                                    rank.memory_info().rss / 2**20,
                                    rank.num_fds(),
                                    rank.num_threads(),
                                    sum(1 for _ in job.checkpoints.rglob("*")),
                                )
                                for rank in ranks
                            ]
                        )
                    if figures and len(figures) % 60 == 1:
                        print(f"{self.minutes:.0f} min: {[*GROWTH]} by rank: {figures[-1]}")
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        job.process.wait(1)
            assert job.process.returncode == 0, job.output
        self.figures = np.array(figures)  # of the second training, by second and rank
        return steps

    def grown(self) -> list[str]:
        """Return what a rank of the undisturbed training needed more of at its end than before."""
        warm = self.figures[len(self.figures) // 4 :]
        first, _, last = (np.median(third, axis=0) for third in np.array_split(warm, 3))
        grown = []
        for kind, (name, ratio) in enumerate(GROWTH.items()):
            for rank, (before, after) in enumerate(zip(first[:, kind], last[:, kind], strict=True)):
                print(f"undisturbed, rank {rank}: {before:.0f}, then {after:.0f} {name}")
                if after > ratio * before:
                    grown.append(f"{name} of rank {rank}")
        return grown

    def wrong_epochs(self) -> list[int]:
        """Return the epochs in which a sample was not used exactly once.

        What counts for a global batch is the last run that trained on it: the work of an earlier
        one after its last save is lost. So each run must begin at the step that it resumed.
        """
        history: dict[int, np.ndarray] = {}
        for record, resumed in [*self.records.items()][:-1]:  # without the undisturbed training
            steps = self.recorded(record)
            assert sorted(steps) == [*range(resumed, resumed + len(steps))], (record, resumed)
            history |= steps
        wrong = []
        for epoch in range(self.epochs):
            steps = range(epoch * self.per_epoch, (epoch + 1) * self.per_epoch)
            used = np.concatenate([history[step] for step in steps])
            if not np.array_equal(np.sort(used), np.arange(self.samples)):
                wrong.append(epoch)
        return wrong

    def recorded(self, folder: Path) -> dict[int, np.ndarray]:
        """Return the indices of the samples of all ranks, by step."""
        steps: dict[int, list[np.ndarray]] = {}
        for file in folder.iterdir():
            numbers = np.fromfile(file, np.int32)
            start = 0
            while start + 3 <= len(numbers):
                epoch, consumed, count = (int(number) for number in numbers[start : start + 3])
                indices = numbers[start + 3 : start + 3 + count]
                steps.setdefault(epoch * self.per_epoch + consumed // BATCH, []).append(indices)
                start += 3 + count
        return {step: np.concatenate(parts) for step, parts in steps.items()}

    def difference(self, steps: int) -> float:
        """Return the largest difference of a tensor from the undisturbed one, relative."""
        expected, ended = (
            end_of(Job(folder, "horovod", steps=steps))
            for folder in (self.folder / "undisturbed", self.folder)
        )
        return difference(expected, ended)


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
            soak.run(number)
            number += 1
        steps = soak.finish()
        difference, wrong, grown = soak.difference(steps), soak.wrong_epochs(), soak.grown()
    for name, count in soak.survived.most_common():
        print(f"{count:4} times {name}")
    print(
        f"{sum(soak.survived.values())} faults in {options.minutes:g} min, {number} runs, {steps} "
        f"updates; parameters differ by {difference:.1e} of their norm; epochs with a sample not "
        f"used once: {wrong or 'none'} of {soak.epochs}; grown: {', '.join(grown) or 'nothing'}"
    )
    return int(difference > TOLERANCE or bool(wrong) or bool(grown))


if __name__ == "__main__":
    sys.exit(main())
