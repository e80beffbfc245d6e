"""Compare hvdtrain with scripts written by hand: alternating runs, ratios of paired runs.

python -m benchmarks.ratios resnet --framework pytorch --repeats 7
python -m benchmarks.ratios mnist --repeats 3 --data ../shared/data/mnist [--only "by hand"]
python -m benchmarks.ratios strategies --repeats 7 [--only "ddp" "plain DDP"]
python -m benchmarks.ratios images --repeats 7 --data ~/photographs
python -m benchmarks.ratios packed --repeats 5 --data ~/photographs [--only cold]
python -m benchmarks.ratios pi --repeats 5
python -m benchmarks.ratios start --repeats 9 --data ../shared/data/mnist [--framework tensorflow]
python -m benchmarks.ratios start --repeats 3 --data ../shared/data/mnist --ranks 8 16 32 64

images takes timm's loader along where timm can be imported. It is not among the pins: pip install
--no-deps timm; with --target DIR, and PYTHONPATH=DIR, it stays out of this environment.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hvdtrain.training.plan import processor_has_bf16
from tests.conftest import BIN, ROOT, environment

SCRIPTS = Path(__file__).parent / "scripts"
Measure = Callable[[], float]


def command(ranks: int, *arguments: str, launcher: str = "mpirun") -> list[str]:
    """Plain ``mpirun -n RANKS python ...``, the like of torchrun, or python alone for one rank."""
    if launcher == "torchrun":
        return [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={ranks}", *arguments]
    python = [sys.executable, *arguments]
    mpirun, *flags = launcher.split()
    return python if ranks == 1 else [str(BIN / mpirun), *flags, "-n", str(ranks), *python]


def start(arguments: list[str]) -> subprocess.Popen[str]:
    """Start a run with one thread a rank."""
    own = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([str(ROOT), *([own] if own else [])])
    env = environment(OMP_NUM_THREADS="1", PYTHONPATH=paths)
    return subprocess.Popen(arguments, env=env, stdout=subprocess.PIPE, text=True)


def printed(process: subprocess.Popen[str], key: str = "images_per_second") -> float:
    """The number that a run printed behind ``key``."""
    out, _ = process.communicate(timeout=900)
    line = next(line for line in out.splitlines() if line.startswith(key))
    return float(line.split()[1])


def script(name: str, ranks: int, *arguments: str, launcher: str = "mpirun") -> Measure:
    """Images/s of a script in ``scripts``."""
    line = command(ranks, str(SCRIPTS / name), *arguments, launcher=launcher)
    return lambda: printed(start(line))


def trainer(
    workload: str, ranks: int, copies: int, *arguments: str, launcher: str = "mpirun"
) -> Measure:
    """Images/s of a trainer; of several copies at once, their sum."""

    def measure() -> float:
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, f"{number}.json") for number in range(copies)]
            running = []
            for number, file in enumerate(files):
                words = ("-m", f"hvdtrain.{workload}", *arguments, "--quiet", f"--summary={file}")
                line = command(ranks, *words, launcher=launcher)
                if copies > 1:  # as mpirun does it: a core each
                    line = ["taskset", "-c", str(number), *line]
                running.append(start(line))
            for process in running:
                process.communicate(timeout=900)
            return sum(json.loads(f.read_text())["images_per_second_mean"] for f in files)

    return measure


def alternate(candidates: dict[str, Measure], repeats: int, baseline_of: str) -> None:
    """Run all candidates in turn, ``repeats`` times; print medians, and ``baseline_of`` / each."""
    values: dict[str, list[float]] = {name: [] for name in candidates}
    for repeat in range(repeats):
        order = list(candidates) if repeat % 2 == 0 else list(reversed(candidates))
        for name in order:
            values[name].append(candidates[name]())
            print(f"{repeat + 1}/{repeats} {name}: {values[name][-1]:.4g}", flush=True)
    for name, measured in values.items():
        ratios = [a / b for a, b in zip(values[baseline_of], measured, strict=True)]
        print(
            f"{name:34} median {statistics.median(measured):10.4g}   {baseline_of} / this: "
            f"median {statistics.median(ratios):.3f}  ({min(ratios):.3f} to {max(ratios):.3f})"
        )


def resnet(options: argparse.Namespace) -> None:
    """ResNet-50, batch 8 per rank, two ranks: against bare, by hand, and two copies."""
    framework, steps = options.framework, str(options.steps)
    line = (f"--framework={framework}", "--batch-size=8", f"--num-steps={options.steps + 5}")
    candidates = {"bare": script(f"bare_{framework}.py", 2, steps)}
    for precision in ("bf16", "fp32"):
        tuned = (*line, f"--precision={precision}")
        candidates[precision] = trainer("resnet", 2, 1, *tuned)
        candidates[f"{precision} two copies"] = trainer("resnet", 1, 2, *tuned)
        by_hand = script(f"hand_{framework}.py", 2, precision, steps)
        candidates[f"{precision} by hand"] = by_hand
    wanted = {k: v for k, v in candidates.items() if k in options.only or not options.only}
    first = next(name for name in ("bf16", "fp32") if name in wanted)
    alternate(wanted, options.repeats, first)


def strategies(options: argparse.Namespace) -> None:
    """ResNet-18, batch 8 per rank, two ranks: each strategy, and DDP without hvdtrain.

    In bf16 where the processor has it: without, a step in bf16 takes 13 times that in fp32.
    """
    precision = "bf16" if processor_has_bf16() else "fp32"
    line = ("--model=resnet18", "--batch-size=8", f"--precision={precision}", "--synthetic")
    steps = f"--num-steps={options.steps + 5}"
    candidates = {
        name: trainer("resnet", 2, 1, *line, steps, f"--strategy={name}")
        for name in ("ddp", "horovod", "mpi", "zero", "fsdp")
    }
    ddp = (*line, steps, "--strategy=ddp")
    for launcher in ("torchrun", "mpirun --bind-to none"):  # mpirun gives each rank a core
        candidates[f"ddp by {launcher}"] = trainer("resnet", 2, 1, *ddp, launcher=launcher)
    plain = script("plain_ddp.py", 2, precision, str(options.steps), launcher="torchrun")
    candidates["plain DDP"] = plain
    wanted = {k: v for k, v in candidates.items() if k in options.only or not options.only}
    alternate(wanted, options.repeats, next(iter(wanted)))


def images(options: argparse.Namespace) -> None:
    """Reading images in one process: against others' loaders, and decoding alone."""
    names = ["hvdtrain", "torchvision", "timm", "decoding"]
    if not importlib.util.find_spec("timm"):
        print("timm: not installed (pip install --no-deps timm), so it is left out")
        names.remove("timm")
    candidates = {name: script("read_images.py", 1, name, str(options.data)) for name in names}
    alternate(candidates, options.repeats, "hvdtrain")


