"""How two ranks connect for a lifeline: addresses tried one after another, and a secret.

Caller and answerer greet each other with a half of the secret each, and the caller confirms that it
has heard the answer. Before that the line is nobody's life: a caller that has given up, or is no
rank at all, just closes it. After its answer the answerer waits for as long as it takes, so that
the caller can rely on the line as soon as it has confirmed.
"""

from __future__ import annotations

import hmac
import logging
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import psutil

log = logging.getLogger(__name__)

CONNECT = 3.0  # seconds for an address to answer; a host may have some that lead nowhere
ANSWER = 30.0  # seconds for the other rank's thread to answer; it may be busy importing
HELLO = 10.0  # seconds for a caller to say who it is; it may be no rank at all
CONFIRM = b"+"  # what the caller says last
BACKLOG = 4096  # callers at once: one a host, or one a rank of this host
KEY = 16  # bytes of each half of the secret: what a caller says, and what it is answered
RANK = 4  # bytes of a caller's rank

Address = tuple[str, int] | bytes


def listen() -> socket.socket:
    """A socket that other hosts can call, on all IPv4 addresses of this one."""
    return socket.create_server(("", 0), backlog=BACKLOG)


def listen_locally() -> socket.socket:
    """A socket for this host, by a name without a file that the kernel chooses."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")
    listener.listen(BACKLOG)
    return listener


def addresses() -> list[str]:
    """The IPv4 addresses of this host's interfaces that are up; those that never leave it last."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = [
        entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up and entry.family == socket.AF_INET
    ]
    return sorted(dict.fromkeys(found), key=lambda address: address.startswith("127."))


def call(targets: Iterable[Address], rank: int, secret: bytes) -> socket.socket | None:
    """Connect to the first of ``targets`` where a rank of this job answers; None: nobody did.

    Args:
        targets: address and port of another host, or a name on this one.
        rank: of the caller.
        secret: common to the ranks of the job, 2 x ``KEY`` bytes.
    """
    for target in targets:
        line = socket.socket(socket.AF_UNIX if isinstance(target, bytes) else socket.AF_INET)
        try:
            line.settimeout(CONNECT)
            line.connect(target)
            line.settimeout(ANSWER)
            line.sendall(secret[:KEY] + rank.to_bytes(RANK, "big"))
            if hmac.compare_digest(receive(line, KEY), secret[KEY:]):
                line.sendall(CONFIRM)
                line.settimeout(None)
                return line
        except OSError as error:
            log.debug("no lifeline by %s: %s", target, error)
        line.close()
    return None


@dataclass
class Caller:
    """Somebody who has called, and has not confirmed yet."""

    socket: socket.socket
    """Of the connection; it does not block."""
    secret: bytes
    """Of the job, see ``call``."""
    since: float = field(default_factory=time.monotonic)
    """When the call was accepted, in seconds of the monotonic clock."""
    rank: int | None = None
    """Who it is, once it has said so."""
    _heard: bytes = b""

    def hear(self) -> bool:
        """Read what has come; return whether the line is confirmed.

        Raises:
            OSError: the caller has closed the line, or is no rank of this job.
        """
        wanted = KEY + RANK if self.rank is None else len(CONFIRM)
        try:
            more = self.socket.recv(wanted - len(self._heard))
        except BlockingIOError:
            return False
        if not more:
            raise ConnectionError("closed before it was confirmed")
        self._heard += more
        if len(self._heard) < wanted:
            return False
        said, self._heard = self._heard, b""
        if self.rank is not None:
            return said == CONFIRM
        if not hmac.compare_digest(said[:KEY], self.secret[:KEY]):
            raise ConnectionError("not a rank of this job")
        self.rank = int.from_bytes(said[KEY:], "big")
        self.socket.sendall(self.secret[KEY:])
        return False

    def is_late(self) -> bool:
        """Whether it should have said long ago who it is."""
        return self.rank is None and time.monotonic() - self.since > HELLO


def answer(listener: socket.socket, secret: bytes) -> Caller:
    """Accept the next call; its line is none before ``Caller.hear`` says so.

    Raises:
        OSError: it is over already, or this process has no file descriptor left.
    """
    line, _ = listener.accept()
    line.setblocking(False)
    return Caller(line, secret)


def keep_alive(line: socket.socket, idle: int, silence: int) -> None:
    """Let the kernel break ``line`` when the other host has not answered for a time.

    It asks the other kernel, so the process there need not do anything.

    Args:
        line: connected to another host.
        idle: seconds of silence after which it asks for the first time, then once a second.
        silence: seconds after which the line breaks, also where data wait for an answer.
    """
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, silence - idle)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * silence)


def receive(line: socket.socket, length: int) -> bytes:
    """Exactly ``length`` bytes; fewer where the other end has closed."""
    data = b""
    while len(data) < length and (more := line.recv(length - len(data))):
        data += more
    return data
