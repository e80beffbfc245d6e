"""Measure ResNet's images/s: hvdtrain's strategies beside loops written by hand, in turn.

The loops by hand are those of ``benchmarks/scripts``. Every round runs each candidate once, every
second one backwards, until the time is up; what is worth most to know comes first.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.table import PLAIN
from hvdtrain.commands.install_horovod.build import decisive_line
from hvdtrain.steps.summary import Summary
from hvdtrain.system.machine import accelerator
from hvdtrain.system.runtime.command import Command, run
from tests.conftest import BIN, ROOT

SCRIPTS = ROOT / "benchmarks" / "scripts"
MAX_ROUNDS = 3  # rounds
RATE, MEMORY = "images_per_second", "peak_memory_bytes"  # what the loops by hand print
SYNTHETIC, REAL = "synthetic", "JPEGs"
# Where the CPU computes, which tells nothing but that all runs, not on cores that others use.
THREADS = {} if accelerator.count() else {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Scale:
    """What is trained, and on how many ranks."""

    model: str
    size: int  # pixels
    batch: int  # per rank
    steps: int
    precisions: tuple[str, ...]
    workers: int  # per rank
    ranks: int
    copies: int  # of the real images


def on_gpu() -> bool:
    """Tell whether PyTorch has an accelerator here; without one, all this is a rehearsal."""
    return accelerator.kind() != accelerator.CPU


def scale() -> Scale:
    """Return ResNet-50 on a GPU, and what a CPU does in a second."""
    if on_gpu():
        precisions = ("bf16", "fp16", "tf32")
        return Scale("resnet50", 224, 256, 100, precisions, 14, accelerator.count(), 64)
    return Scale("resnet18", 64, 8, 10, ("bf16", "fp32"), 1, 1, 1)


def describe(scale: Scale) -> str:
    """Say what is measured."""
    ranks = f"{scale.ranks} ranks" if scale.ranks > 1 else "one rank, which sends no gradients"
    return f"{scale.model}, {scale.size} pixels, batch {scale.batch} per rank, {ranks}"


@dataclass(frozen=True)
class Candidate:
    """A loop whose speed is measured."""

    loop: str
    data: str
    precision: str
    argv: tuple[str, ...]
    summary: Path | None  # of a trainer; a loop by hand prints its rate


def launched(scale: Scale, argv: Sequence[str]) -> tuple[str, ...]:
    """Return the command that starts ``argv`` on the ranks.

    Bound to no core: by itself mpirun gives a rank one, and the workers that read images, too.
    """
    mpirun = (str(BIN / "mpirun"), "--oversubscribe", "--bind-to", "none")
    return (*mpirun, "-n", str(scale.ranks), *argv)


def trainer_line(scale: Scale, precision: str, data: Path | None = None) -> tuple[str, ...]:
    """Return the trainer's command on one rank."""
    chosen = ("fp32", "--tf32") if precision == "tf32" else (precision,)
    return (
        *(sys.executable, "-m", "hvdtrain.resnet", f"--model={scale.model}"),
        *(f"--image-size={scale.size}", f"--batch-size={scale.batch}"),
        *(f"--num-steps={scale.steps}", "--precision", *chosen),
        *((f"--data={data}", f"--workers={scale.workers}") if data else ("--synthetic",)),
    )


