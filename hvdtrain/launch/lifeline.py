"""Lines between the ranks, by which each learns within seconds that another, or its host, is gone.

MPI does not tell: a rank that waits for a host without power, or behind a cut link, waits until TCP
gives up, a quarter of an hour and more; Open MPI's daemons look after eight minutes.

The lines form a tree: rank 0 holds one to the first rank of each other host, and the first rank of
each host one to the others on it. All that is sent on them is a rank's last word, and towards rank
0 the calls that a rank waits in (``waits``). Between hosts the kernels keep them alive, so a
process is not mistaken for a lost one while it computes, waits for a disk, or is suspended. Threads
of their own sleep until a line breaks, and then act by themselves: the main thread may be waiting
in a collective.
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
from hvdtrain.launch import ending, meeting
from hvdtrain.launch.daemon import end_daemon

log = logging.getLogger(__name__)

# Seconds without an answer from another host after which it counts as lost. The job has to be over
# 30 s after the loss; a switch that takes another path, or a virtual machine that moves, is silent
# for some seconds too.
SILENCE = 15
IDLE = 5  # seconds of silence after which the kernel asks
PATIENCE = 5.0  # seconds for mpirun to end this process once a rank has told why it fails
# Who loses rank 0 waits so many seconds times its own rank, at most LAST, before it says so: others
# have lost it too, and where mpirun ends all ranks in order rank 0 is the first to go.
STAGGER, LAST = 0.5, 6
BREATH = 0.1  # seconds before the next call is taken, where one could not be

DONE, SPOKEN = b".", b"!"  # a rank's last word: it ends in order; it fails, and has told why
REPORT = b"w"  # before a report to rank 0, and its length
LENGTH = 2  # bytes of it

Gather = Callable[[bytes], list[bytes]]
Place = tuple[str, str]  # the name of a host, and what tells it apart from another of that name


@dataclass(frozen=True)
class Line:
    """A connection to another rank."""

    socket: socket.socket
    rank: int
    """The rank at the other end."""


def hold(rank: int, places: Sequence[Place], gather: Gather) -> Lifeline:
    """Hold lines to other ranks from now on; all ranks call it together.

    Where a rank or a host is lost, this process says so and leaves with code 1.

    Args:
        rank: of this process.
        places: the host of each rank, by rank.
        gather: the collective that gives the bytes of every rank, by rank.
    """
    lifeline = Lifeline(rank, places)
    if len(places) > 1:
        lifeline.join(gather(lifeline.invitation()))
        ending.at_leaving.append(lifeline.last_word)
        # A script that does not end by ``ending`` comes to here if it ends at all.
        atexit.register(lifeline.last_word, EXIT_OK)
        # A forked worker that lived on would hold the lines of a dead rank.
        os.register_at_fork(after_in_child=lifeline.close)
    return lifeline


class Lifeline:
    """The lines of one rank."""

    def __init__(self, rank: int, places: Sequence[Place]) -> None:
        self.rank, self.places = rank, places
        self.first = places.index(places[rank])  # the first rank of this host
        self.lines: list[Line] = []
        self.on_report: Callable[[bytes], None] = lambda report: None  # what rank 0 does with one
        self.word: bytes | None = None  # this rank's last one
        self.secret = secrets.token_bytes(2 * meeting.KEY)  # rank 0's is everyone's
        self.selector = selectors.DefaultSelector()
        self.listeners: dict[str, socket.socket] = {}
        self.absent = 0  # ranks that have yet to call
        self.callers: list[meeting.Caller] = []  # whose lines are not confirmed yet
        if rank == 0 and len(set(places)) > 1:
            self.listeners["far"] = meeting.listen()
            self.absent += len(set(places)) - 1
        if rank == self.first and places.count(places[rank]) > 1:
            self.listeners["near"] = meeting.listen_locally()
            self.absent += places.count(places[rank]) - 1

    def invitation(self) -> bytes:
        """What the other ranks need to call this one, as JSON."""
        told: dict[str, object] = {}
        if "far" in self.listeners:
            told["port"] = self.listeners["far"].getsockname()[1]
            told["addresses"] = meeting.addresses()
        if "near" in self.listeners:
            told["name"] = self.listeners["near"].getsockname().hex()
        if self.rank == 0:
            told["secret"] = self.secret.hex()
        return json.dumps(told).encode()

    def join(self, invitations: Sequence[bytes]) -> None:
        """Connect and watch, in threads of their own; ``invitations`` are all ranks', by rank."""
        root = json.loads(invitations[0])
        self.secret = bytes.fromhex(root["secret"])
        targets: list[meeting.Address] = []
        if self.rank != self.first:
            targets = [bytes.fromhex(json.loads(invitations[self.first])["name"])]
        elif self.rank != 0:
            targets = [(address, root["port"]) for address in root["addresses"]]
        up = 0 if self.rank == self.first else self.first
        if targets:
            threading.Thread(
                target=self._call, args=(targets, up), name="lifeline", daemon=True
            ).start()
        if self.listeners:
            threading.Thread(target=self._serve, name="lifelines", daemon=True).start()

    def last_word(self, code: int) -> None:
        """Tell the others that this rank is about to end with ``code``."""
        if self.word is None:
            self.word = DONE if code in (EXIT_OK, EXIT_PREEMPTED) else SPOKEN
            for line in list(self.lines):
                self._send(line, self.word)

    def report(self, report: bytes) -> None:
        """Send ``report`` to rank 0, by the first rank of this host."""
        up = 0 if self.rank == self.first else self.first
        for line in [line for line in self.lines if line.rank == up]:
            self._send(line, REPORT + len(report).to_bytes(LENGTH, "big") + report)

    def close(self) -> None:
        """Close this process's end of all lines."""
        callers = [caller.socket for caller in self.callers]
        lines = [line.socket for line in self.lines]
        for connection in (*self.listeners.values(), *callers, *lines):
            connection.close()
        self.lines.clear()

    def _call(self, targets: Sequence[meeting.Address], up: int) -> None:
        """Call the rank ``up`` at one of ``targets``, and listen to it: a thread's work."""
        connection = meeting.call(targets, self.rank, self.secret)
        if connection:
            self._hear(self._hold(connection, up))
        elif self.word is None:
            log.warning(
                "rank %d on %s cannot reach rank %d on %s by TCP: if a host is lost, it may take "
                "long to be noticed",
                *(self.rank, self._host(self.rank), up, self._host(up)),
            )

    def _serve(self) -> None:
        """Answer all callers side by side, and listen to those that are held: a thread's work."""
        for listener in self.listeners.values():
            self.selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in self.selector.select(meeting.HELLO if self.callers else None):
                if isinstance(key.data, Line):
                    if not self._hear(key.data):
                        self.selector.unregister(key.data.socket)
                elif isinstance(key.data, meeting.Caller):
                    self._attend(key.data)
                else:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
            for caller in [caller for caller in self.callers if caller.is_late()]:
                self._part(caller)
                caller.socket.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            caller = meeting.answer(listener, self.secret)
        except OSError as error:
            log.debug("a call that cannot be taken: %s", error)
            time.sleep(BREATH)
        else:
            self.callers.append(caller)
            self.selector.register(caller.socket, selectors.EVENT_READ, caller)

    def _attend(self, caller: meeting.Caller) -> None:
        """Read what ``caller`` says; hold its line once it is confirmed."""
        try:
            confirmed = caller.hear()
        except OSError as error:
            log.debug("a call that was none: %s", error)
            self._part(caller)
            caller.socket.close()
            return
        if confirmed and caller.rank is not None:
            self._part(caller)
            caller.socket.setblocking(True)
            line = self._hold(caller.socket, caller.rank)
            self.selector.register(line.socket, selectors.EVENT_READ, line)
            self._close_doors()

    def _part(self, caller: meeting.Caller) -> None:
        self.callers.remove(caller)
        self.selector.unregister(caller.socket)

    def _close_doors(self) -> None:
        """Listen no more once all have called that should."""
        self.absent -= 1
        if not self.absent:
            for listener in self.listeners.values():
                self.selector.unregister(listener)
                listener.close()

    def _hold(self, connection: socket.socket, rank: int) -> Line:
        """Take ``connection``, which both sides have confirmed, for the life of ``rank``."""
        if connection.family == socket.AF_INET:
            meeting.keep_alive(connection, IDLE, SILENCE)
        line = Line(connection, rank)
        self.lines.append(line)
        if self.word is not None:  # the training was over before the line was there
            self._send(line, self.word)
        return line

    def _send(self, line: Line, word: bytes) -> None:
        with contextlib.suppress(OSError):  # the other end has gone already
            line.socket.send(word)

    def _hear(self, line: Line) -> bool:
        """Read a report or the last word on ``line``, or why there is none; False after the end."""
        silent = False
        try:
            word = line.socket.recv(1)
            if word == REPORT:
                length = int.from_bytes(meeting.receive(line.socket, LENGTH), "big")
                report = meeting.receive(line.socket, length)
                (self.report if self.rank else self.on_report)(report)
                return True
        except OSError as error:
            word, silent = b"", not isinstance(error, ConnectionResetError)
        # It stays open: the other end may live on, and would take the closing for this one's death.
        if word == SPOKEN:
            self.last_word(EXIT_FAILURE)
            time.sleep(PATIENCE)
            ending.leave(EXIT_FAILURE)
        if word != DONE:
            self._end(line.rank, silent=silent)
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
        wait = 0.0 if lost else STAGGER * min(self.rank, LAST)
        ending.speak(f"{what}. {ending.how_to_go_on()}", wait=wait)
        self.last_word(EXIT_FAILURE)
        if silent and end_daemon():
            time.sleep(PATIENCE)
        ending.leave(EXIT_FAILURE)

    def _host(self, rank: int) -> str:
        return self.places[rank][0]

    def _ranks(self, rank: int) -> str:
        """All ranks on the host of ``rank``, in words."""
        here = [other for other, place in enumerate(self.places) if place == self.places[rank]]
        if len(here) == 1:
            return f"rank {rank}"
        together = here == list(range(here[0], here[-1] + 1))
        return f"ranks {here[0]}-{here[-1]}" if together else f"ranks {','.join(map(str, here))}"
