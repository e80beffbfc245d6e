"""Report which of the eight steps work in a script of the homework, and how to mend the others.

python grade.py my_mnist_hvd.py
python grade.py handed_in/*.py -n 3 --data ~/mnist -- --epochs 2 --lr 0.02

Each script runs for two epochs under mpirun, so that a warm-up over epochs is observed, then on one
rank for comparison, in a temporary folder. It is observed from outside (hvdtrain verify --script),
so it may be written in any way. A step counts if its effect is observed. Exit code 1: some step of
some script does not work, or a script crashed.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

from hvdtrain.commands.verify.rows import OK, StepRow, not_seen
from hvdtrain.commands.verify.script.start import watch
from hvdtrain.config.declare import CommandParser
from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, HvdtrainError, UsageError
from hvdtrain.system.output.tables import entry, message
from hvdtrain.system.runtime.command import termination_as_interrupt
from hvdtrain.system.runtime.exit import run_and_exit

# The name of each step, as in the exercise, and what to do if it does not work.
STEPS = (
    ("initialize", "call hvd.init() before anything else of Horovod"),
    (
        "pin device",
        "use the GPU of index hvd.local_rank(); on CPUs set the number of threads to the rank's "
        "share of the cores",
    ),
    (
        "shard data",
        "train each rank on its part of every batch, by hvd.rank() and hvd.size(), in the same "
        "order on all ranks",
    ),
    ("scale learning rate", "multiply the learning rate by hvd.size()"),
    (
        "distribute optimizer",
        "wrap PyTorch's optimizer (hvd.DistributedOptimizer) or the tape of TensorFlow "
        "(hvd.DistributedGradientTape); "
        "a sum needs losses divided by the global batch, an average equal parts",
    ),
    (
        "broadcast state",
        "broadcast parameters and optimizer state from rank 0 before the first update, and check "
        "that every rank reaches that line",
    ),
    ("save checkpoint", "write files on rank 0 alone: if hvd.rank() == 0"),
    (
        "average metrics",
        "sum losses, right answers and counts over the ranks (hvd.allreduce), then divide",
    ),
)


def main() -> int:
    """Grade the scripts of the command line; return the exit code."""
    words, arguments = split(sys.argv[1:])
    options = read_options(words)
    if options.data:
        arguments += [f"--data={options.data.resolve()}"]
    marks = {}
    for script in options.scripts:
        marks[script] = grade(script.resolve(), arguments, options.ranks, options.timeout)
    if len(marks) > 1:
        print("\n" + "\n".join(f"{mark}  {script}" for script, mark in marks.items()))
    return EXIT_OK if set(marks.values()) == {"8 of 8"} else EXIT_FAILURE


def read_options(words: list[str]) -> argparse.Namespace:
    """Read the options of the grader."""
    parser = CommandParser(
        prog="grade.py",
        description=__doc__.splitlines()[0],
        epilog="options of the scripts follow after -- (default: --epochs 2)",
    )
    parser.add_argument("scripts", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("-n", dest="ranks", type=int, default=2, help="number of ranks (2)")
    parser.add_argument("--data", type=Path, help="their dataset (default: the digits)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds, limit of a run (300)")
    options = parser.read(words)
    if options.ranks < 2:
        raise UsageError(f"-n {options.ranks}: at least 2 ranks are needed to observe the steps")
    for path in options.scripts:
        if not path.is_file():
            raise UsageError(f"{path}: no such file")
    return options


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words of the grader, and those of the scripts after ``--``."""
    if "--" not in words:
        return words, ["--epochs=2"]
    end = words.index("--")
    return words[:end], words[end + 1 :]


def grade(script: Path, arguments: list[str], ranks: int, timeout: float) -> str:
    """Run the script, print a line for each step, and return how many work."""
    with tempfile.TemporaryDirectory(prefix="grade-") as folder, contextlib.chdir(folder):
        try:
            # Without the launcher's binding, so that pinning is the script's own work.
            more = {"timeout": timeout, "bind": False, "replay": False}
            seen = watch(script, arguments, ranks=ranks, updates=None, **more)
        except UsageError:  # not the script's fault: no mpirun, for example
            raise
        except HvdtrainError as error:
            print(f"{script.name}: {error}\n0 of 8 steps work", flush=True)
            return "0 of 8"
    rows = seen.rows
    if rows[0].state != OK:  # independent copies of a script: no step has an effect on all ranks
        reason = "each rank trains by itself: see step 1"
        rows = [not_seen(row.step, reason) if row.state == OK else row for row in rows]
    count = sum(row.state == OK for row in rows)
    print(f"{script.name} on {ranks} ranks, {seen.updates} updates")
    if seen.crash:
        print(message(seen.crash))
    for row in rows:
        print(line(row, row.evidence.replace(f"{folder}/", "")))
    end = ", but the script crashed" if seen.crash else ""
    print(f"{count} of 8 steps work{end}", flush=True)
    return f"{count} of 8{end}"


def line(row: StepRow, evidence: str) -> str:
    """Return the result of a step, and what to do if it does not work."""
    name, remedy = STEPS[row.step - 1]
    works = row.state == OK
    state = "works" if works else row.state  # failed, or not seen
    head = f"{state:8}  {row.step} {name:20}  "
    text = entry(head, evidence)
    return text if works else f"{text}\n{entry(' ' * len(head), f'-> {remedy}')}"


if __name__ == "__main__":
    with termination_as_interrupt():
        run_and_exit(main)
