"""What a timeline is made of: phases, tensors, operations, and the rows that they count under.

What is counted, exactly:

*Bar*: from a ``B`` event to the ``E`` event that closes it, on one tensor. The bars of a tensor
nest: NEGOTIATE_ALLREDUCE; then ALLREDUCE, and within it what is done for it (MEMCPY_IN_...,
MPI_ALLREDUCE ...). A bar whose beginning or end is not in the file (or slice) is not counted.

*Time of a phase*: ``tensor_seconds`` is the sum of its bars over all tensors, ``seconds`` the time
in which at least one of its bars was open. Where k tensors are fused the first is about k times
the second.

*Operation*: what the library carried out, on one tensor or on several fused into one. Fused tensors
are recognized by the bars of their collective (such as MPI_ALLREDUCE): these begin one right after
another, before any of them ends and before any other bar begins. The operation lasts from the first
beginning to the last end of them, without the copies around it.

*State*: at each moment rank 0 is *communicating* (the bar of an operation is open), else *waiting*
(a negotiation is open: some rank has submitted a tensor, another has not), else *neither* (no
tensor is submitted: computing, loading data, anything). The three add up to all time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from typing import Any

from hvdtrain.commands.timeline.streaming_stats import Sample

Facts = dict[str, Any]
"""Plain data, ready for JSON."""

# The phases of a tensor, in the order in which it goes through them.
NEGOTIATE, OPERATION, SET_UP = "negotiate", "operation", "set-up"
WAIT_FOR_DATA, QUEUE, COPY_IN = "wait for data", "queue", "memcpy in"
COLLECTIVE, COPY_OUT, OTHER = "collective", "memcpy out", "other"
KINDS = (
    *(NEGOTIATE, OPERATION, SET_UP, WAIT_FOR_DATA, QUEUE),
    *(COPY_IN, COLLECTIVE, COPY_OUT, OTHER),
)

# What goes on at a moment, seen from rank 0.
NEITHER, WAITING, COMMUNICATING = range(3)
STATES = ("neither", "waiting", "communicating")

# The totals of all operations: count, bytes, microseconds, microseconds of the small ones.
COUNT, BYTES, TIME, SMALL_TIME = range(4)

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
LARGEST = 60  # digits of all sizes of a tensor together
MOST = 50_000  # names with a row of their own; any more are counted together
OTHERS = "(other tensors)"
SMALL = 1 << 20  # bytes; the time of a smaller operation is mostly latency, not bandwidth
SHAPES = 10_000  # whose sizes are kept
# PyTorch numbers the tensors that were given no name, TensorFlow calls them all alike.
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
    """Return the phase that a bar called ``name`` belongs to; ``depth`` bars lie around it."""
    if name.startswith("NEGOTIATE_"):
        return NEGOTIATE
    for form, kind in _ACTIVITIES:
        if re.fullmatch(form, name):
            return kind
    return OTHER if depth else OPERATION  # ALLREDUCE ...: all that is done with the tensor


def bytes_of(dtype: str, shape: str) -> int:
    """Return the bytes of a tensor from the arguments of its operation: ``float32``, ``[64, 64]``.

    0 where they are unknown, or more than any memory holds (a damaged file).
    """
    sizes = re.findall(r"\d+", shape)
    if sum(map(len, sizes)) > LARGEST:
        return 0
    return _SIZES.get(dtype, 0) * prod(map(int, sizes))


@dataclass(slots=True, eq=False)
class Phase:
    """All bars of one name; ``kind`` is one of ``KINDS``."""

    name: str
    kind: str
    of_step: bool = field(init=False)  # the negotiation of a reduction, such as of a gradient
    open: int = 0  # how many of its bars are open now
    since: float = 0  # when the first of those began
    wall: float = 0  # microseconds in which at least one was open

    def __post_init__(self) -> None:
        self.of_step = self.name in _OF_STEP


@dataclass(slots=True, eq=False)
class Cell:
    """All bars of one name on one tensor: how many, and microseconds in all."""

    phase: Phase
    count: int = 0
    total: float = 0


@dataclass(slots=True, eq=False)
class Operation:
    """One collective that the library carried out, on one tensor or on several fused ones."""

    phase: Phase  # the implementation, such as MPI_ALLREDUCE
    start: float  # of the collective itself, without the copies around it; microseconds
    end: float
    ended: bool = False  # one of its bars has
    tensors: int = 0  # how many were fused
    left: int = 0  # tensors that have not ended yet
    nbytes: int = 0  # of all of them; complete when the last has ended


@dataclass(slots=True, eq=False)
class Row:
    """The totals of one tensor name: ``cells`` by the name of the bar."""

    name: str
    cells: dict[str, Cell] = field(default_factory=dict)
    nbytes: int = 0  # of its last operation


@dataclass(slots=True, eq=False)
class Tensor:
    """A "process" of the trace, and its state while the file is read."""

    row: Row  # that its bars count under
    lasting: bool = True  # it has a name of its own, so it recurs in the next step
    # Drop it when its operation ends: its name is a number ("allreduce.noname.7") that never
    # recurs, or there are too many names.
    once: bool = False
    cells: dict[str, Cell] = field(init=False)  # those of the row
    bars: list[tuple[Cell, float]] = field(default_factory=list)  # open, outermost first: start
    ticks: list[tuple[float, str]] = field(default_factory=list)  # when each rank was ready
    step: int = 0  # in which it was last negotiated
    operation: Operation | None = None  # under way on it

    def __post_init__(self) -> None:
        self.cells = self.row.cells


class Rows:
    """All tensors by their number in the file, rows by name, phases by name and kind."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.by_name: dict[str, Row] = {}
        self.phases: dict[tuple[str, str], Phase] = {}

    def add(self, number: int, name: str) -> None:
        """Give the tensor of that number this name from now on.

        Beyond ``MOST`` names, drop it: those that recur in every step have come by then, and names
        that never recur ("loss.step.7") would fill the memory.
        """
        nameless = _NAMELESS.fullmatch(name)
        once = bool(nameless and nameless["kind"])
        group = f"{nameless['kind']}.*" if nameless and once else name
        if group not in self.by_name and len(self.by_name) >= MOST:
            self.tensors.pop(number, None)
            return
        row = self.by_name.setdefault(group, Row(group))
        self.tensors[number] = Tensor(row, lasting=not nameless, once=once)

    def add_unknown(self, number: int) -> None:
        """Add the tensor of that number, whose name was lost or dropped."""
        if len(self.by_name) < MOST:
            self.add(number, f"tensor {number}")
        else:
            row = self.by_name.setdefault(OTHERS, Row(OTHERS))
            self.tensors[number] = Tensor(row, lasting=False, once=True)

    def cell(self, tensor: Tensor, name: str) -> Cell:
        """Add a cell for the bars of that name on the tensor."""
        kind = kind_of(name, len(tensor.bars))
        phase = self.phases.setdefault((name, kind), Phase(name, kind))
        tensor.cells[name] = Cell(phase)
        return tensor.cells[name]


