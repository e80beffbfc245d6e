"""Handshake of a connection between two ranks: each side proves that it belongs to this job.

Each side sends half of a shared secret, and the connecting side confirms that it has read the
answer. Until then a closed connection does not mean a lost rank: the other side has given up, or is
no rank. The accepting side waits for the confirmation without a limit, so that the connecting side
can rely on the connection after its confirmation.
"""

from __future__ import annotations

import hmac
import logging
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

CONNECT = 3.0  # seconds for an address to answer; a host may have unreachable ones
ANSWER = 30.0  # seconds for the other rank's thread to answer; it may be busy importing
HELLO = 10.0  # seconds for a connecting process to send its rank; it may be no rank
KEY = 16  # bytes of each half of the secret: the connecting side's, and the accepting side's
RANK = 4  # bytes of a rank
CONFIRM = b"+"

Address = tuple[str, int] | bytes  # IPv4 address and port, or the name of a socket on this host


@dataclass
class Handshake:
    """An accepted connection that the other side has not confirmed yet."""

    socket: socket.socket  # non-blocking
    secret: bytes  # of the job, 2 x ``KEY`` bytes
    since: float = field(default_factory=time.monotonic)  # when it was accepted
    rank: int | None = None  # rank of the other side, once received
    _received: bytes = b""

    def read(self) -> bool:
        """Read available data; return whether the connection is confirmed.

        Raises:
            OSError: the other side has closed it, or does not belong to this job.
        """
        wanted = KEY + RANK if self.rank is None else len(CONFIRM)
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
        if not hmac.compare_digest(message[:KEY], self.secret[:KEY]):
            raise ConnectionError("not a rank of this job")
        self.rank = int.from_bytes(message[KEY:], "big")
        self.socket.sendall(self.secret[KEY:])
        return False

    def is_late(self) -> bool:
        """Return whether the other side has not sent its rank in time."""
        return self.rank is None and time.monotonic() - self.since > HELLO


def connect(targets: Iterable[Address], rank: int, secret: bytes) -> socket.socket | None:
    """Connect to the first of ``targets`` where a rank of this job answers; None: none does."""
    for target in targets:
        connection = socket.socket(socket.AF_UNIX if isinstance(target, bytes) else socket.AF_INET)
        try:
            connection.settimeout(CONNECT)
            connection.connect(target)
            connection.settimeout(ANSWER)
            connection.sendall(secret[:KEY] + rank.to_bytes(RANK, "big"))
            if hmac.compare_digest(receive(connection, KEY), secret[KEY:]):
                connection.sendall(CONFIRM)
                connection.settimeout(None)
                return connection
        except OSError as error:
            log.debug("no connection by %s: %s", target, error)
        connection.close()
    return None


def receive(connection: socket.socket, length: int) -> bytes:
    """Return exactly ``length`` bytes; fewer if the other side has closed."""
    data = b""
    while len(data) < length and (more := connection.recv(length - len(data))):
        data += more
    return data
