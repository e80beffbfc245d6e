"""Connections between the ranks that detect a lost rank within seconds.

MPI does not detect it: a rank that waits for a host without power, or behind a broken link, waits
for TCP's timeout, 15 minutes or more; Open MPI's daemons notice after 8 minutes.

The connections form a tree: rank 0 to the first rank of each other host, and the first rank of each
host to the others on it. They transmit only a rank's last message, and towards rank 0 the calls in
which a rank waits (``waits``). Between hosts the kernels answer TCP keep-alive probes, so that a
process is not considered dead while it computes, waits for a disk, or is suspended. Separate
threads sleep until a connection breaks, as the main thread may be waiting in a collective. Until
its ``handshake`` is confirmed, a closed connection does not mean a lost rank.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, EXIT_PREEMPTED
from hvdtrain.system.runtime.exit import leave, print_error, process_status, write_end_mark
from hvdtrain.system.runtime.handshake import (
    HELLO_TIMEOUT,
    KEY,
    Address,
    Handshake,
    connect,
    receive,
)
from hvdtrain.system.runtime.outlive import end_mpirun

log = logging.getLogger(__name__)

EXIT_TIMEOUT = 5.0  # seconds for mpirun to end this process after a rank has reported its failure
# A rank that loses rank 0 waits STAGGER seconds times its rank, at most LAST, before it reports it:
# others have lost it too, and rank 0 is the first to end when mpirun ends all ranks in order.
STAGGER, LAST = 0.5, 6
RETRY = 0.1  # seconds before the next accept after a failed one

# Seconds without an answer after which a host is considered lost. The job has to end within 30 s of
# the loss; rerouting in a switch or migration of a virtual machine also takes some seconds.
SILENCE = 15
IDLE = 5  # idle seconds before the kernel sends the first probe

BACKLOG = 4096  # pending connections: one per host, or one per rank of this host

# A rank's last message: it ends normally; it fails and has reported why (followed by its exit code,
# which is then that of all ranks); it has lost another rank and has reported which. Other ranks
# need not report collectives that fail as a consequence.
DONE, FAILED, LOST = b".", b"!", b"?"
REPORT = b"w"  # followed by length and content of a report to rank 0
LENGTH = 2  # bytes of the length

Gather = Callable[[bytes], list[bytes]]
HostId = tuple[str, str]  # name of a host, and a string that distinguishes hosts of the same name


@dataclass(frozen=True)
class Connection:
    """An open connection to another rank."""

    socket: socket.socket
    rank: int  # rank of the other side


def start(
    rank: int, hosts: Sequence[HostId], addresses: Sequence[str], gather: Gather
) -> FailureDetector:
    """Connect the ranks and start watching; all ranks must call it together.

    If a rank or host is lost, this process exits with code 1.

    Args:
        rank: rank of this process.
        hosts: hosts by rank.
        addresses: IPv4 addresses of this host for the others; rank 0 listens at a single one, or at
            all that it has.
        gather: collective that returns the bytes of all ranks, by rank.
    """
    detector = FailureDetector(rank, hosts, addresses)
    if rank == 0:
        write_end_mark()
    if len(hosts) > 1:
        detector.connect(gather(detector.endpoint()))
        process_status.at_exit.append(detector.send_last)
        # For scripts that end without ``exit.leave``.
        atexit.register(detector.send_last, EXIT_OK)
        # A forked worker would keep the connections of a dead rank open.
        os.register_at_fork(after_in_child=detector.close)
    return detector


class FailureDetector:
    """The connections of a rank; for the arguments see ``start``."""

    def __init__(self, rank: int, hosts: Sequence[HostId], addresses: Sequence[str]) -> None:
        self.rank, self.hosts, self.addresses = rank, hosts, addresses
        first = hosts.index(hosts[rank])  # the first rank of this host
        self.parent = first if rank != first else 0  # in the tree with root 0
        self.connections: list[Connection] = []
        self.on_report: Callable[[bytes], None] = lambda report: None  # called on rank 0
        self.on_end: Callable[[], None] = lambda: None  # called when this rank or its parent ends
        self.last: bytes | None = None  # this rank's last message
        self.secret = secrets.token_bytes(KEY)  # all ranks use rank 0's
        self.selector = selectors.DefaultSelector()
        self.listeners: dict[str, socket.socket] = {}
        self.absent = 0  # number of ranks that have not connected yet
        self.pending: list[Handshake] = []  # not yet confirmed
        if rank == self.parent and len(set(hosts)) > 1:
            at = addresses[0] if len(addresses) == 1 else ""
            self.listeners["tcp"] = socket.create_server((at, 0), backlog=BACKLOG)
            self.absent += len(set(hosts)) - 1
        if rank == first and hosts.count(hosts[rank]) > 1:
            local = self.listeners["unix"] = socket.socket(socket.AF_UNIX)
            local.bind("")  # to an abstract name chosen by the kernel
            local.listen(BACKLOG)
            self.absent += hosts.count(hosts[rank]) - 1

    def endpoint(self) -> bytes:
        """Return how other ranks can connect to this one, as JSON."""
        endpoint: dict[str, object] = {"secret": self.secret.hex()}
        if "tcp" in self.listeners:
            endpoint["port"] = self.listeners["tcp"].getsockname()[1]
            endpoint["addresses"] = list(self.addresses)
        if "unix" in self.listeners:
            endpoint["name"] = self.listeners["unix"].getsockname().hex()
        return json.dumps(endpoint).encode()

    def connect(self, endpoints: Sequence[bytes]) -> None:
        """Connect and watch in separate threads; ``endpoints`` are those of all ranks, by rank."""
        root, parent = json.loads(endpoints[0]), json.loads(endpoints[self.parent])
        self.secret = bytes.fromhex(root["secret"])
        if self.rank != self.parent:
            targets: list[Address]
            if self.hosts[self.rank] == self.hosts[self.parent]:
                targets = [bytes.fromhex(parent["name"])]
            else:
                targets = [(address, root["port"]) for address in root["addresses"]]
            threading.Thread(
                target=self._watch_parent, args=(targets,), name="failure detector", daemon=True
            ).start()
        if self.listeners:
            threading.Thread(target=self._serve, name="failure detectors", daemon=True).start()

    def send_last(self, code: int) -> None:
        """Notify the other ranks that this rank is about to end with ``code``."""
        self._notify(DONE if code in (EXIT_OK, EXIT_PREEMPTED) else FAILED + bytes([code & 0xFF]))

    def _notify(self, last: bytes) -> None:
        self.on_end()
        if self.last is None:
            self.last = last
            for connection in list(self.connections):
                _send(connection, last)

    def report(self, report: bytes) -> None:
        """Send ``report`` to rank 0, via the first rank of this host."""
        for connection in list(self.connections):
            if connection.rank == self.parent:
                _send(connection, REPORT + len(report).to_bytes(LENGTH, "big") + report)

    def close(self) -> None:
        """Close this process's side of all connections."""
        self.on_end()
        sockets = [begun.socket for begun in self.pending]
        sockets += [connection.socket for connection in self.connections]
        for opened in (*self.listeners.values(), *sockets):
            opened.close()
        self.connections.clear()

    def _watch_parent(self, targets: Sequence[Address]) -> None:
        """Connect to the parent at one of ``targets`` and read from it, in a thread."""
        connected = connect(targets, self.rank, self.secret)
        if connected:
            connection = self._register(connected, self.parent)
            while self._read(connection):
                pass
        elif self.last is None:
            log.warning(
                "%s cannot connect to %s by TCP: the loss of a host may be detected late",
                self._name(self.rank),
                self._name(self.parent),
            )

    def _serve(self) -> None:
        """Accept all ranks concurrently and read from the connected ones, in a thread."""
        for listener in self.listeners.values():
            self.selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in self.selector.select(HELLO_TIMEOUT if self.pending else None):
                if isinstance(key.data, Connection):
                    if not self._read(key.data):
                        self.selector.unregister(key.data.socket)
                elif isinstance(key.data, Handshake):
                    self._continue(key.data)
                else:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
            for late in [begun for begun in self.pending if begun.is_late()]:
                self._give_up(late)

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
            accepted.setblocking(False)
        except OSError as error:  # closed already, or no file descriptor left
            log.debug("connection not accepted: %s", error)
            time.sleep(RETRY)
        else:
            begun = Handshake(accepted, self.secret)
            self.pending.append(begun)
            self.selector.register(accepted, selectors.EVENT_READ, begun)

    def _continue(self, begun: Handshake) -> None:
        """Continue a handshake; register the connection when it is confirmed."""
        try:
            confirmed = begun.read()
            if begun.rank not in (None, *range(len(self.hosts))):
                raise ConnectionError(f"there is no rank {begun.rank}")
        except OSError as error:
            log.debug("handshake failed: %s", error)
            self._give_up(begun)
            return
        if confirmed and begun.rank is not None:
            self._remove(begun)
            begun.socket.setblocking(True)
            connection = self._register(begun.socket, begun.rank)
            self.selector.register(connection.socket, selectors.EVENT_READ, connection)
            self.absent -= 1
            for listener in self.listeners.values() if not self.absent else ():
                self.selector.unregister(listener)
                listener.close()

    def _remove(self, begun: Handshake) -> None:
        self.pending.remove(begun)
        self.selector.unregister(begun.socket)

    def _give_up(self, begun: Handshake) -> None:
        self._remove(begun)
        begun.socket.close()

    def _register(self, confirmed: socket.socket, rank: int) -> Connection:
        """Register a confirmed connection: from now on its end means a lost rank."""
        keep_alive(confirmed)
        connection = Connection(confirmed, rank)
        self.connections.append(connection)
        if self.last is not None:  # the training ended before the handshake
            _send(connection, self.last)
        return connection

    def _read(self, connection: Connection) -> bool:
        """Handle a report, a last message, or a broken connection; return False at the end."""
        silent, code = False, EXIT_FAILURE
        try:
            message = connection.socket.recv(1)
            if message == FAILED:
                code = int.from_bytes(receive(connection.socket, 1), "big") or EXIT_FAILURE
            if message == REPORT:
                length = int.from_bytes(receive(connection.socket, LENGTH), "big")
                report = receive(connection.socket, length)
                (self.report if self.rank else self.on_report)(report)
                return True
        except OSError as error:
            message, silent = b"", not isinstance(error, ConnectionResetError)
        # The socket stays open: the other side may be alive, and closing would mean a lost rank.
        if message in (FAILED, LOST):
            self._notify(message + bytes([code]) if message == FAILED else message)
            if message == FAILED:
                process_status.reported = code
                process_status.act(code)  # mpirun is about to kill this process
                time.sleep(EXIT_TIMEOUT)  # an error of all ranks ends them together in the meantime
            leave(code)
        if message != DONE:
            self._end(connection.rank, silent=silent)
        if connection.rank == self.parent:
            self.on_end()
        return False

    def _end(self, lost: int, *, silent: bool) -> NoReturn:
        """Report the loss of rank ``lost``, or of its host if ``silent``, and exit."""
        if silent:
            loss = (
                f"host {self._host(lost)} ({self._ranks(lost)}) has not answered for {SILENCE} s: "
                f"it is down, or unreachable from {self._host(self.rank)}"
            )
        else:
            loss = f"{self._name(lost)} exited unexpectedly (crashed, or killed: out of memory?)"
        message = f"{loss}. {process_status.resume_hint()}"
        wait = 0.0 if lost else STAGGER * min(self.rank, LAST)
        print_error(message, wait=wait, mpirun_ends=not silent)
        self._notify(LOST)
        if silent and end_mpirun():
            time.sleep(EXIT_TIMEOUT)
        leave(EXIT_FAILURE)

    def _host(self, rank: int) -> str:
        return self.hosts[rank][0]

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._host(rank)}"

    def _ranks(self, rank: int) -> str:
        """Return the ranks on the host of ``rank`` as text."""
        here = [local for local, host in enumerate(self.hosts) if host == self.hosts[rank]]
        if len(here) > 1 and here == list(range(here[0], here[-1] + 1)):
            return f"ranks {here[0]}-{here[-1]}"
        return f"rank{'s' if len(here) > 1 else ''} {','.join(map(str, here))}"


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel break ``connection`` if the other host's kernel does not answer.

    Also with unacknowledged data; after ``IDLE`` seconds it sends a probe per second. It has no
    effect on a connection within a host.
    """
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENCE - IDLE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE)


def _send(connection: Connection, message: bytes) -> None:
    with contextlib.suppress(OSError):  # the other side has ended
        connection.socket.send(message)
