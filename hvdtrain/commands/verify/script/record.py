"""Record what a script does on one rank, as JSON values in a file per rank."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.commands.verify.script.samples import SampleLog
from hvdtrain.system.runtime.detect import detect

Array = NDArray[Any]
RankRecord = dict[str, Any]
"""The record of one rank, as in its file: ``Record.data``."""
Records = Sequence[RankRecord]  # by rank

# Functions that average the metrics of a script that uses hvdtrain.
OURS = AVERAGED, KERAS_METRICS = "average_metrics", "MetricAverageCallback"
SAME = 1e-6  # relative difference of metrics, or of learning rates, that count as equal
DETAILED = 5  # updates that are recorded in detail
VALUES, PER_TENSOR = 4096, 64  # values sampled from all parameters, and from one tensor
RATES = 100_000  # learning rates that are recorded
CALLS = 1000  # calls that are recorded individually
# Files that are no result of a script: devices, caches, and temporary files of libraries.
NOT_FILES = ("/dev/", "/proc/", "/sys/")
NOT_OURS = {"__pycache__", "site-packages", ".cache", ".keras"}
LOCKS = (".lock", "_lock")  # made to be opened by several ranks
SCRATCH = ("tmp", "__autograph", "pymp-", "torch", "hvdtrain-")


class EnoughError(SystemExit):
    """The script has made its updates; a SystemExit, so that scripts do not catch it."""


class Record:
    """The record of one rank, in ``folder / RANK.json``.

    The script is ended after ``updates`` updates; None: not at all.
    """

    def __init__(self, folder: Path, updates: int | None) -> None:
        launch = detect(os.environ)
        self.path = folder / f"{launch.rank}.json"
        self._writing = threading.RLock()  # re-entrant: writing calls `wrote`
        # Not in `wrote`, which may be called from within tempfile, while it holds a lock.
        self.scratch = tempfile.gettempdir() + os.sep
        self.limit = updates
        self.done = 0  # updates
        self.batch = 0  # samples since the last update
        self.seen = SampleLog()
        self.local: list[Array] | None = None  # gradients of this rank for the next update
        self.ignored = 0  # > 0 outside of the script's training
        self.inspect: Callable[[], Any] = lambda: None  # reads some of the data at the end
        self.gradient_tests: list[Callable[[Any], bool]] = []  # one per framework
        self.data: dict[str, Any] = {
            "launcher": [launch.launcher, launch.rank, launch.size],
            "host": socket.gethostname(),
            "process": os.getpid(),
            "cores": sorted(os.sched_getaffinity(0)),
            "world": None,
            "processor": None,
            "calls": [],
            "updates": [],
            "rates": [],
            "initial_rate": 0.0,
            "rows": self.seen.marks,
            "ends": self.seen.ends,
            "epoch": None,
            "loader": None,
            "reduced": 0,
            "metrics": [],
            "written": [],
            "waiting": None,
            "done": 0,
            "hvdtrain": False,
            "resumed": False,
            "ended": None,
        }

    def call(self, name: str, **facts: Any) -> None:
        """Record a call, with ``facts`` about it."""
        if len(self.data["calls"]) < CALLS:
            self.data["calls"].append({"name": name, "update": self.done, **facts})

    def broadcast(self, name: str, values: int) -> None:
        """Record a number of broadcast values; calls within the same update are added up."""
        for call in self.data["calls"]:
            if (call["name"], call["update"]) == (name, self.done):
                call["values"] += values
                return
        self.call(name, values=values)

    def joined(self, world: Mapping[str, int]) -> None:
        """Record that the rank is initialized, and its world."""
        self.data["world"] = dict(world)
        self.write()

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Mark that the rank waits for the others, and ignore the updates that it makes meanwhile.

        Horovod's ``broadcast_optimizer_state``, for example, calls the optimizer's step.
        """
        self.ignored += 1
        self.data["waiting"] = name  # stays set if the wait ends in an error
        self.write()
        try:
            yield
            self.data["waiting"] = None
        finally:
            self.ignored -= 1

    def reduced(self) -> None:
        """Record a reduction over the ranks."""
        self.data["reduced"] += 1

    def is_gradient(self, value: Any) -> bool:
        """Return whether ``value``, a tensor, is a gradient for the next update."""
        return any(test(value) for test in self.gradient_tests)

    def metric(self, name: str, before: Sequence[Any], after: Sequence[Any]) -> None:
        """Record a few values of this rank before and after their reduction."""
        if len(self.data["metrics"]) < CALLS:
            values = [
                [float(value) for part in parts for value in np.ravel(part)]
                for parts in (before, after)
            ]
            self.data["metrics"].append([name, *values])
            if len(self.data["metrics"]) <= DETAILED:
                self.write()

    def wrote(self, target: Any) -> None:
        """Record that the rank opens ``target`` for writing, if it is a path."""
        if not isinstance(target, str | os.PathLike):
            return
        full = os.path.abspath(target)  # noqa: PTH100 (Path would touch the disk)
        if full not in self.data["written"] and self._counts(full):
            self.data["written"].append(full)
            self.write()  # mpirun ends this rank without warning if another one fails

    def _counts(self, path: str) -> bool:
        """Return whether the file is a result of the script, not a cache or a temporary file."""
        folder = str(self.path.parent) + os.sep
        if path.startswith((*NOT_FILES, folder)) or NOT_OURS & set(Path(path).parts):
            return False
        if path.endswith(LOCKS):
            return False
        if Path(path).is_dir():  # O_TMPFILE opens the folder of an unnamed file
            return False
        return not (path.startswith(self.scratch) and path[len(self.scratch) :].startswith(SCRATCH))

    def samples(self, values: Array) -> None:
        """Record samples, along the first axis, that the model is trained on."""
        if self.ignored or not np.ndim(values):
            return
        self.batch += len(values)
        self.seen.add(values)
        self.data["epoch"] = self.seen.epoch

    @property
    def detailed(self) -> bool:
        """Whether the next update is recorded in detail."""
        return self.done < DETAILED

    def rate(self, value: float, initial: float = 0.0) -> None:
        """Record the next update's learning rate; ``initial``: the one that a scheduler scales."""
        self.data["initial_rate"] = initial
        if len(self.data["rates"]) < RATES:
            self.data["rates"].append(value)

    def update(
        self,
        *,
        before: Sequence[Array],
        applied: Sequence[Array],
        after: Sequence[Array],
        state: Sequence[Array] | None,
    ) -> None:
        """Record an update: parameters before and after, gradients, optimizer state before."""
        if self.detailed:
            local = self.local
            fits = local is not None and [a.shape for a in local] == [a.shape for a in applied]
            self.data["updates"].append(
                {
                    "rows": self.batch,
                    "tensors": len(before),
                    "values": int(sum(value.size for value in before)),
                    "before": summary(before),
                    "after": summary(after),
                    "applied": summary(applied),
                    "local": summary(local) if fits and local is not None else None,
                    "state": None if state is None else summary(state)["digest"],
                }
            )
        self.count()

    def count(self) -> None:
        """Count an update, recorded in detail or not."""
        self.done += 1
        self.batch, self.local = 0, None
        self.seen.update()
        self.data["done"] = self.done
        if self.done <= DETAILED:
            self.write()

    @property
    def enough(self) -> bool:
        """Whether the script has made its updates."""
        return self.limit is not None and self.done >= self.limit

    def end_if_enough(self) -> None:
        """End the script once it has made its updates."""
        if self.enough and not self.data["ended"]:
            self.data["ended"] = "updates"
            raise EnoughError(0)

    def finish(self) -> None:
        """Inspect the script's data after its end, and write the record."""
        self.ignored += 1  # reading the data is no training
        self.inspect()
        self.write()

    def write(self) -> None:
        """Replace the file atomically; do nothing in a worker process of a data loader."""
        if os.getpid() != self.data["process"]:
            return
        with self._writing:
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(self.data))
            partial.rename(self.path)


def summary(tensors: Sequence[Array]) -> dict[str, Any]:
    """Return a digest of all bytes of the tensors, and a sample of their values."""
    digest = hashlib.sha256()
    count = max(1, min(PER_TENSOR, VALUES // max(1, len(tensors))))
    sample: list[float] = []
    for tensor in tensors:
        flat = np.ascontiguousarray(tensor).ravel()
        digest.update(flat.tobytes())
        chosen = np.linspace(0, flat.size - 1, min(count, flat.size)).astype(int)
        sample += flat[chosen].astype(np.float64).tolist()
    return {"digest": digest.hexdigest(), "sample": sample}
