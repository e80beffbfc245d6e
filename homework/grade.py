"""Which of the eight steps work in a script of the homework, and what to do about the others.

python grade.py my_mnist_hvd.py
python grade.py handed_in/*.py -n 3 --data ~/mnist -- --epochs 2 --lr 0.02

Each script runs for two epochs under mpirun, so that a warm-up by epochs shows, then on one rank to
compare with, in a folder of its own that is thrown away. It is watched from outside (hvdtrain
verify --script), so it may be written in any way. A step counts if its effect was seen. Exit code
1: not all eight work in all scripts.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

from hvdtrain.commands.verify.rows import NOT_SEEN, OK, Row
from hvdtrain.commands.verify.script.start import watch
from hvdtrain.config.parser import CommandParser
from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, HvdtrainError, UsageError
from hvdtrain.system.output.tables import entry, message
from hvdtrain.system.runtime.command import termination_as_interrupt
from hvdtrain.system.runtime.exit import run_and_exit

# In the words of the exercise: the name of each step and, where it does not work, what to do.
STEPS = (
    ("initialize", "call hvd.init() before anything else of Horovod"),
    (
        "pin device",
        "take the GPU of hvd.local_rank(); on CPUs set the number of threads to the rank's share "
        "of the cores",
    ),
    (
        "shard data",
        "let each rank train on its part of every batch: by hvd.rank() and hvd.size(), with the "
        "same order on all",
    ),
    ("scale learning rate", "multiply the learning rate by hvd.size()"),
    (
        "distribute optimizer",
        "wrap the optimizer (hvd.DistributedOptimizer) or the tape (hvd.DistributedGradientTape); "
        "a sum needs losses divided by the global batch, an average equal parts",
    ),
    (
        "broadcast state",
        "broadcast parameters and optimizer state from rank 0 before the first update, and see "
        "that the line is reached on every rank",
    ),
    ("save checkpoint", "write files on rank 0 alone: if hvd.rank() == 0"),
    (
        "average metrics",
        "sum losses, right answers and counts over the ranks (hvd.allreduce), then divide",
    ),
)


def main() -> int:
    """Grade what the command line names; the exit code."""
    own, theirs = split(sys.argv[1:])
    options = read_options(own)
    if options.data:
        theirs += [f"--data={options.data.resolve()}"]
    counts = {}
    for script in options.scripts:
        counts[script] = grade(script.resolve(), theirs, options.ranks, options.timeout)
    if len(counts) > 1:
        print("\n" + "\n".join(f"{count} of 8  {script}" for script, count in counts.items()))
    return EXIT_OK if set(counts.values()) == {8} else EXIT_FAILURE


def read_options(words: list[str]) -> argparse.Namespace:
    """Read the grader's own words."""
    parser = CommandParser(
        prog="grade.py",
        description=__doc__.splitlines()[0],
        epilog="after -- follow the options of the scripts; without: --epochs 2",
    )
    parser.add_argument("scripts", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("-n", dest="ranks", type=int, default=2, help="ranks; default 2")
    parser.add_argument("--data", type=Path, help="handed to the scripts; default: the digits")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a run; default 300")
    options = parser.read(words)
    if options.ranks < 2:
        raise UsageError(f"-n {options.ranks}: what the ranks do together shows on 2 and more")
    for path in options.scripts:
        if not path.is_file():
            raise UsageError(f"{path}: no such file")
    return options


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """The grader's own words, and those of the scripts after ``--``."""
    if "--" not in words:
        return words, ["--epochs=2"]
    place = words.index("--")
    return words[:place], words[place + 1 :]


def grade(script: Path, arguments: list[str], ranks: int, timeout: float) -> int:
    """Run the script, print a line for each step, and return how many work."""
    with tempfile.TemporaryDirectory(prefix="grade-") as folder, contextlib.chdir(folder):
        try:
            # Without the launcher's binding, so that pinning is the script's own work.
            seen = watch(script, arguments, ranks=ranks, updates=None, timeout=timeout, bind=False)
        except UsageError:  # the grader's own: no mpirun, for one
            raise
        except HvdtrainError as error:
            print(f"{script.name}: {error}\n0 of 8 steps work", flush=True)
            return 0
    rows = seen.rows
    if rows[0].state != OK:  # then it is so many copies of a script, whatever each of them does
        alone = [Row(row.step, NOT_SEEN, "each rank is alone: see step 1") for row in rows]
        rows = [other if row.state == OK else row for row, other in zip(rows, alone, strict=True)]
    count = sum(row.state == OK for row in rows)
    print(f"{script.name} on {ranks} ranks, {seen.updates} updates")
    if seen.crash:
        print(message(seen.crash))
    for row in rows:
        print(line(row, row.evidence.replace(f"{folder}/", "")))
    print(f"{count} of 8 steps work", flush=True)
    return count


def line(row: Row, evidence: str) -> str:
    """What was seen of a step, and what to do if it does not work."""
    name, remedy = STEPS[row.step - 1]
    works = row.state == OK
    word = "works" if works else row.state  # failed, or not seen
    head = f"{word:8}  {row.step} {name:20}  "
    text = entry(head, evidence)
    return text if works else f"{text}\n{entry(' ' * len(head), f'-> {remedy}')}"


if __name__ == "__main__":
    with termination_as_interrupt():
        run_and_exit(main)
