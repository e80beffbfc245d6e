"""Connections between the ranks, by which each learns within seconds that another has died.

MPI does not tell: a rank that waits for a host without power, or behind a cut link, waits until TCP
gives up, a quarter of an hour and more; Open MPI's daemons look after eight minutes.

The connections form a tree: rank 0 to the first rank of each other host, and the first rank of each
host to the others on it. All that is sent on them is a rank's last message, and towards rank 0 the
calls that a rank waits in (``waits``). Between hosts TCP keep-alive probes are answered by the
kernels, so a process is not mistaken for a dead one while it computes, waits for a disk, or is
suspended. Threads of their own sleep until a connection breaks, and then act by themselves: the
main thread may be waiting in a collective.
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

from hvdtrain.errors import EXIT_OK, EXIT_PREEMPTED
from hvdtrain.system.runtime import handshake
from hvdtrain.system.runtime.detect import is_elastic
from hvdtrain.system.runtime.elastic import EXIT_ANEW
from hvdtrain.system.runtime.end_mark import leave_mark
from hvdtrain.system.runtime.exit import end_after_loss, process_status, speak
from hvdtrain.system.runtime.handshake import Address, Handshake, receive
from hvdtrain.system.runtime.mpirun_daemon import end_daemon

log = logging.getLogger(__name__)

# Seconds without an answer from another host after which it counts as lost. The job has to be over
# 30 s after the loss; a switch that takes another path, or a virtual machine that moves, is silent
# for some seconds too.
SILENCE = 15
IDLE = 5  # seconds of silence after which the kernel sends the first probe
PATIENCE = 5.0  # seconds for mpirun to end this process once a rank has told why it fails
# Who loses rank 0 waits so many seconds times its own rank, at most LAST, before it says so: others
# have lost it too, and where mpirun ends all ranks in order rank 0 is the first to go.
STAGGER, LAST = 0.5, 6
RETRY = 0.1  # seconds before the next connection is accepted, where one could not be

BACKLOG = 4096  # pending connections: one per host, or one per rank of this host

# A rank's last message: it ends in order; it fails, and has told why; it has lost another one, and
# has told which. What a collective fails of by that no other rank need tell.
DONE, FAILED, LOST = b".", b"!", b"?"
REPORT = b"w"  # before a report to rank 0, and its length
LENGTH = 2  # bytes of it

Gather = Callable[[bytes], list[bytes]]
HostId = tuple[str, str]  # the name of a host, and what tells it apart from another of that name


@dataclass(frozen=True)
class Connection:
    """An open connection to another rank."""

    socket: socket.socket
    rank: int  # the rank at the other end


def start(
    rank: int, hosts: Sequence[HostId], addresses: Sequence[str], gather: Gather
) -> FailureDetector:
    """Connect the ranks, and watch from now on; all ranks call it together.

    Where a rank or a host is lost, this process says so and leaves with code 1.

    Args:
        rank: of this process.
        hosts: the host of each rank, by rank.
        addresses: of this host, as ``10.0.0.7/24``.
        gather: the collective that gives the bytes of every rank, by rank.
    """
    detector = FailureDetector(rank, hosts, addresses)
    if rank == 0:
        leave_mark()
    if len(hosts) > 1:
        detector.connect(gather(detector.endpoint()))
        process_status.at_exit.append(detector.send_last)
        # A script that does not end by ``exit.leave`` comes to here if it ends at all.
        atexit.register(detector.send_last, EXIT_OK)
        # A forked worker that lived on would hold the connections of a dead rank.
        os.register_at_fork(after_in_child=detector.close)
    return detector


class FailureDetector:
    """The connections of one rank.

    Args:
        rank: of this process.
        hosts: the host of each rank, by rank.
        addresses: of this host, as ``10.0.0.7/24``.
    """

    def __init__(self, rank: int, hosts: Sequence[HostId], addresses: Sequence[str]) -> None:
        self.rank, self.hosts, self.addresses = rank, hosts, addresses
        first = hosts.index(hosts[rank])  # the first rank of this host
        self.parent = first if rank != first else 0  # in the tree; rank 0 is its root
        self.connections: list[Connection] = []
        self.on_report: Callable[[bytes], None] = lambda report: None  # what rank 0 does with one
        self.last: bytes | None = None  # this rank's last message
        self.secret = secrets.token_bytes(2 * handshake.KEY)  # rank 0's is everyone's
        self.selector = selectors.DefaultSelector()
        self.listeners: dict[str, socket.socket] = {}
        self.absent = 0  # ranks that have yet to connect
        self.pending: list[Handshake] = []  # not confirmed yet
        if rank == self.parent and len(set(hosts)) > 1:
            self.listeners["tcp"] = socket.create_server(("", 0), backlog=BACKLOG)
            self.absent += len(set(hosts)) - 1
        if rank == first and hosts.count(hosts[rank]) > 1:
            local = self.listeners["unix"] = socket.socket(socket.AF_UNIX)
            local.bind("")  # to a name without a file, which the kernel chooses
            local.listen(BACKLOG)
            self.absent += hosts.count(hosts[rank]) - 1

    def endpoint(self) -> bytes:
        """Return what the other ranks need to connect to this one, as JSON."""
        endpoint: dict[str, object] = {"secret": self.secret.hex()}
        if "tcp" in self.listeners:
            endpoint["port"] = self.listeners["tcp"].getsockname()[1]
            # Loopback last: where two "hosts" are containers of one, it may be all that they share.
            addresses = [*self.addresses, "127.0.0.1"]
            endpoint["addresses"] = [one.partition("/")[0] for one in addresses]
        if "unix" in self.listeners:
            endpoint["name"] = self.listeners["unix"].getsockname().hex()
        return json.dumps(endpoint).encode()

    def connect(self, endpoints: Sequence[bytes]) -> None:
        """Connect and watch, in threads of their own; ``endpoints`` are all ranks', by rank."""
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
        """Tell the others that this rank is about to end with ``code``."""
        self._tell(DONE if code in (EXIT_OK, EXIT_PREEMPTED, EXIT_ANEW) else FAILED)

    def _tell(self, last: bytes) -> None:
        if self.last is None:
            self.last = last
            for connection in list(self.connections):
                _send(connection, last)

    def report(self, report: bytes) -> None:
        """Send ``report`` to rank 0, by the first rank of this host."""
        for connection in [one for one in self.connections if one.rank == self.parent]:
            _send(connection, REPORT + len(report).to_bytes(LENGTH, "big") + report)

    def close(self) -> None:
        """Close this process's end of all connections."""
        pending = [one.socket for one in self.pending]
        open_ones = [connection.socket for connection in self.connections]
        for one in (*self.listeners.values(), *pending, *open_ones):
            one.close()
        self.connections.clear()

    def _watch_parent(self, targets: Sequence[Address]) -> None:
        """Connect to the parent at one of ``targets``, and read from it: a thread's work."""
        connected = handshake.connect(targets, self.rank, self.secret)
        if connected:
            connection = self._register(connected, self.parent)
            while self._read(connection):
                pass
        elif self.last is None:
            log.warning(
                "rank %d on %s cannot reach rank %d on %s by TCP: if a host is lost, it may take "
                "long to be noticed",
                *(self.rank, self._host(self.rank), self.parent, self._host(self.parent)),
            )

    def _serve(self) -> None:
        """Accept all ranks side by side, and read from those connected: a thread's work."""
        for listener in self.listeners.values():
            self.selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in self.selector.select(handshake.HELLO if self.pending else None):
                if isinstance(key.data, Connection):
                    if not self._read(key.data):
                        self.selector.unregister(key.data.socket)
                elif isinstance(key.data, Handshake):
                    self._continue(key.data)
                else:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
            for late in [one for one in self.pending if one.is_late()]:
                self._remove(late)
                late.socket.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
            accepted.setblocking(False)
        except OSError as error:  # over already, or no file descriptor left
            log.debug("a connection that cannot be accepted: %s", error)
            time.sleep(RETRY)
        else:
            begun = Handshake(accepted, self.secret)
            self.pending.append(begun)
            self.selector.register(accepted, selectors.EVENT_READ, begun)

    def _continue(self, begun: Handshake) -> None:
        """Read what has come; keep the connection once it is confirmed."""
        try:
            confirmed = begun.read()
        except OSError as error:
            log.debug("a handshake that failed: %s", error)
            self._remove(begun)
            begun.socket.close()
            return
        if confirmed and begun.rank is not None:
            self._remove(begun)
            begun.socket.setblocking(True)
            connection = self._register(begun.socket, begun.rank)
            self.selector.register(connection.socket, selectors.EVENT_READ, connection)
            self._close_listeners()

    def _remove(self, begun: Handshake) -> None:
        self.pending.remove(begun)
        self.selector.unregister(begun.socket)

    def _close_listeners(self) -> None:
        """Listen no more once all ranks have connected that should."""
        self.absent -= 1
        if not self.absent:
            for listener in self.listeners.values():
                self.selector.unregister(listener)
                listener.close()

    def _register(self, confirmed: socket.socket, rank: int) -> Connection:
        """Keep a connection whose handshake is complete: from now on its end is a death."""
        if confirmed.family == socket.AF_INET:
            _keep_alive(confirmed, IDLE, SILENCE)
        connection = Connection(confirmed, rank)
        self.connections.append(connection)
        if self.last is not None:  # the training was over before the handshake
            _send(connection, self.last)
        return connection

    def _read(self, connection: Connection) -> bool:
        """Read a report or the last message, or why there is none; False after the end."""
        silent = False
        try:
            message = connection.socket.recv(1)
            if message == REPORT:
                length = int.from_bytes(receive(connection.socket, LENGTH), "big")
                report = receive(connection.socket, length)
                (self.report if self.rank else self.on_report)(report)
                return True
        except OSError as error:
            message, silent = b"", not isinstance(error, ConnectionResetError)
        # It stays open: the other end may live on, and would take the closing for a death.
        if message in (FAILED, LOST):
            self._tell(message)
            # What all fail of together ends them together meanwhile.
            time.sleep(PATIENCE if message == FAILED else 0.0)
            end_after_loss()
        if message != DONE:
            self._end(connection.rank, silent=silent)
        return False

    def _end(self, lost: int, *, silent: bool) -> NoReturn:
        """Say that the rank ``lost`` is lost, or all its host where that is ``silent``; leave."""
        if silent:
            what = (
                f"host {self._host(lost)} ({self._ranks(lost)}) has not answered for {SILENCE} s: "
                f"it is down, or cut off from {self._host(self.rank)}"
            )
        else:
            what = (
                f"rank {lost} on {self._host(lost)} has ended without a word: it crashed, or was "
                "killed (out of memory?)"
            )
        said = f"{what}. {process_status.how_to_go_on()}"
        if is_elastic(os.environ):
            gone = self._host(lost) if silent else None
            left = [r for r in range(len(self.hosts)) if r != lost and self._host(r) != gone]
            if lost or self.rank == left[0]:  # one of those that have lost rank 0 is enough
                speak(said, wait=0.0)
            self._tell(LOST)
            end_after_loss()
        wait = 0.0 if lost else STAGGER * min(self.rank, LAST)
        speak(said, wait=wait, mpirun_ends=not silent)
        self._tell(LOST)
        if silent and end_daemon():
            time.sleep(PATIENCE)
        end_after_loss()

    def _host(self, rank: int) -> str:
        return self.hosts[rank][0]

    def _ranks(self, rank: int) -> str:
        """Name all ranks on the host of ``rank``."""
        here = [other for other, host in enumerate(self.hosts) if host == self.hosts[rank]]
        if len(here) > 1 and here == list(range(here[0], here[-1] + 1)):
            return f"ranks {here[0]}-{here[-1]}"
        return f"rank{'s' if len(here) > 1 else ''} {','.join(map(str, here))}"


def _keep_alive(connection: socket.socket, idle: int, silence: int) -> None:
    """Let the kernel break ``connection`` when the other host has not answered for a time.

    It asks the other kernel, so the process there need not do anything.

    Args:
        connection: to another host.
        idle: seconds of silence after which the first probe is sent, then one per second.
        silence: seconds after which it breaks, also where data wait to be acknowledged.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, silence - idle)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * silence)


def _send(connection: Connection, message: bytes) -> None:
    with contextlib.suppress(OSError):  # the other end has gone already
        connection.socket.send(message)
