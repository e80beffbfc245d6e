"""Seconds of a training without saves, with saves in the background, and with saves waited for.

python -m benchmarks.saves [--rounds 3] [--steps 30] [--every 6] [--ranks 2] [--only fsdp]
                           [-- OPTIONS]

ResNet-50 on synthetic images, the three ways in turn, in the reverse order each second round.
The seconds are those of the whole training after its first step, the last save included. A step
lasts from the arrival of one line of --metrics to that of the next, so a save counts with the step
after it. OPTIONS replace those of the training, e.g. --model=resnet18.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ratios import command, start
from hvdtrain.training.plan import processor_has_bf16

SAVES = ("none", "async", "sync")
TRAININGS = {
    "horovod": ("--framework=pytorch", "--strategy=horovod"),
    "fsdp": ("--framework=pytorch", "--strategy=fsdp"),
    "tensorflow": ("--framework=tensorflow", "--strategy=horovod"),
}
FIRST = 5  # steps that are left out


@dataclass(frozen=True)
class Figures:
    """A run: seconds of each step and of the whole, and what the trainer reports."""

    steps: list[float]
    whole: float  # after the first step
    peak_bytes: int  # resident memory of a rank
    saves: dict[str, float]

    @property
    def median(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.steps)


def measure(training: Sequence[str], save: str, every: int, ranks: int) -> Figures:
    """Run a training."""
    with tempfile.TemporaryDirectory() as folder:
        summary, lines = Path(folder, "summary.json"), Path(folder, "lines")
        os.mkfifo(lines)
        words = ["-m", "hvdtrain.resnet", "--synthetic", *training, "--quiet", "--log-every=1"]
        words += [f"--summary={summary}", f"--metrics={lines}"]
        if save != "none":
            words += [f"--checkpoint-dir={folder}/saved", f"--checkpoint-every={every}"]
            words += [f"--save={save}"]
        run = start(command(ranks, *words))
        times = []
        with lines.open() as arriving:
            for line in arriving:
                if "step" in json.loads(line):
                    times.append(time.monotonic())
        if run.wait():
            raise SystemExit(f"the run ended with {run.returncode}")
        steps = [after - before for before, after in itertools.pairwise(times)]
        ended = json.loads(summary.read_text())
        whole = ended["seconds_total"] - ended["seconds_to_first_step"]
        saves = ended.get("saves") or {}
        return Figures(steps[FIRST:], whole, ended["peak_memory_bytes"], saves)


def compare(name: str, training: Sequence[str], options: argparse.Namespace) -> None:
    """Measure the three ways in turn, and print their figures beside those without saves."""
    figures: dict[str, list[Figures]] = {save: [] for save in SAVES}
    for number in range(options.rounds):
        for save in SAVES if number % 2 == 0 else reversed(SAVES):
            run = measure(training, save, options.every, options.ranks)
            figures[save].append(run)
            print(
                f"{name} {number + 1}/{options.rounds} {save:5}: {run.whole:.2f} s, "
                f"median step {run.median:.4f} s, longest {max(run.steps):.4f} s, "
                f"saves {run.saves}",
                flush=True,
            )
    for save, runs in figures.items():
        pairs = list(zip(runs, figures["none"], strict=True))
        print(
            f"{name:10} {save:5} {statistics.median(run.whole for run in runs):.2f} s, "
            f"/ none {statistics.median(a.whole / b.whole for a, b in pairs):.3f}, "
            f"median step / none {statistics.median(a.median / b.median for a, b in pairs):.3f}, "
            f"longest / median {statistics.median(max(r.steps) / r.median for r in runs):.2f}, "
            f"peak {max(r.peak_bytes for r in runs) / 2**20:.0f} MiB",
            flush=True,
        )


def main() -> None:
    """Measure each training."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", choices=TRAININGS, nargs="+", default=[*TRAININGS])
    parser.add_argument("options", nargs="*", metavar="OPTION")
    options = parser.parse_args()
    precision = "bf16" if processor_has_bf16() else "fp32"
    given = options.options or [
        *("--model=resnet50", "--batch-size=4", "--image-size=160"),
        f"--precision={precision}",
    ]
    for name in options.only:
        compare(name, [*TRAININGS[name], *given, f"--num-steps={options.steps}"], options)


if __name__ == "__main__":
    main()