def packed(options: argparse.Namespace) -> None:
    """Packed data against their folder: files opened and bytes read, images/s, warm and cold.

    Cold: dropped from the page cache first. The bytes alone, and with decoding and cropping.
    """
    beside = options.data.resolve().parent  # on the same disk
    with tempfile.TemporaryDirectory(dir=beside) as folder:
        out = Path(folder, "packed")
        subprocess.run([str(BIN / "hvdtrain"), "pack", str(options.data), str(out)], check=True)
        reader = str(SCRIPTS / "read_packed.py")
        places = {"folder": options.data.resolve(), "packed": out}
        for name, data in places.items():
            said, _ = start(command(1, reader, str(data), "--cold")).communicate(timeout=900)
            print(f"{name}, 1 rank, cold: {', '.join(said.splitlines())}", flush=True)
        for way in ("cold", "warm", "cold, cropped", "warm, cropped"):
            if options.only and way not in options.only:
                continue
            words = ["--cold"] * ("cold" in way) + ["--crop"] * ("cropped" in way)
            for ranks in (1, 2):
                candidates: dict[str, Measure] = {
                    f"{name}, {way}, {ranks}": script("read_packed.py", ranks, str(data), *words)
                    for name, data in places.items()
                }
                alternate(candidates, options.repeats, f"packed, {way}, {ranks}")


