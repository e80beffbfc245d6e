"""Operations: what the library carried out, on one tensor or on several fused into one.

An operation is one collective. Tensors fused into one are told by their collective's bars
(MPI_ALLREDUCE, for one): these begin one right after another, before any of them ends and before
any other bar begins. Its time goes from the first beginning to the last end of them, without the
copies around it.
"""

from __future__ import annotations

from typing import Any

from hvdtrain.timeline.bars import Operation, Phase, Tensor, bytes_of
from hvdtrain.timeline.samples import Sample

SMALL = 1 << 20  # bytes; the time of a smaller operation is mostly latency, not bandwidth
SHAPES = 10_000  # whose sizes are kept

# The totals of all operations: how many, bytes, microseconds, those of the small ones.
COUNT, BYTES, TIME, SMALL_TIME = range(4)


class Operations:
    """All operations of one implementation, such as MPI_ALLREDUCE."""

    def __init__(self) -> None:
        self.tensors = Sample()  # a value an operation, as below
        self.nbytes = Sample()
        self.microseconds = Sample()
        self.small = 0.0  # microseconds of those of less than SMALL bytes

    def add(self, operation: Operation, microseconds: float) -> None:
        """Take an operation whose tensors have all ended."""
        self.tensors.add(operation.tensors)
        self.nbytes.add(operation.nbytes)
        self.microseconds.add(microseconds)
        if operation.nbytes < SMALL:
            self.small += microseconds


class Fusion:
    """Puts the bars of fused tensors together again.

    Attributes:
        operations: by implementation.
        totals: of all of them, by ``COUNT`` and so on.
        run: the last bar that began is of this operation; to be set to None when another begins.
        idle: no operation has begun in this cycle; to be set at the beginning of a cycle.
        busy_cycles: those in which one began.
    """

    def __init__(self) -> None:
        self.operations: dict[str, Operations] = {}
        self.totals = [0.0] * 4
        self.run: Operation | None = None
        self.idle = True
        self.busy_cycles = 0
        self._sizes: dict[tuple[str, str], int] = {}

    def begin(self, tensor: Tensor, phase: Phase, time: float) -> None:
        """The bar of a collective begins on ``tensor``."""
        operation = tensor.operation
        if operation is None:  # else one operation in several parts, NCCL and then MPI
            operation = self.run
            if operation is None or operation.phase is not phase or operation.ended:
                operation = Operation(phase, time)
                self.busy_cycles += self.idle
                self.idle = False
            operation.tensors += 1
            operation.left += 1
            tensor.operation = operation
        self.run = operation

    def end(self, tensor: Tensor, args: Any) -> None:
        """The operation on ``tensor`` is over; ``args`` tell type and shape of the result."""
        operation, tensor.operation = tensor.operation, None
        if operation is None:
            return
        if isinstance(args, dict):
            key = str(args.get("dtype")), str(args.get("shape"))
            size = self._sizes.get(key)
            if size is None:
                if len(self._sizes) >= SHAPES:  # of what is gathered they may never be the same
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
