"""The few collectives that the steps need, on bytes and float64 vectors: no framework in sight."""

from __future__ import annotations

import json
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import CheckpointError, HvdtrainError, TrainingError, UsageError
from hvdtrain.launch.ending import agreed

Result = TypeVar("Result")
Bytes = NDArray[np.uint8]
Vector = NDArray[np.float64]

CHUNK = 2**28  # bytes in one broadcast: MPI counts elements in a 32-bit int


class Communicator(ABC):
    """Collectives over all ranks; each must be called by all of them, in the same order."""

    rank: int
    size: int

    @abstractmethod
    def gather(self, data: bytes) -> list[bytes]:
        """The ``data`` of every rank, by rank; lengths may differ."""

    @abstractmethod
    def broadcast(self, data: Bytes) -> Bytes:
        """Rank 0's ``data``; all ranks give an array of the same length."""

    @abstractmethod
    def sum(self, values: Vector) -> Vector:
        """The element-wise sum over all ranks of a float64 vector."""

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Rank 0's ``data``, of any length, on every rank."""
        length = int.from_bytes(self.gather(len(data).to_bytes(8, "big"))[0], "big")
        buffer = np.zeros(length, np.uint8)
        if self.rank == 0:
            buffer[:] = np.frombuffer(data, np.uint8)
        for start in range(0, length, CHUNK):
            buffer[start : start + CHUNK] = self.broadcast(buffer[start : start + CHUNK])
        return buffer.tobytes()

    def broadcast_arrays(self, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Rank 0's arrays by name, whatever the other ranks hold."""
        header = json.dumps([[k, v.dtype.str, v.shape] for k, v in arrays.items()]).encode()
        received = {}
        for name, dtype, shape in json.loads(self.broadcast_bytes(header)):
            own = arrays[name].tobytes() if self.rank == 0 else b""
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
            HvdtrainError: of the first failing rank's kind, naming it and its host unless it is
                everybody's.
        """
        failure: HvdtrainError | None = None
        try:
            result = action()
        except HvdtrainError as error:
            failure = error
        kinds = [HvdtrainError, UsageError, CheckpointError, TrainingError]
        kind = str(kinds.index(type(failure))) if failure else ""
        told = f"{kind}{socket.gethostname()}\n{failure}" if failure else ""
        # A file's name may be of any bytes.
        told_bytes = told.encode(errors="surrogatepass")
        answers = [answer.decode(errors="surrogatepass") for answer in self.gather(told_bytes)]
        failed = {rank: answer[1:].split("\n", 1) for rank, answer in enumerate(answers) if answer}
        if failed:
            first, (host, text) = next(iter(failed.items()))
            same = all(text == other for _, other in failed.values())
            everyone = len(failed) == self.size and same
            who = "" if alike or everyone else f"rank {first} on {host}: "
            raise agreed(kinds[int(answers[first][0])](who + text)) from failure
        return result

    def on_root(self, action: Callable[[], Result]) -> Result | None:
        """Do ``action`` on rank 0 alone; all ranks wait for it, and raise if it fails.

        Returns:
            The result on rank 0, None elsewhere.
        """
        return self.together(lambda: action() if self.rank == 0 else None, alike=True)


class Alone(Communicator):
    """One process: every collective returns what it was given."""

    rank = 0
    size = 1

    def gather(self, data: bytes) -> list[bytes]:
        """See ``Communicator``."""
        return [data]

    def broadcast(self, data: Bytes) -> Bytes:
        """See ``Communicator``."""
        return data

    def sum(self, values: Vector) -> Vector:
        """See ``Communicator``."""
        return values
