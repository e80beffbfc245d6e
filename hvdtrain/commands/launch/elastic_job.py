"""An elastic job: a process in each slot, which persists and restarts its rank."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterable, Sequence

import psutil
from horovod.runner.util.network import get_driver_ip

from hvdtrain.commands.launch import host_process
from hvdtrain.commands.launch.elastic_driver import (
    POLL,
    PoolDriver,
    Server,
    Slot,
    assign_ranks,
    choose_slots,
    host_of,
    slot_names,
)
from hvdtrain.commands.launch.host_process import INTERFACE, RESTART, STOP, release
from hvdtrain.commands.launch.prepare import HERE, Pool
from hvdtrain.commands.launch.remote import NO_SSH, is_here, on_host
from hvdtrain.errors import (
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_USAGE,
    HvdtrainError,
    UsageError,
)
from hvdtrain.system.machine.network import address_towards
from hvdtrain.system.machine.threads import thread_variables
from hvdtrain.system.runtime import elastic
from hvdtrain.system.runtime.command import NOT_FOUND, Command, start
from hvdtrain.system.runtime.detect import SLOT
from hvdtrain.system.runtime.spawn import AFTER_STOP, StopSignals, exit_code, signal_of

log = logging.getLogger(__name__)

LONG = "86400"  # seconds
# Seconds for the other ranks to request a new rank once one is lost or has requested it; after
# ``RESTART_AFTER`` their workers restart them, after ``LOST_AFTER`` they count as lost, too.
RESTART_AFTER, LOST_AFTER = 10.0, 30.0
STOP_AGAIN = 1.0  # seconds; a rank that was just restarted has missed it
# Options by which ssh exits if a host is down or goes down: the slot is lost then.
NOTICE = ("-oConnectTimeout=10", "-oServerAliveInterval=5", "-oServerAliveCountMax=3")
ELSEWHERE = "198.51.100.1"  # a reserved address: the route to it is the default route (RFC 5737)


def worker(
    slot: Slot, words: Sequence[str], threads: int | None, address: str, port: object
) -> Command:
    """Return the command that starts ``words`` as the rank of ``slot``.

    ``address`` and ``port`` are the driver's; ``threads`` as in ``Pool``.
    """
    assert slot.real
    host = host_of(slot.hostname)
    rank_variables = host_process.variables(slot.to_response_string().split(",")) | {
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        # Also the limit of each message between two ranks, one of which may be saving.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", LONG),
        elastic.ADDRESS: address,
        elastic.PORT: str(port),
        SLOT: f"{slot.hostname}:0",
    }
    command = Command(
        (*host_process.PROGRAM, "horovod", *words),
        rank_variables | thread_variables(threads, os.environ),
    )
    return on_host(host, command, os.environ, *NOTICE)


def show(pool: Pool, words: Sequence[str]) -> str:
    """Return a line per rank that would be started now, without the driver's address."""
    hosts = pool.find()
    slots = assign_ranks(
        choose_slots(slot_names(hosts), (), pool.most), [host.name for host in hosts]
    )
    workers = [worker(slot, words, pool.threads, "ADDRESS", "PORT") for slot in slots]
    return "\n".join(command.show() for command in workers)


def driver_address(pool: Pool) -> str:
    """Return the address of this machine for the ranks on the hosts of ``pool``.

    Raises:
        UsageError: there is no route to the hosts, or no such interface.
    """
    if name := os.environ.get(INTERFACE):
        if name not in psutil.net_if_addrs():
            raise UsageError(f"{INTERFACE}={name}: no such network interface")
        return str(get_driver_ip([name]))
    remote = [host.name for host in pool.find() if not is_here(host.name)]
    if remote:
        if address := address_towards(remote[0]):
            return address
        raise UsageError(
            f"host {remote[0]} ({pool.source}): unknown host, or no route to it; set the network "
            f"interface, e.g. {INTERFACE}=eth0"
        )
    return (address_towards(ELSEWHERE) if pool.script else None) or "127.0.0.1"


