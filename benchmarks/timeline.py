"""Time and memory of reading a large timeline, beside json.load of the same file.

python -m benchmarks.timeline --megabytes 1000
python -m benchmarks.timeline --megabytes 100 --tensors 2 --ranks 2
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

GROUPS = 4  # operations per step
PROGRAMS = {
    "read and cut": (
        "from pathlib import Path\nfrom hvdtrain.commands.timeline.read import Reading, chunks\n"
        "for _ in chunks(Reading(Path(FILE))): pass"
    ),
    "hvdtrain timeline": ("from hvdtrain import cli\nassert cli.main(['timeline', FILE]) == 0"),
    "hvdtrain timeline --html": (
        "from hvdtrain import cli\n"
        "assert cli.main(['timeline', FILE, '--html', FILE + '.html']) == 0"
    ),
    "json.load": "import json\njson.load(open(FILE))",
}


def generate(path: Path, size: float, tensors: int, ranks: int) -> int:
    """Write a timeline of about ``size`` bytes: ``tensors`` in 4 fused operations per step.

    Returns:
        How many events it has.
    """
    events, time_now, first = 2, 1_000_000, True
    with path.open("w") as file:
        file.write(
            '[\n{"name": "process_name", "ph": "M", "pid": 0, "args": '
            '{"start_time_since_epoch_in_micros":1700000000000000}},\n{"name": '
            '"process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},\n'
        )
        while file.tell() < size - 2:
            pieces = step(time_now, tensors, ranks, named=not first)
            events += len(pieces)
            file.write("".join(pieces))
            time_now, first = time_now + 150_000, False
        file.seek(file.tell() - 1)
        file.write("]")
    return events


def step(start: int, tensors: int, ranks: int, *, named: bool) -> list[str]:
    """The events of one step of 150 ms in which the last rank is 5 ms late."""
    pieces = []
    numbers = range(1, tensors + 1)
    if not named:
        for number in numbers:
            name = f"DistributedOptimizer.allreduce.layer{number}.weight"
            metadata = f'"ph": "M", "pid": {number}, "args": {{'
            pieces.append(f'{{"name": "process_name", {metadata}"name": "{name}"}}}},\n')
            pieces.append(
                f'{{"name": "process_sort_index", {metadata}"sort_index": {number}}}}},\n'
            )
    for group in range(GROUPS):
        mine = numbers[group::GROUPS]
        time_now = start + 20_000 * group
        for number in mine:
            pieces.append(bar("NEGOTIATE_ALLREDUCE", time_now, number))
        for rank in range(ranks):
            at = time_now + (rank if rank < ranks - 1 else 5_000)
            pieces += [
                f'{{"ph": "X", "name": "{rank}", "ts": {at}, "pid": {number}, "dur": 0}},'
                for number in mine
            ]
        pieces += [end(time_now + 5_000, number) for number in mine]
        pieces += [bar("ALLREDUCE", time_now + 5_050, number) for number in mine]
        for name, at in (
            ("MEMCPY_IN_FUSION_BUFFER", 5_060),
            ("NCCL_ALLREDUCE", 5_500),
            ("MEMCPY_OUT_FUSION_BUFFER", 11_500),
        ):
            pieces += [bar(name, time_now + at, number) for number in mine]
            pieces += [end(time_now + at + 400, number) for number in mine]
        shape = ', "args": {"dtype": "float32", "shape": "[256, 256, 3, 3]"}'
        pieces += [end(time_now + 12_000, number, shape) for number in mine]
    return pieces


def bar(name: str, at: int, number: int) -> str:
    """The beginning of a bar."""
    return f'{{"ph": "B", "name": "{name}", "ts": {at}, "pid": {number}}},'


def end(at: int, number: int, args: str = "") -> str:
    """The end of a bar."""
    return f'{{"ph": "E", "ts": {at}, "pid": {number}{args}}},'


def measure(program: str, path: Path) -> tuple[float, float, float]:
    """Seconds of processor and clock, and the peak of memory in MiB, of a Python program."""
    source = program.replace("FILE", repr(str(path)))
    began = time.perf_counter()
    child = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", source],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"failed: {source}")
    seconds = time.perf_counter() - began
    return usage.ru_utime + usage.ru_stime, seconds, usage.ru_maxrss / 1024


def main() -> None:
    """Generate a timeline and print a line a program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--tensors", type=int, default=161, help="a step")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--only", help="the program whose name begins so")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "timeline.json")
        events = generate(path, 1e6 * arguments.megabytes, arguments.tensors, arguments.ranks)
        megabytes = path.stat().st_size / 1e6
        print(json.dumps({"megabytes": round(megabytes, 1), "events": events}))
        for name, program in PROGRAMS.items():
            if arguments.only and not name.startswith(arguments.only):
                continue
            processor, clock, memory = measure(program, path)
            print(
                f"{name:<26} {processor:7.1f} s of processor  {clock:7.1f} s  "
                f"{megabytes / processor:6.1f} MB/s  {memory:8.0f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
