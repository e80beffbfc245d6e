"""The collectives that the project needs, as an interface; each library is one file beside this."""

from __future__ import annotations

import json
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from hvdtrain.errors import CheckpointError, HvdtrainError, TrainingError, UsageError
from hvdtrain.system.runtime.exit import agreed

Result = TypeVar("Result")
Bytes = NDArray[np.uint8]
Vector = NDArray[np.float64]
Operations = dict[str, Callable[[], object]]  # what does a collective, by its name in the lesson
Tensor = Any  # of the library: a NumPy array, a torch or a TensorFlow tensor, on a GPU too

CHUNK = 2**28  # bytes in one broadcast: MPI counts elements in a 32-bit int

KINDS = {
    kind.__name__: kind for kind in (HvdtrainError, UsageError, CheckpointError, TrainingError)
}


class Communicator(ABC):
    """Collectives over all ranks; each must be called by all of them, in the same order."""

    rank: int
    size: int

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0, the one that broadcasts, and acts for all in ``on_root``."""
        return self.rank == 0

    @abstractmethod
    def gather(self, data: bytes) -> list[bytes]:
        """Return the ``data`` of every rank, by rank; lengths may differ (MPI's allgather)."""

    @abstractmethod
    def broadcast(self, data: Bytes) -> Bytes:
        """Return rank 0's ``data``; all ranks give an array of the same length."""

    @abstractmethod
    def sum(self, values: Vector) -> Vector:
        """Return the element-wise sum of a float64 vector over all ranks (MPI's allreduce)."""

    def tensor(self, length: int, value: float) -> Tensor:
        """Return ``length`` float32 of ``value``, on the device where the library sums."""
        return np.full(length, value, np.float32)

    @abstractmethod
    def sum_tensor(self, tensor: Tensor, name: str) -> Tensor:
        """Sum ``tensor`` over all ranks, in place where the library can, and return the sum.

        On a GPU it may still be under way: see ``synchronize``.

        Args:
            tensor: contiguous, of the same shape and type on all ranks.
            name: of this sum, the same on all ranks.
        """

    def operations(self, count: int) -> Operations:
        """Return the collectives of this library, each on zeros and to be called again and again.

        The longer one of a rank's two buffers is the message: ``count`` float32, or, where it has a
        part per rank, the nearest that makes equal parts of one float32 or more.
        """
        tensor = self.tensor(count, 0.0)
        return {"allreduce": lambda: self.sum_tensor(tensor, f"allreduce.{count}")}

    def part_of(self, count: int) -> int:
        """Return the length of a rank's part of ``count`` float32, 1 or more."""
        return max(1, round(count / self.size))

    def wait_for_all(self) -> None:
        """Wait until all ranks are here; where that can be long, without taking a core."""
        self.gather(b"")

    def synchronize(self) -> None:  # noqa: B027 (most sum on the CPU)
        """Wait until this rank's GPU has done what was begun."""

    def close(self) -> None:  # noqa: B027 (MPI ends with the process)
        """End the library in good order; all ranks call it together."""

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Return rank 0's ``data``, of any length, on every rank."""
        length = int.from_bytes(self.gather(len(data).to_bytes(8, "big"))[0], "big")
        buffer = np.zeros(length, np.uint8)
        if self.is_root:
            buffer[:] = np.frombuffer(data, np.uint8)
        for start in range(0, length, CHUNK):
            buffer[start : start + CHUNK] = self.broadcast(buffer[start : start + CHUNK])
        return buffer.tobytes()

    def broadcast_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return rank 0's arrays by name, whatever the other ranks hold."""
        header = json.dumps([[k, v.dtype.str, v.shape] for k, v in arrays.items()]).encode()
        received = {}
        for name, dtype, shape in json.loads(self.broadcast_bytes(header)):
            own = arrays[name].tobytes() if self.is_root else b""
            data = self.broadcast_bytes(own)
            received[name] = np.frombuffer(data, dtype).reshape(shape)
        return received

    def together(self, action: Callable[[], Result], *, alike: bool = False) -> Result:
        """Do ``action`` on every rank; where it fails for one, the same error is raised on all.

        Without this, the ranks that succeeded would wait for ever in their next collective.

        Args:
            action: what to do.
            alike: the action is one rank's on behalf of all, so the error need not name it.

        Raises:
            HvdtrainError: of the first failing rank's kind (of ``KINDS``, the nearest), naming it
                and its host unless it is everybody's.
        """
        failure: HvdtrainError | None = None
        try:
            result = action()
        except HvdtrainError as error:
            failure = error
        told = ""
        if failure:
            # One that is not known here, of a task say, is told as what it is derived from.
            kind = next(kind for kind in type(failure).__mro__ if kind in KINDS.values())
            told = json.dumps([kind.__name__, socket.gethostname(), str(failure)])
        answers = [answer.decode() for answer in self.gather(told.encode())]
        failed = {rank: json.loads(answer) for rank, answer in enumerate(answers) if answer}
        if failed:
            first, (name, host, text) = next(iter(failed.items()))
            same = all(text == other for _, _, other in failed.values())
            everyone = len(failed) == self.size and same
            who = "" if alike or everyone else f"rank {first} on {host}: "
            raise agreed(KINDS[name](who + text)) from failure
        return result

    def on_root(self, action: Callable[[], Result]) -> Result | None:
        """Do ``action`` on rank 0 alone; all ranks wait for it, and raise if it fails.

        Returns:
            The result on rank 0, None elsewhere.
        """
        return self.together(lambda: action() if self.is_root else None, alike=True)


def split(joined: bytes, lengths: Sequence[int]) -> list[bytes]:
    """Cut ``joined`` into pieces of ``lengths``."""
    ends = np.cumsum(lengths)
    return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]


class Alone(Communicator):
    """One process, without any library."""

    rank = 0
    size = 1

    @override
    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    @override
    def broadcast(self, data: Bytes) -> Bytes:
        return data

    @override
    def sum(self, values: Vector) -> Vector:
        return values

    @override
    def sum_tensor(self, tensor: Tensor, name: str) -> Tensor:
        return tensor
