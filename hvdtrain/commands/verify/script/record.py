"""What one rank saw of the script, as JSON values; written to a file of its own as it grows."""

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

from hvdtrain.commands.verify.script.samples import Samples
from hvdtrain.system.runtime.detect import detect

Array = NDArray[Any]
Noted = dict[str, Any]
"""What one rank noted, as its file holds it: ``Record.data``."""

# What a script that uses hvdtrain averages its metrics with.
OURS = AVERAGED, KERAS_METRICS = "average_metrics", "MetricAverageCallback"
SAME = 1e-6  # relative difference of metrics, or of learning rates, that are the same
DETAILED = 5  # updates that are looked at closely
VALUES, PER_TENSOR = 4096, 64  # values that stand for all parameters, and for one tensor
RATES = 100_000  # learning rates that are noted
CALLS = 1000  # calls that are noted one by one
# Files that are no result of a script: devices, caches, and what libraries lay down for a moment.
NOT_FILES = ("/dev/", "/proc/", "/sys/")
NOT_OURS = {"__pycache__", "site-packages", ".cache", ".keras"}
LOCKS = (".lock", "_lock")  # several ranks may well open one: that is what it is for
SCRATCH = ("tmp", "__autograph", "pymp-", "torch", "hvdtrain-")


class EnoughError(SystemExit):
    """The script has made its updates; a SystemExit, so that scripts let it pass."""


class Record:
    """What one rank saw, in ``folder / RANK.json``.

    The script is to end after so many ``updates``; None: at its own end.
    """

    def __init__(self, folder: Path, updates: int | None) -> None:
        place = detect(os.environ)
        self.path = folder / f"{place.rank}.json"
        self._writing = threading.RLock()  # a file that is opened for it is told to `wrote`
        # Asked for now: `wrote` may be called from within tempfile, which holds a lock then.
        self.scratch = tempfile.gettempdir() + os.sep
        self.limit = updates
        self.done = 0  # updates
        self.batch = 0  # samples since the last one
        self.seen = Samples()
        self.local: list[Array] | None = None  # gradients of this rank for the next update
        self.ignored = 0  # > 0 while what happens is not the script's training
        self.probe: Callable[[], Any] = lambda: None  # looks at the data when all is over
        self.gradient_tests: list[Callable[[Any], bool]] = []  # one of each framework
        self.data: dict[str, Any] = {
            "launcher": [place.launcher, place.rank, place.size],
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
        """Note a call of interest, with ``facts`` about it."""
        if len(self.data["calls"]) < CALLS:
            self.data["calls"].append({"name": name, "update": self.done, **facts})

    def broadcast(self, name: str, values: int) -> None:
        """Note how many values were broadcast; what is broadcast tensor by tensor is added up."""
        for call in self.data["calls"]:
            if (call["name"], call["update"]) == (name, self.done):
                call["values"] += values
                return
        self.call(name, values=values)

    def joined(self, world: Mapping[str, int]) -> None:
        """Note that the rank has joined the others, and its place among them."""
        self.data["world"] = dict(world)
        self.write()

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Mark that the rank waits for the others: what it does meanwhile is no training.

        Horovod's ``broadcast_optimizer_state`` makes an update of its own, for one.
        """
        self.ignored += 1
        self.data["waiting"] = name  # stays so where the wait ends in an error
        self.write()
        try:
            yield
            self.data["waiting"] = None
        finally:
            self.ignored -= 1

    def reduced(self) -> None:
        """Note that something was summed over the ranks."""
        self.data["reduced"] += 1

    def is_gradient(self, value: Any) -> bool:
        """Return whether ``value``, a tensor, is a gradient for the next update."""
        return any(test(value) for test in self.gradient_tests)

    def metric(self, name: str, before: Sequence[Any], after: Sequence[Any]) -> None:
        """Note a few values of this rank and what the reduction made of them, in parts or whole."""
        if len(self.data["metrics"]) < CALLS:
            values = [
                [float(one) for part in parts for one in np.ravel(part)]
                for parts in (before, after)
            ]
            self.data["metrics"].append([name, *values])
            if len(self.data["metrics"]) <= DETAILED:
                self.write()

    def wrote(self, target: Any) -> None:
        """Note that the rank opens ``target`` to write, if it is a path."""
        if not isinstance(target, str | os.PathLike):
            return
        full = os.path.abspath(target)  # noqa: PTH100 (Path would touch the disk)
        if full not in self.data["written"] and self._counts(full):
            self.data["written"].append(full)
            self.write()  # where another rank fails, mpirun ends this one without a warning

    def _counts(self, path: str) -> bool:
        """Return whether the file is the script's work, not a cache or a library's scratch file."""
        folder = str(self.path.parent) + os.sep
        if path.startswith((*NOT_FILES, folder)) or NOT_OURS & set(Path(path).parts):
            return False
        if path.endswith(LOCKS):
            return False
        if Path(path).is_dir():  # a nameless temporary file is opened by its folder
            return False
        return not (path.startswith(self.scratch) and path[len(self.scratch) :].startswith(SCRATCH))

    def samples(self, values: Array) -> None:
        """Note samples, along the first axis, that the model is trained on."""
        if self.ignored or not np.ndim(values):
            return
        self.batch += len(values)
        self.seen.add(values)
        self.data["epoch"] = self.seen.epoch

    @property
    def detailed(self) -> bool:
        """Whether the next update is to be looked at closely."""
        return self.done < DETAILED

    def rate(self, value: float, initial: float = 0.0) -> None:
        """Note the rate of the next update's first group; ``initial``: what it is made from."""
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
        """Note an update: parameters before and after it, gradients, the optimizer's old state."""
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
        """Count an update, whether it was looked at or not."""
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
        """Look at the script's data when it is over, and write all down."""
        self.ignored += 1  # what the probe draws is no training
        self.probe()
        self.write()

    def write(self) -> None:
        """Write the file anew, whole or not at all; a loader's worker leaves it to its rank."""
        if os.getpid() != self.data["process"]:
            return
        with self._writing:
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(self.data))
            partial.rename(self.path)


def summary(tensors: Sequence[Array]) -> dict[str, Any]:
    """Return what tells these tensors from others: a digest of all bytes, and some values."""
    digest = hashlib.sha256()
    count = max(1, min(PER_TENSOR, VALUES // max(1, len(tensors))))
    sample: list[float] = []
    for tensor in tensors:
        flat = np.ascontiguousarray(tensor).ravel()
        digest.update(flat.tobytes())
        chosen = np.linspace(0, flat.size - 1, min(count, flat.size)).astype(int)
        sample += flat[chosen].astype(np.float64).tolist()
    return {"digest": digest.hexdigest(), "sample": sample}
