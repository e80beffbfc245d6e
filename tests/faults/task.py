"""The user's program of the tests of faults: examples/own_task.py, which misbehaves when asked to.

The file that FAULT names has the kind of fault and the rank; that rank removes the file and obeys.
"""

from __future__ import annotations

import ctypes
import os
import resource
import runpy
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from hvdtrain.steps.sharding import Indices, Part
from hvdtrain.tasks.dataset import Batch, Dataset
from hvdtrain.tasks.task import Task

FAULT = "HVDTRAIN_TEST_FAULT"  # variable: path of the file
RECORD = "HVDTRAIN_TEST_SAMPLES"  # variable: folder of the records of the samples
PACE = "HVDTRAIN_TEST_PACE"  # variable: seconds of a step, at least
EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
FILES = {"pytorch": "own_task.py", "tensorflow": "own_task_tf.py"}


@dataclass
class Options:
    """The options of examples/own_task.py."""

    hidden: int = 32


def hang() -> NoReturn:
    """Wait forever."""
    while True:
        signal.pause()


def exhaust_memory() -> None:
    """Allocate more than the process may have."""
    resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
    np.ones(2**33, np.uint8)


def exhaust_descriptors() -> None:
    """Open files until there are no more descriptors, and keep them open."""
    opened = []
    try:
        while True:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        print(f"{len(opened)} files are open", file=sys.stderr)


def fail() -> NoReturn:
    """Raise an error."""
    raise RuntimeError("an error in the user's code")


KINDS = {
    "exception": fail,
    "hang": hang,
    "exit": lambda: sys.exit(3),
    "end": lambda: os._exit(3),
    "segmentation": lambda: ctypes.string_at(0),
    "memory": exhaust_memory,
    "descriptors": exhaust_descriptors,
}


class Faulty(Dataset):
    """The samples of another dataset, whose loading fails on request, and is recorded on request.

    A record is a row of epoch, consumed samples, number of indices, and the indices of this rank.
    """

    def __init__(self, whole: Dataset) -> None:
        self.whole, self.samples, self.digest = whole, whole.samples, whole.digest
        self.pace = float(os.environ[PACE])
        self.file = Path(os.environ[FAULT])
        self.rank = next(
            os.environ[key]
            for key in ("OMPI_COMM_WORLD_RANK", "RANK", "PMI_RANK")
            if key in os.environ
        )

    def training(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Batch]]:
        """Yield the parts, slowly."""
        for part, batch in self.whole.training(parts):
            time.sleep(self.pace)
            self.record(part)
            yield part, self.obey(batch)

    def record(self, part: Part) -> None:
        """Append the samples of a part to this rank's file."""
        if folder := os.environ.get(RECORD):
            mine = part.indices[: part.count]  # without a stand-in
            row = [part.start.epoch, part.start.consumed, len(mine), *mine]
            with Path(folder, self.rank).open("ab") as file:
                file.write(np.array(row, np.int32).tobytes())

    def evaluation(self, batches: Iterable[Indices]) -> Iterator[Batch]:
        """Yield the batches."""
        return self.whole.evaluation(batches)

    def obey(self, batch: Batch) -> Batch:
        """Do what the file says, if it is for this rank; return the batch, perhaps damaged."""
        try:
            kind, rank = self.file.read_text().split()
        except (OSError, ValueError):
            return batch
        if rank != self.rank or (kind == "nan" and not batch.count):  # an empty part has no value
            return batch
        self.file.unlink()
        if kind == "nan":
            return Batch(batch.x * float("nan"), batch.y)
        KINDS[kind]()
        return batch


def task(options: Any) -> Task:
    """Return the task of the example."""
    made: Task = runpy.run_path(str(EXAMPLES / FILES[options.framework]))["task"](options)
    made.train = Faulty(made.train)
    return made