class ElasticJob:
    """A running elastic job of ``words`` in the slots of ``pool``; ``signals`` must be open."""

    def __init__(self, pool: Pool, words: Sequence[str], signals: StopSignals) -> None:
        self.words, self.signals = words, signals
        self.stop = ""  # the signal that requested a stop; empty: none
        self.over = False
        self.well_at = time.monotonic()  # when no slot was last waited for
        self.restarted = False  # whether the slots that are waited for were restarted
        self.lost: set[str] = set()  # those of them that count as lost
        # Horovod's runner logs to the root logger; its messages are reported here.
        logging.getLogger().addFilter(lambda record: False)
        self.address, self.secret = driver_address(pool), secrets.token_hex()
        server = Server()
        self.driver = PoolDriver(pool, server)
        self.port = server.open(self.driver, self.address, self.secret)

    def run(self) -> int:
        """Run to the end; return the exit code.

        Raises:
            HvdtrainError: there were too few slots for too long.
        """
        threading.Thread(target=self._start, name="start", daemon=True).start()
        stopped_at, deadline = 0.0, float("inf")
        while not (self.over or self.driver.finished()) and time.monotonic() < deadline:
            time.sleep(POLL)
            self._note_signals()
            if self.stop and time.monotonic() > stopped_at + STOP_AGAIN:
                stopped_at = time.monotonic()
                self._send(STOP, self.driver.running)
            self._restart_late_ranks()
            # Once a rank has stopped, the others follow; those that are starting may miss it.
            if self._codes and (self.stop or EXIT_PREEMPTED in self._codes.values()):
                deadline = min(deadline, time.monotonic() + AFTER_STOP)
            self.over = self.over or bool(self.stop and not self.driver.running)
        codes, cut = self._codes, bool(self.driver.running)
        self._end()
        if self.driver.trouble and not self.stop:
            raise HvdtrainError(self.driver.trouble)
        for code in (EXIT_USAGE, EXIT_PREEMPTED):
            if code in codes.values():
                return code
        failed = next((codes[rank] for rank in sorted(codes) if codes[rank]), EXIT_OK)
        if self.stop and (cut or not codes or failed > 128):
            return 128 + signal.Signals[self.stop]
        return failed if codes else EXIT_FAILURE

    @property
    def _codes(self) -> dict[int, int]:
        """The exit codes of this world so far, by rank."""
        return dict(self.driver.codes)

    def _start(self) -> None:
        try:
            self.driver.start(self.driver.pool.fewest, self._work)
        except Exception as error:  # Horovod has one for each cause
            self.driver.trouble = self.driver.message(error)
            self.over = True

    def _work(self, slot: Slot, events: Sequence[threading.Event]) -> tuple[int, float]:
        """Run the rank of ``slot`` in this thread, until it ends or an event ends it."""
        if self.stop or self.over:
            return EXIT_PREEMPTED, time.time()
        threads = self.driver.pool.threads
        command = worker(slot, self.words, threads, self.address, self.port)
        try:
            process = start(command, fed=True)
        except OSError as error:
            log.warning("hvdtrain: %s: %s", command.argv[0], error.strerror)
            self.driver.codes[slot.rank] = NOT_FOUND
            return NOT_FOUND, time.time()
        host_process.send(process, f"{self.secret}\n".encode())
        self.driver.running[slot.hostname] = process
        while process.poll() is None:
            if any(event.is_set() for event in events):
                release(process)
            time.sleep(POLL)
        code, rank = exit_code(process.returncode), self.driver.rank_of(slot.hostname)
        host = host_of(slot.hostname)
        if code == NO_SSH:
            self.driver.discovery.reachable.doubt(host)
        if rank is not None:
            self.driver.codes[rank] = code
            self.over = self.over or code == EXIT_USAGE
            orderly = code in (EXIT_OK, EXIT_PREEMPTED)
            if not (orderly or self.stop or self.over or slot.hostname in self.lost):
                log.info(
                    "hvdtrain: rank %d on %s was ended by %s",
                    rank,
                    socket.gethostname() if host == HERE else host,
                    signal_of(code) or f"code {code}",
                )
        del self.driver.running[slot.hostname]
        return code, time.time()

    def _note_signals(self) -> None:
        for number in self.signals.take():
            if self.stop and number == signal.SIGINT:
                log.info("hvdtrain: second SIGINT: killing the ranks")
                self.over = True
            elif not self.stop:
                self.stop = number.name
                log.info("hvdtrain: %s: the ranks save and stop", self.stop)

    def _restart_late_ranks(self) -> None:
        """Restart the ranks that the others wait for, and count them as lost in the end.

        A rank that is still connecting does not notice that another one is lost; and ssh may wait
        for a host that is unreachable.
        """
        driver, now = self.driver, time.monotonic()
        late = driver.running.keys() & driver.host_assignments.keys() - driver.ready
        if self.stop or not late or not (driver.failed or driver.ready):
            self.well_at, self.restarted = now, False
            self.lost.clear()
        elif now > self.well_at + LOST_AFTER:
            for slot in late - self.lost:
                log.info("hvdtrain: %s does not answer: its rank counts as lost", host_of(slot))
                self.lost.add(slot)
                driver.discovery.reachable.doubt(host_of(slot))
                self._kill(slot)
        elif now > self.well_at + RESTART_AFTER and not self.restarted:
            self.restarted = True
            self._send(RESTART, late)

    def _kill(self, slot: str) -> None:
        """Let the worker of ``slot`` kill its rank; kill the worker if it does not."""
        if process := self.driver.running.get(slot):  # else it has just ended
            threading.Thread(target=host_process.end, args=([process],), daemon=True).start()

    def _send(self, order: bytes, slots: Iterable[str]) -> None:
        for slot in list(slots):
            if process := self.driver.running.get(slot):  # else it has just ended
                host_process.send(process, order)

    def _end(self) -> None:
        """End the remaining workers and the driver."""
        self.over = True
        host_process.end(self.driver.running.values())
        self.driver.stop()
