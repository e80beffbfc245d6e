"""Elements of a timeline: phases, tensors, operations, and the rows under which they are counted.

Definitions:

*Bar*: from a ``B`` event to the ``E`` event that closes it, on one tensor. The bars of a tensor
nest: NEGOTIATE_ALLREDUCE; then ALLREDUCE, and within it its activities (MEMCPY_IN_...,
MPI_ALLREDUCE ...). A bar whose beginning or end is not in the file (or slice) is not counted.

*Time of a phase*: ``tensor_seconds`` is the sum of its bars over all tensors, ``seconds`` the time
in which at least one of its bars was open. If k tensors are fused, the first is about k times
the second.

*Operation*: a collective executed by the library, on one tensor or on several fused ones. Fused
tensors are recognized by the bars of their collective (e.g. MPI_ALLREDUCE): these begin one right
after another, before any of them ends and before any other bar begins. The operation lasts from the
first beginning to the last end of them, without the copies around it.

*State*: at each moment rank 0 is *communicating* (the bar of an operation is open), otherwise
*waiting* (a negotiation is open: some rank has submitted a tensor, another has not), otherwise
*neither* (no tensor is submitted: computing, loading data, etc.). The three add up to all time.
"""

from __future__ import annotations

import re
import statistics
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

MICRO = 1e-6
KEPT = 1 << 13  # number of values kept of a sample

# The phases of a tensor, in order of time.
NEGOTIATE, OPERATION, SET_UP = "negotiate", "operation", "set-up"
WAIT_FOR_DATA, QUEUE, COPY_IN = "wait for data", "queue", "memcpy in"
COLLECTIVE, COPY_OUT, OTHER = "collective", "memcpy out", "other"
KINDS = (NEGOTIATE, OPERATION, SET_UP, WAIT_FOR_DATA, QUEUE, COPY_IN, COLLECTIVE, COPY_OUT, OTHER)

# States of rank 0.
NEITHER, WAITING, COMMUNICATING = range(3)
STATES = ("neither", "waiting", "communicating")

# Activity names: horovod/common/common.h and the operations under horovod/common/ops.
_ACTIVITIES = (
    (r"INIT_.*|ALLOCATE_.*", SET_UP),
    (r"WAIT_FOR_(OTHER_TENSOR_)?DATA", WAIT_FOR_DATA),
    (r"QUEUE", QUEUE),
    (r"MEMCPY_IN_.*", COPY_IN),
    (r"MEMCPY_OUT_.*|COPY_ALLGATHER_OUTPUT", COPY_OUT),
    (r"(MPI|NCCL|GLOO|CCL|DDL|MLSL|SHARP)_.*", COLLECTIVE),
)
_OF_STEP = ("NEGOTIATE_ALLREDUCE", "NEGOTIATE_ADASUM", "NEGOTIATE_REDUCESCATTER")
MAX_NAMES = 50_000  # tensor names with a separate row; others share one row
OTHERS = "(other tensors)"
SMALL = 1 << 20  # bytes; the time of a smaller operation is mostly latency, not bandwidth
MAX_SHAPES = 10_000  # with a cached size
# PyTorch numbers unnamed tensors, TensorFlow uses one name for all of them.
_NAMELESS = re.compile(
    r"(?P<kind>.*\.noname)\.\d+|Horovod(Allreduce|Allgather|Broadcast|Alltoall|Reducescatter)"
)
_SIZES = {
    **dict.fromkeys(("uint8", "int8", "bool"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "float32"), 4),
    **dict.fromkeys(("int64", "float64"), 8),
}


def kind_of(name: str, depth: int) -> str:
    """Return the phase of a bar called ``name`` that is nested in ``depth`` bars."""
    if name.startswith("NEGOTIATE_"):
        return NEGOTIATE
    for pattern, kind in _ACTIVITIES:
        if re.fullmatch(pattern, name):
            return kind
    return OTHER if depth else OPERATION  # ALLREDUCE etc.: the outermost bar


