"""DALI on the JPEG engine of a GPU against Pillow on all cores.

python -m benchmarks.gpu.decoders --data DIR [--images 1000] [--copies 16] [--repeats 2]

DIR holds train/CLASS/*; images are tiled to ImageNet's sizes as by ``benchmarks.decoders``. Loaders
alone and a training, in turn, in the reverse order each second round; random images show
what a training could reach. Beside a rate: processor time per image, and the greatest utilization
of the JPEG engines that nvidia-smi has shown. DALI may be beside the environment, on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.decoders import KEYS, native, printed_figures
from benchmarks.ratios import SCRIPTS, command, start
from hvdtrain.system.machine import accelerator

Figures = dict[str, float]
ON_GPU = accelerator.kind() != accelerator.CPU
TRAINED = ("--batch-size=256",) if ON_GPU else ("--batch-size=8", "--image-size=64")  # a rehearsal
QUERY = ("nvidia-smi", "--query-gpu=utilization.jpeg", "--format=csv,noheader,nounits", "-lms=200")


def copied(source: Path, target: Path, copies: int) -> None:
    """Link each image of ``source`` ``copies`` times into ``target``."""
    for path in sorted((source / "train").rglob("*.jpg")):
        folder = target / "train" / path.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        for copy in range(copies):
            (folder / f"{path.stem}-{copy}.jpg").hardlink_to(path)


@contextmanager
def jpeg_engines(figures: Figures) -> Iterator[None]:
    """Add the greatest utilization of the JPEG engines within the block, in percent."""
    if not ON_GPU:
        yield
        return
    with subprocess.Popen(QUERY, stdout=subprocess.PIPE, text=True) as query:
        try:
            yield
        finally:
            query.terminate()
            out, _ = query.communicate()
    figures["jpeg_engines_percent"] = max(
        (float(word) for word in out.split() if word.isdigit()), default=float("nan")
    )


def output(line: list[str], seconds: float) -> str:
    """Return what a command has printed; nothing if it takes longer."""
    with start(line) as process:
        try:
            return process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            return ""


def loader(decoder: str, data: Path, workers: int) -> Figures:
    """Measure a loader alone."""
    figures: Figures = {}
    line = command(1, str(SCRIPTS / "read_ahead.py"), decoder, str(data), str(workers))
    with jpeg_engines(figures):
        out = output(line, 90)
    return figures | printed_figures(out)


def training(decoder: str, options: argparse.Namespace, data: Path, work: Path) -> Figures:
    """Measure a training; ``decoder`` may be ``synthetic``."""
    figures: Figures = {}
    summary = work / "summary.json"
    images = (f"--data={data}", f"--workers={options.workers}", f"--decoder={decoder}")
    line = (sys.executable, "-m", "hvdtrain.resnet", f"--model={options.model}", *TRAINED)
    line += (f"--num-steps={options.steps}", "--strategy=single", "--quiet")
    line += (f"--summary={summary}", *(("--synthetic",) if decoder == "synthetic" else images))
    with jpeg_engines(figures):
        output(list(line), 120)
    if summary.exists():
        figures[KEYS[0]] = json.loads(summary.read_text())["images_per_second_mean"]
        summary.unlink()
    return figures


def rounds(name: str, candidates: dict[str, Callable[[], Figures]], repeats: int) -> None:
    """Run all candidates in turn; print each run, medians and ranges."""
    runs: dict[str, list[Figures]] = {candidate: [] for candidate in candidates}
    for repeat in range(repeats):
        for candidate in candidates if repeat % 2 == 0 else reversed(candidates):
            runs[candidate].append(candidates[candidate]())
            print(f"{repeat + 1}/{repeats} {name} {candidate}: {runs[candidate][-1]}", flush=True)
    for candidate, figures in runs.items():
        for key in dict.fromkeys(itertools.chain(*figures)):
            values = [one[key] for one in figures if key in one]
            print(
                f"{name} {candidate} {key}: {statistics.median(values):.4g} "
                f"({min(values):.4g} to {max(values):.4g})",
                flush=True,
            )


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--copies", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--steps", type=int, default=60, help="0: no training")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        native(options.data, work / "few", options.images)
        data = work / "images"
        copied(work / "few", data, options.copies)
        rounds(
            "loader",
            {
                name: functools.partial(loader, name, data, options.workers)
                for name in ("pillow", "dali")
            },
            options.repeats,
        )
        if options.steps:
            rounds(
                "training",
                {
                    name: functools.partial(training, name, options, data, work)
                    for name in ("synthetic", "pillow", "dali")
                },
                options.repeats,
            )


if __name__ == "__main__":
    main()
