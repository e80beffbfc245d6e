"""How two ranks connect for a lifeline: addresses tried one after another, and a secret."""

from __future__ import annotations

import hmac
import logging
import socket
from collections.abc import Iterable

import psutil

log = logging.getLogger(__name__)

CONNECT = 3.0  # seconds for an address to answer; a host may have some that lead nowhere
ANSWER = 30.0  # seconds for the other rank's thread to answer; it may be busy importing
HELLO = 2.0  # seconds for a caller to say who it is; it may be no rank at all
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
            if hmac.compare_digest(_receive(line, KEY), secret[KEY:]):
                line.settimeout(None)
                return line
        except OSError as error:
            log.debug("no lifeline by %s: %s", target, error)
        line.close()
    return None


def answer(listener: socket.socket, secret: bytes) -> tuple[socket.socket, int] | None:
    """Take the next call: its connection and the caller's rank; None: it is no rank of this job."""
    line, _ = listener.accept()
    try:
        line.settimeout(HELLO)
        hello = _receive(line, KEY + RANK)
        if hmac.compare_digest(hello[:KEY], secret[:KEY]):
            line.sendall(secret[KEY:])
            line.settimeout(None)
            return line, int.from_bytes(hello[KEY:], "big")
    except OSError as error:
        log.debug("a call that was none: %s", error)
    line.close()
    return None


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


def _receive(line: socket.socket, length: int) -> bytes:
    """Exactly ``length`` bytes; fewer where the other end has closed."""
    data = b""
    while len(data) < length and (more := line.recv(length - len(data))):
        data += more
    return data