@dataclass(slots=True)
class Operations:
    """All operations of one implementation, such as MPI_ALLREDUCE."""

    tensors: Sample = field(default_factory=Sample)  # one value per operation, as below
    nbytes: Sample = field(default_factory=Sample)
    microseconds: Sample = field(default_factory=Sample)
    small: float = 0.0  # microseconds of those of less than SMALL bytes

    def add(self, operation: Operation, microseconds: float) -> None:
        """Take an operation whose tensors have all ended."""
        self.tensors.add(operation.tensors)
        self.nbytes.add(operation.nbytes)
        self.microseconds.add(microseconds)
        if operation.nbytes < SMALL:
            self.small += microseconds


class Fusion:
    """Joins the bars of fused tensors to operations."""

    def __init__(self) -> None:
        self.operations: dict[str, Operations] = {}  # by implementation
        self.totals = [0.0] * 4  # of all of them, by ``COUNT`` and so on
        self.run: Operation | None = None  # of the bar that began last; None: another bar has begun
        self.idle = True  # no operation has begun in this cycle
        self.busy_cycles = 0  # that began an operation
        self._sizes: dict[tuple[str, str], int] = {}

    def begin(self, tensor: Tensor, phase: Phase, time: float) -> None:
        """Begin the bar of a collective on ``tensor``."""
        operation = tensor.operation
        if operation is None:  # else an operation in several parts, such as NCCL and then MPI
            operation = self.run
            if operation is None or operation.phase is not phase or operation.ended:
                operation = Operation(phase, time, time)
                self.busy_cycles += self.idle
                self.idle = False
            operation.tensors += 1
            operation.left += 1
            tensor.operation = operation
        self.run = operation

    def end(self, tensor: Tensor, args: Any) -> None:
        """End the operation on ``tensor``; ``args`` give dtype and shape of the result."""
        operation, tensor.operation = tensor.operation, None
        if operation is None:
            return
        if isinstance(args, dict):
            key = str(args.get("dtype")), str(args.get("shape"))
            size = self._sizes.get(key)
            if size is None:
                if len(self._sizes) >= SHAPES:  # shapes of what is gathered may never recur
                    self._sizes.clear()
                size = self._sizes[key] = bytes_of(*key)
            operation.nbytes += size
            tensor.row.nbytes = size
        operation.left -= 1
        if not operation.left:
            self._count(operation)

    def _count(self, operation: Operation) -> None:
        name, microseconds = operation.phase.name, operation.end - operation.start
        if name not in self.operations:
            self.operations[name] = Operations()
        self.operations[name].add(operation, microseconds)
        totals = self.totals
        totals[COUNT] += 1
        totals[BYTES] += operation.nbytes
        totals[TIME] += microseconds
        if operation.nbytes < SMALL:
            totals[SMALL_TIME] += microseconds