def by_hand(script: str, scale: Scale, precision: str, data: Path | None) -> tuple[str, ...]:
    """Return the command of a loop of ``benchmarks/scripts``, as torchrun starts it."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={scale.ranks}")
    return (
        *(sys.executable, *torchrun, str(SCRIPTS / script), precision, str(scale.steps)),
        *(f"--model={scale.model}", f"--size={scale.size}", f"--batch={scale.batch}"),
        f"--workers={scale.workers}",
        *((f"--data={data}",) if data else ()),
    )


def candidates(scale: Scale, data: Path | None, work: Path) -> Iterator[Candidate]:
    """Yield what is measured: each precision on synthetic images, the first on real ones too."""
    plan: list[tuple[str, Path | None]] = [(scale.precisions[0], None)]
    plan += [(scale.precisions[0], data)] if data else []
    plan += [(precision, None) for precision in scale.precisions[1:]]
    for precision, where in plan:
        kind = REAL if where else SYNTHETIC
        for name, script in ((PLAIN, "plain_ddp.py"), ("reference loop", "reference_loop.py")):
            yield Candidate(name, kind, precision, by_hand(script, scale, precision, where), None)
        for strategy in ("horovod", "ddp") if where else ("horovod", "ddp", "fsdp"):
            yield trainer(scale, precision, where, work, f"--strategy={strategy}")
    yield trainer(scale, scale.precisions[0], None, work, "--strategy=ddp", "--compile")


def trainer(
    scale: Scale, precision: str, data: Path | None, work: Path, *options: str
) -> Candidate:
    """Return hvdtrain with ``options``."""
    name = " ".join(["hvdtrain", *(o.removeprefix("--strategy=") for o in options)])
    summary = work / "summary.json"
    line = (*trainer_line(scale, precision, data), *options, "--quiet", f"--summary={summary}")
    kind = REAL if data else SYNTHETIC
    return Candidate(name, kind, precision, launched(scale, line), summary)


def many_images(images: Path, folder: Path, copies: int) -> Path | None:
    """Make a data set of ``copies`` times the images, by links; None where there are none."""
    files = sorted(images.glob("*/*")) if images.is_dir() else []
    for file in files:
        (folder / "train" / file.parent.name).mkdir(parents=True, exist_ok=True)
        for copy in range(copies):
            link = folder / "train" / file.parent.name / f"{copy}-{file.name}"
            if not link.exists():
                link.symlink_to(file.resolve())
    return folder if files else None


def once(candidate: Candidate, log: Path, limit: float) -> dict[str, Any]:
    """Run a candidate; return its rate and peak memory, or what went wrong."""
    if candidate.summary:
        candidate.summary.unlink(missing_ok=True)
    said: list[str] = []
    with log.open("a") as stream:
        stream.write(f"$ {' '.join(candidate.argv)}\n")

        def take(line: str) -> None:
            said.append(line)
            print(line, file=stream, flush=True)

        done = run(Command(candidate.argv, THREADS, ROOT), take, limit)
    row: dict[str, Any] = {"rate": None, "peak_memory": None, "trouble": ""}
    if done.exit_code == 124:
        row["trouble"] = f"not done after {limit:.0f} s"
    elif not done.ok:
        row["trouble"] = decisive_line(said)
    elif candidate.summary:
        summary = Summary.read(candidate.summary)
        row |= {"rate": summary.images_per_second_mean, "peak_memory": summary.peak_memory_bytes}
        row["trouble"] = "" if row["rate"] else "the summary has no rate"
    else:
        printed = dict(line.split()[:2] for line in said if line.startswith((RATE, MEMORY)))
        row |= {"rate": float(printed[RATE]), "peak_memory": int(printed[MEMORY])}
    return row


def measure(
    rates: list[dict[str, Any]],
    images: Path,
    work: Path,
    log: Path,
    end: float,
    save: Callable[[], None],
    only: Sequence[str],
) -> int:
    """Run rounds of the candidates until ``end``; append to ``rates``; return how many failed."""
    size = scale()
    everything = candidates(size, many_images(images, work / "images", size.copies), work)
    line_up = [candidate for candidate in everything if not only or candidate.loop in only]
    seconds: dict[Candidate, float] = {}
    failed: set[Candidate] = set()
    for turn in range(MAX_ROUNDS if on_gpu() else 1):
        for candidate in line_up if turn % 2 == 0 else line_up[::-1]:
            began = time.monotonic()
            if candidate in failed or began + seconds.get(candidate, 30.0) > end:
                continue
            try:
                row = once(candidate, log, min(180.0, end - began))
            except (KeyError, ValueError, json.JSONDecodeError) as error:
                row = {"rate": None, "peak_memory": None, "trouble": f"no rate: {error!r}"}
            seconds[candidate] = time.monotonic() - began
            if row["trouble"]:
                failed.add(candidate)
            names = {n: getattr(candidate, n) for n in ("loop", "data", "precision")}
            rates.append({**names, **row})
            save()
            came = row["trouble"] or f"{row['rate']:.1f} images/s"
            print(
                f"{seconds[candidate]:6.1f} s  bench: {' '.join(names.values())}: {came}",
                flush=True,
            )
    return len(failed)