def pi(options: argparse.Namespace) -> None:
    """Pi: against the scalar loop of the tutorial, and two ranks against one."""

    def rate(ranks: int, *arguments: str) -> Measure:
        line = command(ranks, "-m", "hvdtrain.pi", "--json", *arguments)
        return lambda: float(json.loads(start(line).communicate()[0])["samples_per_second"])

    candidates = {
        "two ranks": rate(2, "--samples=4e9"),
        "one rank": rate(1, "--samples=2e9"),
        "one rank, --naive": rate(1, "--samples=5e6", "--naive"),
        "tutorial loop": lambda: printed(
            start(command(1, str(SCRIPTS / "tutorial_pi.py"))), "samples_per_second"
        ),
    }
    alternate(candidates, options.repeats, "two ranks")
    rest = {k: v for k, v in candidates.items() if k != "two ranks"}
    alternate(rest, options.repeats, "one rank")


def mnist(options: argparse.Namespace) -> None:
    """MNIST: seconds of training to 98.5 % against a bare script; the large net by hand."""
    data = f"--data={options.data}"
    bare = script("bare_mnist.py", 2, str(options.data), "0.985")

    def seconds_to_target() -> float:
        with tempfile.TemporaryDirectory() as folder:
            metrics = Path(folder, "metrics.jsonl")
            line = ("--model=small", "--epochs=4", f"--metrics={metrics}", "--quiet", data)
            start(command(2, "-m", "hvdtrain.mnist", *line)).communicate(timeout=900)
            rows = [json.loads(row) for row in metrics.read_text().splitlines()]
        epochs = [row for row in rows if row["kind"] == "epoch"]
        reached = next(row for row in epochs if row["eval_accuracy"] >= 0.985)
        return float(reached["seconds"])

    if "by hand" not in options.only:
        candidates: dict[str, Measure] = {
            "bare: seconds to 98.5 %": bare,
            "hvdtrain: seconds to 98.5 %": seconds_to_target,
        }
        alternate(candidates, options.repeats, "bare: seconds to 98.5 %")
    tuned = (data, "--num-steps=200", "--precision=bf16")
    loops = {
        "hvdtrain": trainer("mnist", 2, 1, *tuned),
        "by hand": script("hand_mnist.py", 2, str(options.data), "200"),
    }
    alternate(loops, options.repeats, "hvdtrain")


def first_step(options: argparse.Namespace) -> None:
    """MNIST: seconds from the start of the process to the first update, against a bare script."""
    launcher = "mpirun --oversubscribe"

    def hvdtrain(ranks: int) -> Measure:
        line = ("-m", "hvdtrain.mnist", f"--data={options.data}", "--num-steps=1", "--quiet")

        def measure() -> float:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "summary.json")
                more = (f"--framework={options.framework}", f"--summary={file}")
                start(command(ranks, *line, *more, launcher=launcher)).communicate(timeout=900)
                return float(json.loads(file.read_text())["seconds_to_first_step"])

        return measure

    def bare(ranks: int) -> Measure:
        line = (str(SCRIPTS / "bare_start.py"), options.framework, str(options.data))
        return lambda: printed(
            start(command(ranks, *line, launcher=launcher)), "seconds_to_first_step"
        )

    for ranks in options.ranks:
        candidates = {f"hvdtrain, {ranks}": hvdtrain(ranks), f"bare, {ranks}": bare(ranks)}
        alternate(candidates, options.repeats, f"hvdtrain, {ranks}")


STUDIES = {
    "resnet": resnet,
    "strategies": strategies,
    "mnist": mnist,
    "images": images,
    "packed": packed,
    "pi": pi,
    "start": first_step,
}


def main() -> None:
    """Run the study that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--framework", default="pytorch")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="of start")
    parser.add_argument("--only", nargs="*", default=[], help="some of the candidates")
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    STUDIES[options.study](options)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
