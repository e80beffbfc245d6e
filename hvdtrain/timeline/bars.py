"""What a timeline is made of: phases, tensors and operations, and what their names mean.

What is counted, exactly:

*Bar*: from a ``B`` event to the ``E`` event that closes it, on one tensor. The bars of a tensor
nest: NEGOTIATE_ALLREDUCE; then ALLREDUCE, and within it what is done for it (MEMCPY_IN_...,
MPI_ALLREDUCE ...). A bar whose beginning or end is not in the file (or slice) is not counted.

*Time of a phase*: ``tensor_seconds`` is the sum of its bars over all tensors, ``seconds`` the time
in which at least one of its bars was open. Where k tensors are fused the first is about k times
the second.

*State*: at each moment rank 0 is *communicating* (the bar of an operation is open), else *waiting*
(a negotiation is open: some rank has handed a tensor in, another has not), else *neither* (no
tensor is in Horovod's hands: computing, loading data, anything). The three add up to all time.
"""

from __future__ import annotations

import re
from math import prod

# The phases of a tensor, in the order in which it goes through them.
NEGOTIATE = "negotiate"
OPERATION = "operation"
SET_UP = "set-up"
WAIT_FOR_DATA = "wait for data"
QUEUE = "queue"
COPY_IN = "memcpy in"
COLLECTIVE = "collective"
COPY_OUT = "memcpy out"
OTHER = "other"
KINDS = (
    NEGOTIATE,
    OPERATION,
    SET_UP,
    WAIT_FOR_DATA,
    QUEUE,
    COPY_IN,
    COLLECTIVE,
    COPY_OUT,
    OTHER,
)

# What goes on at a moment, seen from rank 0.
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
LARGEST = 60  # digits of all sizes of a tensor together
_SIZES = {
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "bool": 1,
}


def kind_of(name: str, depth: int) -> str:
    """The phase that a bar called ``name`` belongs to; ``depth`` bars lie around it."""
    if name.startswith("NEGOTIATE_"):
        return NEGOTIATE
    for form, kind in _ACTIVITIES:
        if re.fullmatch(form, name):
            return kind
    return OTHER if depth else OPERATION  # ALLREDUCE ...: all that is done with the tensor


def bytes_of(dtype: str, shape: str) -> int:
    """Bytes of a tensor, as the end of its operation tells it: ``float32``, ``[64, 64]``.

    0 where they are not known: no memory holds as many as an odd file may tell.
    """
    sizes = re.findall(r"\d+", shape)
    if sum(map(len, sizes)) > LARGEST:
        return 0
    return _SIZES.get(dtype, 0) * prod(map(int, sizes))


class Phase:
    """All bars of one name.

    Attributes:
        name: as in the file.
        kind: one of ``KINDS``.
        of_step: a negotiation of what is summed up in a step, such as a gradient.
        open: how many of its bars are open now.
        since: when the first of those began.
        wall: microseconds in which at least one was open.
    """

    __slots__ = ("kind", "name", "of_step", "open", "since", "wall")

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind
        self.of_step = name in _OF_STEP
        self.open = 0
        self.since = 0
        self.wall = 0


class Cell:
    """All bars of one name on one tensor: how many, and microseconds in all."""

    __slots__ = ("count", "phase", "total")

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self.count = 0
        self.total = 0


class Operation:
    """One collective that the library carried out, on one tensor or on several fused ones.

    Attributes:
        phase: of its collective: the implementation, MPI_ALLREDUCE for one.
        tensors: how many were fused.
        nbytes: of all of them; known when the last has ended.
        start, end: of the collective itself, without the copies around it; microseconds.
        ended: one of its bars has ended.
        left: tensors whose end has not been seen.
    """

    __slots__ = ("end", "ended", "left", "nbytes", "phase", "start", "tensors")

    def __init__(self, phase: Phase, start: float) -> None:
        self.phase = phase
        self.start = self.end = start
        self.ended = False
        self.tensors = self.left = 0
        self.nbytes = 0


class Row:
    """What the bars of one name of tensors come to: ``cells`` by the name of the bar."""

    __slots__ = ("cells", "name", "nbytes")

    def __init__(self, name: str) -> None:
        self.name = name
        self.cells: dict[str, Cell] = {}
        self.nbytes = 0  # of its last operation


class Tensor:
    """A "process" of the trace, and its state while the file is read.

    Attributes:
        row: what its bars are counted under.
        cells: those of the row.
        lasting: it has a name of its own, by which it comes back in the next step.
        once: it is dropped when its operation ends: it has a number for a name
            ("allreduce.noname.7") and never comes back, or there are too many names.
        bars: the open ones, outermost first: cell and start.
        ticks: when the ranks were ready in the negotiation that is open.
        step: in which it was last negotiated.
        operation: the one that works on it now.
    """

    __slots__ = ("bars", "cells", "lasting", "once", "operation", "row", "step", "ticks")

    def __init__(self, row: Row, *, lasting: bool = True, once: bool = False) -> None:
        self.row, self.cells, self.lasting, self.once = row, row.cells, lasting, once
        self.bars: list[tuple[Cell, float]] = []
        self.ticks: list[tuple[float, str]] = []
        self.step = 0
        self.operation: Operation | None = None