def bytes_of(dtype: str, shape: str) -> int:
    """Return the bytes of a tensor from the arguments of its operation: ``float32``, ``[64, 64]``.

    0 if they are unknown.
    """
    return _SIZES.get(dtype, 0) * prod(map(int, re.findall(r"\d+", shape)))


@dataclass(frozen=True)
class TimeStatistics:
    """Statistics of a sample of times, in seconds."""

    median: float
    mean: float
    total: float


class Sample:
    """Count, sum and maximum of a stream of values, and its quantiles.

    Quantiles are exact up to 8,192 values. Beyond, every second value is dropped, repeatedly: an
    even, deterministic selection of the whole stream.
    """

    __slots__ = ("_every", "_kept", "count", "maximum", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.maximum = 0.0  # 0 if there are no values
        self._every = 1
        self._kept = array("d")

    def add(self, value: float) -> None:
        """Add a value, 0 or more."""
        if self.count % self._every == 0:
            self._kept.append(value)
            if len(self._kept) > KEPT:
                self._kept = self._kept[::2]
                self._every *= 2
        self.count += 1
        self.total += value
        if value > self.maximum:
            self.maximum = value

    @property
    def mean(self) -> float:
        """Return the mean; 0 if there are no values."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, fraction: float) -> float:
        """Return the quantile for ``fraction``; 0 if there are no values."""
        ordered = sorted(self._kept)
        return ordered[int(fraction * (len(ordered) - 1))] if ordered else 0.0

    @property
    def times(self) -> TimeStatistics:
        """Return the statistics in seconds, of values in microseconds."""
        return TimeStatistics(self.median * MICRO, self.mean * MICRO, self.total * MICRO)

    @property
    def median(self) -> float:
        """Return the median; 0 if there are no values."""
        return statistics.median(self._kept) if self._kept else 0.0


@dataclass(slots=True, eq=False)
class Phase:
    """All bars of one name; ``kind`` is one of ``KINDS``."""

    name: str
    kind: str
    of_step: bool = field(init=False)  # the negotiation of a reduction, e.g. of a gradient
    open: int = 0  # number of its bars that are open now
    since: float = 0  # beginning of the first open bar
    wall: float = 0  # microseconds in which at least one was open

    def __post_init__(self) -> None:
        self.of_step = self.name in _OF_STEP


@dataclass(slots=True, eq=False)
class Cell:
    """All bars of one name on one tensor: their number, and their sum in microseconds."""

    phase: Phase
    count: int = 0
    total: float = 0


@dataclass(slots=True, eq=False)
class Operation:
    """One collective executed by the library, on one tensor or on several fused ones."""

    phase: Phase  # the implementation, e.g. MPI_ALLREDUCE
    start: float  # of the collective itself, without the copies around it; microseconds
    end: float
    ended: bool = False  # whether one of its bars has ended
    tensors: int = 0  # number of fused tensors
    left: int = 0  # number of tensors that have not ended yet
    nbytes: int = 0  # of all tensors; complete when the last has ended


@dataclass(slots=True, eq=False)
class TensorRow:
    """The totals of one tensor name: ``cells`` by the name of the bar."""

    name: str
    cells: dict[str, Cell] = field(default_factory=dict)
    nbytes: int = 0  # of its last operation


@dataclass(slots=True, eq=False)
class Tensor:
    """A "process" of the trace, and its state while the file is read."""

    row: TensorRow  # under which its bars are counted
    lasting: bool = True  # it has a name, so it recurs in the next step
    # Drop it when its operation ends: its name is a number ("allreduce.noname.7") that never
    # recurs, or there are too many names.
    once: bool = False
    cells: dict[str, Cell] = field(init=False)  # those of the row
    bars: list[tuple[Cell, float]] = field(default_factory=list)  # open, outermost first: start
    ticks: list[tuple[float, str]] = field(default_factory=list)  # when each rank was ready
    step: int = 0  # in which it was last negotiated
    operation: Operation | None = None  # the current operation

    def __post_init__(self) -> None:
        self.cells = self.row.cells


class Rows:
    """All tensors by their number in the file, rows by name, phases by name and kind."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.by_name: dict[str, TensorRow] = {}
        self.phases: dict[tuple[str, str], Phase] = {}

    def add(self, number: int, name: str) -> None:
        """Assign ``name`` to the tensor ``number`` from now on.

        Beyond ``MAX_NAMES`` names, drop it: those that recur in every step are known by then, and
        names that never recur ("loss.step.7") would fill the memory.
        """
        nameless = _NAMELESS.fullmatch(name)
        once = bool(nameless and nameless["kind"])
        group = f"{nameless['kind']}.*" if nameless and once else name
        if group not in self.by_name and len(self.by_name) >= MAX_NAMES:
            self.tensors.pop(number, None)
            return
        row = self.by_name.setdefault(group, TensorRow(group))
        self.tensors[number] = Tensor(row, lasting=not nameless, once=once)

    def add_unknown(self, number: int) -> None:
        """Add the tensor ``number``, whose name was lost or dropped."""
        if len(self.by_name) < MAX_NAMES:
            self.add(number, f"tensor {number}")
        else:
            row = self.by_name.setdefault(OTHERS, TensorRow(OTHERS))
            self.tensors[number] = Tensor(row, lasting=False, once=True)

    def cell(self, tensor: Tensor, name: str) -> Cell:
        """Add a cell for the bars called ``name`` on the tensor."""
        kind = kind_of(name, len(tensor.bars))
        phase = self.phases.setdefault((name, kind), Phase(name, kind))
        cell = tensor.cells[phase.name] = Cell(phase)
        return cell


@dataclass(slots=True)
class Operations:
    """All operations of one implementation, e.g. MPI_ALLREDUCE."""

    tensors: Sample = field(default_factory=Sample)  # one value per operation, as below
    nbytes: Sample = field(default_factory=Sample)
    microseconds: Sample = field(default_factory=Sample)
    small: float = 0.0  # microseconds of operations of less than SMALL bytes

    def add(self, operation: Operation, microseconds: float) -> None:
        """Add an operation whose tensors have all ended."""
        self.tensors.add(operation.tensors)
        self.nbytes.add(operation.nbytes)
        self.microseconds.add(microseconds)
        if operation.nbytes < SMALL:
            self.small += microseconds

    @property
    def sums(self) -> tuple[float, float, float, float]:
        """Return their number, bytes, microseconds, and microseconds of the small ones."""
        times = self.microseconds
        return times.count, self.nbytes.total, times.total, self.small


class Fusion:
    """Combines the bars of fused tensors into operations."""

    def __init__(self) -> None:
        self.operations: dict[str, Operations] = {}  # by implementation
        self.run: Operation | None = None  # of the bar that began last; None: of another kind
        self.idle = True  # no operation has begun in this cycle
        self.busy_cycles = 0  # cycles in which an operation began
        self._sizes: dict[tuple[str, str], int] = {}

    def begin(self, tensor: Tensor, phase: Phase, time: float) -> None:
        """Begin the bar of a collective on ``tensor``."""
        operation = tensor.operation
        if operation is None:  # otherwise an operation in several parts, e.g. NCCL, then MPI
            operation = self.run
            if operation is None or operation.phase is not phase or operation.ended:
                operation = Operation(phase, time, time)
                self.busy_cycles += self.idle
                self.idle = False
            operation.tensors += 1
            operation.left += 1
            tensor.operation = operation
        self.run = operation

    def end(self, tensor: Tensor, args: Mapping[str, Any] | None) -> None:
        """End the operation on ``tensor``; ``args``: dtype and shape of the result."""
        operation, tensor.operation = tensor.operation, None
        if operation is None:
            return
        if args:
            key = str(args.get("dtype")), str(args.get("shape"))
            size = self._sizes.get(key)
            if size is None:
                if len(self._sizes) >= MAX_SHAPES:  # shapes of gathered tensors may never recur
                    self._sizes.clear()
                size = self._sizes[key] = bytes_of(*key)
            operation.nbytes += size
            tensor.row.nbytes = size
        operation.left -= 1
        if not operation.left:
            name = operation.phase.name
            if name not in self.operations:
                self.operations[name] = Operations()
            self.operations[name].add(operation, operation.end - operation.start)
