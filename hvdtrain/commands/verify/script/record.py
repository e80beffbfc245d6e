"""Record what a script does on one rank, in a JSON file per rank."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hvdtrain.commands.verify.script.samples import SampleLog, SeenSamples
from hvdtrain.system.runtime.detect import detect

Array = NDArray[Any]

# Functions that average the metrics of a script that uses hvdtrain.
OURS = AVERAGED, KERAS_METRICS = "average_metrics", "MetricAverageCallback"
SCALED = "scale_learning_rate"
TO_ONE = {"reduce", "gather", "gather_object"}  # collectives whose result only one rank gets
SAME = 1e-6  # relative difference of metrics, or of learning rates, that count as equal
DETAILED = 5  # updates that are recorded in detail
VALUES, PER_TENSOR = 4096, 64  # values sampled from all parameters, and from one tensor
RATES = 100_000  # learning rates that are recorded
CALLS = 1000  # calls that are recorded individually
# Files that are no result of a script: devices, caches, and temporary files of libraries.
NOT_FILES = ("/dev/", "/proc/", "/sys/")
NOT_OURS = {"__pycache__", "site-packages", ".cache", ".keras", ".triton"}
LOCKS = (".lock", "_lock")  # made to be opened by several ranks
SCRATCH = ("tmp", "__autograph", "pymp-", "torch", "hvdtrain-")


@dataclass(frozen=True)
class HorovodWorld:
    """Ranks as Horovod or torch.distributed reports them."""

    rank: int
    size: int
    local_rank: int
    local_size: int


@dataclass(frozen=True)
class Call:
    """A call of Horovod, torch.distributed or hvdtrain, with those of its facts that are known."""

    name: str
    update: int  # number of updates made before
    values: int = 0  # that were broadcast
    shards: int | None = None  # number of shards, and the index of the rank's
    shard: int | None = None
    base: float = 0.0  # learning rate, and its scaling with the ranks
    factor: float = 0.0
    threads: int | None = None


@dataclass(frozen=True)
class Values:
    """A digest of all bytes of several tensors, and a sample of their values."""

    digest: str
    sample: list[float]


@dataclass(frozen=True)
class Update:
    """One update of the optimizer."""

    samples: int  # the model was called with since the last update
    tensors: int  # parameters
    values: int  # in all parameters
    before: Values  # of the parameters
    applied: list[float]  # sample of the gradients
    local: list[float] | None  # the same before they were reduced; None: not seen
    state: str | None  # digest of the optimizer's state before; None: not seen
    loss: float | None = None  # whose gradients are ``local``; None: not seen


@dataclass(frozen=True)
class MetricReduction:
    """Values that may be a metric, before and after their reduction."""

    name: str
    before: list[float]
    after: list[float]


@dataclass(frozen=True)
class Loader:
    """The PyTorch loader of the training data."""

    sampler: str  # its class
    replicas: int | None  # number of shards of the sampler, and the index of the rank's
    rank: int | None
    drawn: int | None  # number of samples in an epoch
    samples: int | None  # in the dataset
    probes: list[str] | None = None  # digests of some samples
    fixed: bool = False  # whether they are the same, if they are drawn again
    epochs: list[tuple[int | None, int]] = field(default_factory=list)
    """Epoch of the sampler, and number of updates made before, whenever an epoch begins."""


@dataclass
class Record:
    """What a script has done so far on one rank."""

    launcher: str | None
    started: int  # number of ranks that it has started
    host: str
    cores: list[int]
    world: HorovodWorld | None = None
    processor: tuple[str | None, int] | None = None  # GPU or None, and threads
    calls: list[Call] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    sample_weights: list[float | None] = field(default_factory=list)
    """By update: factor of each sample of this rank in the loss; None: not seen."""
    initial_rate: float = 0.0  # the one that a scheduler scales
    seen: SeenSamples = field(default_factory=SeenSamples)
    loader: Loader | None = None
    reduced: int = 0  # number of reductions over the ranks
    graded: bool | None = None  # whether an optimizer's parameter had a gradient; None: not seen
    foreign: int = 0  # parameters of the optimizer that DistributedDataParallel does not hold
    adasum: bool = False  # whether one was by Adasum
    metrics: list[MetricReduction] = field(default_factory=list)
    stand_ins_counted: int = 0  # those of empty parts that were averaged over as samples
    written: list[str] = field(default_factory=list)  # paths
    waiting: str | None = None  # name of a call that has not returned
    done: int = 0  # number of updates
    judged: bool = False  # whether Horovod or hvdtrain's adapters were imported
    distributed: bool = False  # whether torch.distributed is used, without them
    library: str | None = None  # name of what else may distribute it
    spawned: int | None = None  # ranks that the script starts itself, by mp.spawn
    hvdtrain: bool = False  # whether its adapters are used
    resumed: bool = False  # whether a checkpoint of hvdtrain was loaded
    ended: str | None = None  # how; ``updates`` if it was ended after enough of them


Records = Sequence[Record]  # by rank


def read_record(file: Path) -> Record:
    """Return the record that ``ScriptRecorder.write`` wrote."""
    return msgspec.convert(json.loads(file.read_bytes()), Record)


class EnoughError(SystemExit):
    """The script has made its updates; a SystemExit, so that scripts do not catch it."""


class ScriptRecorder:
    """Keeps the record of this rank, in ``folder / RANK.json``.

    The script is ended after ``updates`` updates; None: not at all.
    """

    def __init__(self, folder: Path, updates: int | None, script: Path = Path("script")) -> None:
        launch = detect(os.environ)
        self.path = folder / f"{launch.rank}.json"
        self.process = os.getpid()
        self._writing = threading.RLock()  # re-entrant: writing calls `wrote`
        # Not in `wrote`, which may be called from within tempfile, while it holds a lock.
        self.scratch = tempfile.gettempdir() + os.sep
        # A project below it may have a name like those of temporary files.
        below = [
            f for f in (Path.cwd(), script.resolve().parent) if Path(self.scratch) in f.parents
        ]
        self.project = tuple(f"{folder}{os.sep}" for folder in below)
        self.limit = updates
        # What the script has made, and has not destroyed itself. DDP's reducer, the last owner of a
        # process group, waits in its destructor for a thread of gloo, which may wait for Python.
        self.kept: list[Any] = []
        self.batch = 0  # samples since the last update
        self.local: list[Array] | None = None  # gradients of this rank for the next update
        self.loss: float | None = None  # whose gradients they are
        self.sample_weight: float | None = None  # see ``Record.sample_weights``
        self.ignored = 0  # > 0 outside of the script's training
        self.shards: Any = None  # of hvdtrain, once the script has made them
        self.copy = False  # whether this rank runs what one process runs, apart from mp.spawn
        self.trained, self.stand_ins = 0, 0  # samples, and empty parts, since the last average
        self.applied: Callable[[list[Array], Callable[[], list[Array]]], Any] = lambda *_: None
        self.inspect: Callable[[], Any] = lambda: None  # reads some of the data at the end
        self.listen: Callable[[Any], None] = lambda optimizer: None  # to all of its parameters
        self.wrapped: list[Any] = []  # parameters that DistributedDataParallel holds
        self.gradient_tests: list[Callable[[Any], bool]] = []  # one per framework
        cores = sorted(os.sched_getaffinity(0))
        self.record = Record(launch.launcher, launch.size, socket.gethostname(), cores)
        self._samples = SampleLog(self.record.seen)

    @property
    def done(self) -> int:
        """Number of updates."""
        return self.record.done

    def call(self, name: str, **facts: Any) -> None:
        """Record a call, with ``facts`` about it."""
        if len(self.record.calls) < CALLS:
            self.record.calls.append(Call(name, self.done, **facts))

    def broadcast(self, name: str, values: int) -> None:
        """Record a number of broadcast values; calls within the same update are added up."""
        for index, call in enumerate(self.record.calls):
            if (call.name, call.update) == (name, self.done):
                self.record.calls[index] = replace(call, values=call.values + values)
                return
        self.call(name, values=values)

    def joined(self, world: HorovodWorld) -> None:
        """Record that the rank is initialized, and its world."""
        self.record.world = world
        self.write()

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Mark that the rank waits for the others, and ignore the updates that it makes meanwhile.

        Horovod's ``broadcast_optimizer_state``, for example, calls the optimizer's step.
        """
        self.ignored += 1
        self.record.waiting = name  # stays set if the wait ends in an error
        self.write()
        try:
            yield
            self.record.waiting = None
        finally:
            self.ignored -= 1

    def is_gradient(self, value: Any) -> bool:
        """Return whether ``value``, a tensor, is a gradient for the next update."""
        return any(test(value) for test in self.gradient_tests)

    def metric(self, name: str, before: Sequence[Any], after: Sequence[Any]) -> None:
        """Record a few values of this rank before and after their reduction."""
        metrics = self.record.metrics
        if len(metrics) < CALLS:
            flat = [
                [float(value) for part in parts for value in np.ravel(part)]
                for parts in (before, after)
            ]
            metrics.append(MetricReduction(name, *flat))
            if len(metrics) <= DETAILED:
                self.write()

    def wrote(self, target: Any) -> None:
        """Record that the rank opens ``target`` for writing, if it is a path."""
        if self.copy or not isinstance(target, str | os.PathLike):
            return
        full = os.path.abspath(target)  # noqa: PTH100 (Path would touch the disk)
        if full not in self.record.written and self._counts(full):
            self.record.written.append(full)
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
        within = path.startswith(self.scratch) and path[len(self.scratch) :].startswith(SCRATCH)
        return not within or path.startswith(self.project)

    def samples(self, values: Array) -> None:
        """Record samples, along the first axis, that the model is trained on."""
        if self.ignored or not np.ndim(values) or self._is_stand_in(values):
            return
        if values.dtype.hasobject:  # strings
            values = values.astype(bytes)
        self.batch += len(values)
        self._samples.add(values)

    def _is_stand_in(self, values: Array) -> bool:
        """Return whether hvdtrain replaces an empty part; in Keras by a sample of zeros."""
        if part := getattr(self.shards, "current", None):
            return not part.count
        return self.record.hvdtrain and len(values) == 1 and not values.any()

    def averaged(self, count: float) -> None:
        """Record a number of samples that the script averages over, if it trained on them."""
        if self.stand_ins and count == self.trained + self.stand_ins:
            self.record.stand_ins_counted += self.stand_ins
        self.trained = self.stand_ins = 0

    @property
    def detailed(self) -> bool:
        """Whether the next update is recorded in detail."""
        return self.done < DETAILED

    def rate(self, value: float, initial: float = 0.0) -> None:
        """Record the next update's learning rate; ``initial``: the one that a scheduler scales."""
        self.record.initial_rate = initial
        if len(self.record.rates) < RATES:
            self.record.rates.append(value)

    def update(
        self, before: Sequence[Array], applied: Sequence[Array], state: Sequence[Array] | None
    ) -> None:
        """Record an update: parameters and optimizer state before it, and the gradients."""
        if self.detailed:
            local = self.local
            fits = local is not None and [a.shape for a in local] == [a.shape for a in applied]
            self.record.updates.append(
                Update(
                    samples=self.batch,
                    tensors=len(before),
                    values=int(sum(value.size for value in before)),
                    before=summary(before),
                    applied=summary(applied).sample,
                    local=summary(local).sample if fits and local is not None else None,
                    state=None if state is None else summary(state).digest,
                    loss=self.loss,
                )
            )
        self.count()

    def count(self) -> None:
        """Count an update, recorded in detail or not."""
        self.record.done += 1
        if self.done <= RATES:  # known by now: a step may call a closure, with a backward pass
            self.record.sample_weights.append(self.sample_weight)
        self.sample_weight = None
        if part := getattr(self.shards, "current", None):
            self.trained += part.count
            self.stand_ins += not part.count
        self.batch, self.local, self.loss = 0, None, None
        self._samples.update()
        if self.done <= DETAILED:
            self.write()

    def end_if_enough(self) -> None:
        """End the script once it has made its updates."""
        if self.limit is not None and self.done >= self.limit and not self.record.ended:
            self.record.ended = "updates"
            raise EnoughError(0)

    def finish(self) -> None:
        """Inspect the script's data after its end, and write the record."""
        self.ignored += 1  # reading the data is no training
        self.inspect()
        self.write()
        self.process = 0  # what libraries write from now on is not the script's

    def write(self) -> None:
        """Replace the file atomically; do nothing in a worker process of a data loader."""
        if os.getpid() != self.process:
            return
        with self._writing:
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(self.record, default=vars))
            partial.rename(self.path)


def summary(tensors: Sequence[Array]) -> Values:
    """Return a digest of all bytes of the tensors, and a sample of their values."""
    digest = hashlib.sha256()
    count = max(1, min(PER_TENSOR, VALUES // max(1, len(tensors))))
    sample: list[float] = []
    for tensor in tensors:
        flat = np.ascontiguousarray(tensor).ravel()
        digest.update(flat.tobytes())
        chosen = np.linspace(0, flat.size - 1, min(count, flat.size)).astype(int)
        sample += flat[chosen].astype(np.float64).tolist()
    return Values(digest.hexdigest(), sample)
