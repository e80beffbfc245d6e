"""Handshake of a connection between two ranks of a job, each of which proves that it is one.

The accepting side sends a random number, each side proves by it that it knows the job's secret, and
the connecting side confirms that it has read the answer. A proof is of no use on another
connection, nor to a listener at another address. Until the confirmation a closed connection does
not mean a lost rank: the other side has given up, or is no rank. The accepting side waits for the
confirmation without a limit, so that the connecting side can rely on it.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

CONNECT = 3.0  # seconds for an address to answer; a host may have unreachable ones
ANSWER_TIMEOUT = 30.0  # seconds for the other rank's thread to answer; it may be busy importing
HELLO_TIMEOUT = 30.0  # seconds for a connecting process to send its rank; it may be busy
KEY = 32  # bytes of the secret, and of a proof
NONCE = 16  # bytes of the random number
RANK = 4  # bytes of a rank
CONNECTING, ACCEPTING = "connecting", "accepting"  # sides of a connection
CONFIRM = b"+"

Address = tuple[str, int] | bytes  # IPv4 address and port, or the name of a socket on this host


@dataclass
class Handshake:
    """An accepted connection that the other side has not confirmed yet."""

    socket: socket.socket  # non-blocking
    secret: bytes  # of the job
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE))
    since: float = field(default_factory=time.monotonic)  # when it was accepted
    rank: int | None = None  # rank of the other side, once received
    _received: bytes = b""

    def __post_init__(self) -> None:
        with contextlib.suppress(OSError):  # closed already, as `read` reports
            self.socket.send(self.nonce)

    def read(self) -> bool:
        """Read available data; return whether the connection is confirmed.

        Raises:
            OSError: the other side has closed it, or does not belong to this job.
        """
        wanted = RANK + KEY if self.rank is None else len(CONFIRM)
        try:
            more = self.socket.recv(wanted - len(self._received))
        except BlockingIOError:
            return False
        if not more:
            raise ConnectionError("closed before it was confirmed")
        self._received += more
        if len(self._received) < wanted:
            return False
        message, self._received = self._received, b""
        if self.rank is not None:
            return message == CONFIRM
        rank, facts = message[:RANK], (self.nonce, self.socket.getsockname(), message[:RANK])
        if not hmac.compare_digest(message[RANK:], prove(self.secret, CONNECTING, *facts)):
            raise ConnectionError("not a rank of this job")
        self.rank = int.from_bytes(rank, "big")
        self.socket.sendall(prove(self.secret, ACCEPTING, *facts))
        return False

    def is_late(self) -> bool:
        """Return whether the other side has not sent its rank in time."""
        return self.rank is None and time.monotonic() - self.since > HELLO_TIMEOUT


def connect(targets: Iterable[Address], rank: int, secret: bytes) -> socket.socket | None:
    """Connect to the first of ``targets`` where a rank of this job answers; None: none does."""
    for target in targets:
        connection = socket.socket(socket.AF_UNIX if isinstance(target, bytes) else socket.AF_INET)
        try:
            connection.settimeout(CONNECT)
            connection.connect(target)
            connection.settimeout(ANSWER_TIMEOUT)
            sent = rank.to_bytes(RANK, "big")
            facts = receive(connection, NONCE), connection.getpeername(), sent
            connection.sendall(sent + prove(secret, CONNECTING, *facts))
            if hmac.compare_digest(receive(connection, KEY), prove(secret, ACCEPTING, *facts)):
                connection.sendall(CONFIRM)
                connection.settimeout(None)
                return connection
        except OSError as error:
            log.debug("no connection by %s: %s", target, error)
        connection.close()
    return None


def prove(secret: bytes, side: str, nonce: bytes, address: Address, rank: bytes) -> bytes:
    """Return the proof that a ``side`` knows the secret.

    Args:
        secret: the secret of the job.
        side: ``CONNECTING`` or ``ACCEPTING``.
        nonce: random number of the connection.
        address: that of the accepting side, as both see it: who relays has another one.
        rank: the connecting side's rank.
    """
    return hmac.digest(secret, repr((side, nonce, address, rank)).encode(), "sha256")


def receive(connection: socket.socket, length: int) -> bytes:
    """Return ``length`` bytes, or fewer if the other side has closed."""
    data = b""
    while len(data) < length and (more := connection.recv(length - len(data))):
        data += more
    return data
