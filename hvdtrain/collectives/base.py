"""Interface of the collectives used by hvdtrain; each library is a module of this package."""

from __future__ import annotations

import json
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from hvdtrain.errors import CheckpointError, HvdtrainError, TrainingError, UsageError
from hvdtrain.system.runtime.exit import agreed

Result = TypeVar("Result")
Bytes = NDArray[np.uint8]
Vector = NDArray[np.float64]
Operations = dict[str, Callable[[], object]]  # functions by the name of the collective
Tensor = Any  # a NumPy array, or a torch or TensorFlow tensor on CPU or GPU

CHUNK = 2**28  # maximum bytes of a message: MPI counts elements in a 32-bit int

KINDS = {
    kind.__name__: kind for kind in (HvdtrainError, UsageError, CheckpointError, TrainingError)
}


class Communicator(ABC):
    """Collectives over all ranks; all ranks must call them in the same order."""

    rank: int
    size: int

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0, the root of ``broadcast`` and ``on_root``."""
        return self.rank == 0

    @abstractmethod
    def gather(self, data: bytes) -> list[bytes]:
        """Return the ``data`` of all ranks, by rank; lengths may differ (MPI's allgatherv)."""

    @abstractmethod
    def broadcast(self, data: Bytes) -> Bytes:
        """Return rank 0's ``data``; all ranks pass an array of the same length."""

    @abstractmethod
    def sum(self, values: Vector) -> Vector:
        """Return the element-wise sum of a float64 vector over all ranks (MPI's allreduce)."""

    def tensor(self, length: int, value: float) -> Tensor:
        """Return a float32 tensor of ``length`` elements ``value`` on the library's device."""
        return np.full(length, value, np.float32)

    @abstractmethod
    def sum_tensor(self, tensor: Tensor, name: str) -> Tensor:
        """Sum ``tensor`` over all ranks, in place if supported, and return the sum.

        On a GPU the operation may be asynchronous: see ``synchronize``.

        Args:
            tensor: contiguous tensor of the same shape and type on all ranks.
            name: name of this operation, the same on all ranks.
        """

    def operations(self, count: int) -> Operations:
        """Return the collectives of this library as functions that can be called repeatedly.

        The larger buffer of a rank has ``count`` float32 zeros, or, if it has a part per rank, the
        nearest number with equal parts of at least one float32.
        """
        tensor = self.tensor(count, 0.0)
        return {"allreduce": lambda: self.sum_tensor(tensor, f"allreduce.{count}")}

    def part_of(self, count: int) -> int:
        """Return the length of a rank's part of ``count`` elements, at least 1."""
        return max(1, round(count / self.size))

    def wait_for_all(self) -> None:
        """Wait for all ranks, without polling if the wait may be long."""
        self.gather(b"")

    def synchronize(self) -> None:  # noqa: B027 (most sum on the CPU)
        """Wait for this rank's GPU."""

    def close(self) -> None:  # noqa: B027 (MPI ends with the process)
        """Shut down the library; all ranks call it together."""

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Return rank 0's ``data``, of any length, on all ranks."""
        length = int.from_bytes(self.gather(len(data).to_bytes(8, "big"))[0], "big")
        buffer = np.zeros(length, np.uint8)
        if self.is_root:
            buffer[:] = np.frombuffer(data, np.uint8)
        for start in range(0, length, CHUNK):
            buffer[start : start + CHUNK] = self.broadcast(buffer[start : start + CHUNK])
        return buffer.tobytes()

    def gather_large(self, data: bytes) -> list[bytes]:
        """Return the ``data`` of all ranks, by rank, of any length."""
        lengths = [int.from_bytes(n, "big") for n in self.gather(len(data).to_bytes(8, "big"))]
        step = max(1, CHUNK // self.size)
        starts = range(0, max(lengths), step)
        pieces = [self.gather(data[start : start + step]) for start in starts]
        return [b"".join(piece[rank] for piece in pieces) for rank in range(self.size)]

    def gather_json(self, value: Any, kind: Any = Any) -> list[Any]:
        """Return the JSON values of all ranks by rank, converted to ``kind``, e.g. a dataclass."""
        message = json.dumps(value, default=asdict).encode()
        return [msgspec.convert(json.loads(data), kind) for data in self.gather(message)]

    def broadcast_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return rank 0's arrays by name; the argument of other ranks is ignored."""
        header = json.dumps([[k, v.dtype.str, v.shape] for k, v in arrays.items()]).encode()
        received = {}
        for name, dtype, shape in json.loads(self.broadcast_bytes(header)):
            data = self.broadcast_bytes(arrays[name].tobytes() if self.is_root else b"")
            received[name] = np.frombuffer(data, dtype).reshape(shape)
        return received

    def sum_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Vector]:
        """Return the sums of ``arrays`` over all ranks by name, in float64, in one operation."""
        flat = [value.ravel().astype(np.float64) for value in arrays.values()]
        ends = np.cumsum([value.size for value in flat])
        parts = np.split(self.sum(np.concatenate(flat)), ends[:-1])
        return {
            name: part.reshape(value.shape)
            for (name, value), part in zip(arrays.items(), parts, strict=True)
        }

    def together(self, action: Callable[[], Result], *, alike: bool = False) -> Result:
        """Do ``action`` on all ranks; if it fails on a rank, raise the same error on all.

        Otherwise the ranks that succeeded would hang in their next collective.

        Args:
            action: the function to call.
            alike: one rank acts on behalf of all, so that the error need not name it.

        Raises:
            HvdtrainError: of the first failing rank's type (the nearest in ``KINDS``), naming rank
                and host unless all ranks have the same error.
        """
        failure: HvdtrainError | None = None
        try:
            result = action()
        except HvdtrainError as error:
            failure = error
        message = ""
        if failure:
            # An unknown type, e.g. of a task, is sent as its nearest base class in KINDS.
            kind = next(kind for kind in type(failure).__mro__ if kind in KINDS.values())
            message = json.dumps([kind.__name__, socket.gethostname(), str(failure)])
        answers = [answer.decode() for answer in self.gather(message.encode())]
        failed = {rank: json.loads(answer) for rank, answer in enumerate(answers) if answer}
        if failed:
            first, (name, host, text) = next(iter(failed.items()))
            texts = [error for _, _, error in failed.values()]
            prefix = "" if alike or texts == [text] * self.size else f"rank {first} on {host}: "
            raise agreed(KINDS[name](prefix + text)) from failure
        return result

    def on_root(self, action: Callable[[], Result]) -> Result | None:
        """Do ``action`` on rank 0 only; all ranks wait for it, and raise if it fails.

        Returns:
            The result on rank 0, None elsewhere.
        """
        return self.together(lambda: action() if self.is_root else None, alike=True)


def split(joined: bytes, lengths: Sequence[int]) -> list[bytes]:
    """Split ``joined`` into pieces of ``lengths``."""
    ends = np.cumsum(lengths)
    return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]


class SingleRank(Communicator):
    """A single process, without any library."""

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
