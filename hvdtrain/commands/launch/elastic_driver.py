"""Horovod's elastic driver, with processes of our own: which slot has which rank, and when it ends.

Horovod bars a whole host when a rank on it fails, and ends the other ranks there. So each slot is a
host to it, named ``node1+0``: a rank that is killed costs its own slot, on one machine too. A
barred slot comes back after 2 to 3 s, the next time 4 to 5, and so on, at most an hour. The ranks
themselves are told of hosts as they are.

A worker stays, and starts its rank anew (``worker.py``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod.runner.common.util.hosts import HostInfo, SlotInfo, get_host_assignments
from horovod.runner.elastic.discovery import HostDiscovery
from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.http.http_server import RendezvousServer
from horovod.runner.util.network import get_driver_ip
from typing_extensions import override

from hvdtrain.commands.launch.elastic import Pool
from hvdtrain.commands.launch.torchrun import is_here, names_here, on_host
from hvdtrain.commands.launch.watch import StopSignals
from hvdtrain.commands.launch.worker import ANEW, ASK, INTERFACE, variables
from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, EXIT_PREEMPTED, EXIT_USAGE, HvdtrainError
from hvdtrain.system.machine.network import address_towards
from hvdtrain.system.output.text import plural
from hvdtrain.system.runtime import elastic
from hvdtrain.system.runtime.command import NOT_FOUND, Command, start
from hvdtrain.system.runtime.detect import SLOT
from hvdtrain.system.runtime.processes import AFTER_STOP, exit_code, is_of_a_signal

log = logging.getLogger(__name__)

WORKER = (sys.executable, "-m", "hvdtrain.commands.launch.worker")
COOLDOWN = (1, 3600)  # seconds: half of the shortest time that a slot is barred, and the longest
LONG = "86400"  # seconds
# Seconds in which the other ranks have to ask for a new rank when one is lost or has asked; after
# ``AFTER_LOSS`` their workers start them anew, after ``GIVEN_UP`` they count as lost, too.
AFTER_LOSS, GIVEN_UP = 10.0, 30.0
MOMENT = 4.5  # seconds in which a slot is used again that has failed for the first time
POLL = 0.1  # seconds between two looks at processes and signals
ASK_AGAIN = 1.0  # seconds; a rank that just started anew has not heard it
PATIENCE = 3.0  # seconds for a worker to end its rank
# Options by which ssh ends where a host is not there, or no longer: the slot is lost then.
NOTICE = ("-oConnectTimeout=10", "-oServerAliveInterval=5", "-oServerAliveCountMax=3")
ELSEWHERE = "198.51.100.1"  # an address that is nobody's: the way there is the way out (RFC 5737)


@dataclass
class Slot(SlotInfo):
    """A slot with its rank, to Horovod's driver a host with one rank."""

    place: SlotInfo | None = None  # rank, local rank and so on, on hosts as they are

    @override
    def to_response_string(self) -> str:
        return str(self.place.to_response_string() if self.place else "")


def host_of(slot: str) -> str:
    """Return the host of a slot's name."""
    return slot.rpartition("+")[0]


def choose_slots(there: Iterable[str], used: Collection[str], most: int) -> list[str]:
    """Return the names of at most ``most`` slots that are there; those in use stay so."""
    return sorted(there, key=lambda name: name not in used)[:most]


def place_ranks(slots: Iterable[str], hosts: Sequence[str]) -> list[Slot]:
    """Give each of ``slots`` a rank, host after host, in the order of ``hosts``."""
    names = sorted(
        slots, key=lambda name: (hosts.index(host_of(name)), int(name.rpartition("+")[2]))
    )
    ranks = [HostInfo(host, number) for host, number in Counter(map(host_of, names)).items()]
    places = get_host_assignments(ranks, len(names))
    return [
        Slot(name, place.rank, 0, place.rank, place.size, 1, place.size, place)
        for name, place in zip(names, places, strict=True)
    ]


class Discovery(HostDiscovery):
    """The slots of a pool, as the driver asks for them every second."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.hosts: list[str] = []  # all that were ever there, in order
        self.asked = threading.Event()

    @override
    def find_available_hosts_and_slots(self) -> dict[str, int]:
        try:
            found = self.pool.find()
        finally:
            self.asked.set()
        self.hosts += [host.name for host in found if host.name not in self.hosts]
        return {f"{host.name}+{number}": 1 for host in found for number in range(host.slots)}


class Driver(ElasticDriver):
    """Horovod's driver for a ``pool``; ``server`` is where ranks ask it."""

    def __init__(self, pool: Pool, server: RendezvousServer) -> None:
        self.pool, self.discovery = pool, Discovery(pool)
        self.running: dict[str, subprocess.Popen[bytes]] = {}  # workers, by slot
        self.codes: dict[int, int] = {}  # exit codes of this world, by rank
        self.ready: set[str] = set()  # slots that wait for the next one
        self.trouble = ""  # why there is no next world
        super().__init__(server, self.discovery, pool.fewest, pool.most, cooldown_range=COOLDOWN)

    def rank_of(self, slot: str) -> int | None:
        """Return the rank that the process in ``slot`` has now; None: it has none."""
        here = self.host_assignments.get(slot)
        return here[0].rank if here else None

    def hosts_changed(self) -> bool:
        """Return whether other slots are to be used than those of this world."""
        there = self._host_manager.current_hosts
        if there.count_available_slots() < self.pool.fewest:
            return False
        return set(self._get_host_assignments(there)[0]) != set(self.host_assignments)

    @property
    def failed(self) -> set[int]:
        """The ranks of this world that are lost."""
        well = (EXIT_OK, EXIT_PREEMPTED, EXIT_USAGE)
        return {rank for rank, code in self.codes.items() if code not in well}

    @override
    def record_ready(self, host: str, slot: int) -> None:
        self.ready.add(host)
        super().record_ready(host, slot)

    @override
    def resume(self) -> None:
        # A slot that failed for the first time is back in a moment: one start instead of two.
        end = time.monotonic() + MOMENT
        while self._slots() < self.world_size() and time.monotonic() < end:
            time.sleep(POLL)
        try:
            super().resume()
        except Exception as error:
            self.trouble = str(error)
            raise

    def _slots(self) -> int:
        """Return how many slots are there and not barred."""
        with self._wait_hosts_cond:
            return int(self._host_manager.current_hosts.count_available_slots())

    @override
    def wait_for_available_slots(self, min_num_proc: int, min_hosts: int = 1) -> Any:
        self.discovery.asked.wait()
        slots = self._slots()
        if slots < min_num_proc:
            log.info(
                "hvdtrain: %s, and --min asks for %d: waiting up to %d s for more (%s; a slot "
                "whose rank failed comes back after 2 s, the next time after 4, and so on)",
                *(plural(slots, "slot"), min_num_proc, self._timeout, self.pool.source),
            )
        return super().wait_for_available_slots(min_num_proc, min_hosts)

    @override
    def _get_host_assignments(self, current_hosts: Any) -> tuple[dict[str, list[Slot]], list[Slot]]:
        there = current_hosts.host_assignment_order
        chosen = choose_slots(there, self._host_assignments, self.pool.most)
        slots = place_ranks(chosen, self.discovery.hosts)
        return {slot.hostname: [slot] for slot in slots}, slots

    @override
    def _update_host_assignments(self, current_hosts: Any) -> Any:
        self.codes.clear()
        self.ready.clear()
        # A slot that came back while all waited for it has no process any more; Horovod's driver
        # would not start one in a slot that is in use.
        self._host_assignments: dict[str, list[Slot]] = {
            name: slots for name, slots in self.host_assignments.items() if name in self.running
        }
        return super()._update_host_assignments(current_hosts)


def make_handler(driver: Driver) -> type:
    """Return the class that answers what ranks ask ``driver``."""
    base: Any = create_rendezvous_handler(driver)

    class Handler(base):
        def _get_value(self, scope: str, key: str) -> Any:
            if scope == elastic.CHANGED:
                return (elastic.YES if driver.hosts_changed() else elastic.NO).encode()
            if scope == elastic.LOST:
                others = driver.failed - {driver.rank_of(key.partition(":")[0])}
                return (elastic.YES if others else elastic.NO).encode()
            return super()._get_value(scope, key)

    return Handler


def worker(
    slot: Slot,
    words: Sequence[str],
    threads: int | None,
    address: str,
    port: object,
    environ: Mapping[str, str],
) -> Command:
    """Return the command that starts ``words`` as the rank of ``slot``.

    Args:
        slot: with its place.
        words: the program and its arguments.
        threads: OMP_NUM_THREADS of the rank; None leaves it to the program.
        address: of the driver.
        port: of the driver.
        environ: the user's environment.
    """
    assert slot.place
    host = host_of(slot.hostname)
    own = variables(slot.to_response_string().split(",")) | {
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        # Of each message between two ranks, too, and one may have to wait for the other's save.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", LONG),
        elastic.ADDRESS: address,
        elastic.PORT: str(port),
        SLOT: f"{slot.hostname}:0",
    }
    own |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    command = Command((*WORKER, *words), own)
    return on_host(host, command, environ, Path.cwd(), names_here(), *NOTICE)


def show(pool: Pool, words: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return a line per rank that would be started now, but for the driver's address."""
    discovery = Discovery(pool)
    chosen = choose_slots(discovery.find_available_hosts_and_slots(), (), pool.most)
    slots = place_ranks(chosen, discovery.hosts)
    return "\n".join(
        worker(slot, words, pool.threads, "ADDRESS", "PORT", environ).show() for slot in slots
    )


def driver_address(pool: Pool, environ: Mapping[str, str]) -> str:
    """Return this machine's address at which the ranks on the hosts of ``pool`` reach it."""
    if name := environ.get(INTERFACE):
        return str(get_driver_ip([name]))
    here = names_here()
    others = [host.name for host in pool.find() if not is_here(host.name, here)]
    towards = address_towards(others[0] if others else ELSEWHERE) if others or pool.script else None
    return towards or "127.0.0.1"


class ElasticJob:
    """A running job.

    Args:
        pool: the slots.
        words: the program that each rank runs, and its arguments.
        signals: open ones, to hand on.
        environ: the user's environment.
    """

    def __init__(
        self,
        pool: Pool,
        words: Sequence[str],
        signals: StopSignals,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.words, self.signals, self.environ = words, signals, environ
        self.asked = ""  # the signal by which the ranks have been asked to stop
        self.over = False
        self.well_at = time.monotonic()  # when no slot was waited for
        self.told = False  # the slots that are waited for
        self.given_up: set[str] = set()  # of them
        # Horovod's runner logs by the root logger itself, and what it says is said here.
        logging.getLogger().addFilter(lambda record: False)
        self.server = RendezvousServer()
        self.driver = Driver(pool, self.server)
        self.address = driver_address(pool, environ)
        self.port = self.server.start(make_handler(self.driver))
        self.server._httpd.daemon_threads = True  # they may wait for ranks that never come

    def run(self) -> int:
        """Run to the end; return the exit code.

        Raises:
            HvdtrainError: there were too few slots for too long.
        """
        threading.Thread(target=self._start, name="start", daemon=True).start()
        asked_at, ends = 0.0, float("inf")
        while not (self.over or self.driver.finished()) and time.monotonic() < ends:
            time.sleep(POLL)
            self._note_signals()
            if self.asked and time.monotonic() > asked_at + ASK_AGAIN:
                asked_at = time.monotonic()
                self._order(ASK, self.driver.running)
            self._hurry()
            if self.asked and EXIT_PREEMPTED in self.driver.codes.values():
                ends = min(ends, time.monotonic() + AFTER_STOP)
            self.over = self.over or bool(self.asked and not self.driver.running)
        self._end()
        if self.driver.trouble and not self.asked:
            raise HvdtrainError(self.driver.trouble)
        codes = self.driver.codes
        for code in (EXIT_USAGE, EXIT_PREEMPTED):
            if code in codes.values():
                return code
        if self.asked:
            return 128 + signal.Signals[self.asked]
        return codes[min(codes)] if codes else EXIT_FAILURE

    def _start(self) -> None:
        try:
            self.driver.start(self.driver.pool.fewest, self._work)
        except Exception as error:  # of Horovod's, one for each cause
            self.driver.trouble = str(error)
            self.over = True

    def _work(self, slot: Slot, events: Sequence[threading.Event]) -> tuple[int, float]:
        """Run the rank of ``slot`` to its end, in a thread of its own, until an event ends it."""
        if self.asked or self.over:
            return EXIT_PREEMPTED, time.time()
        threads = self.driver.pool.threads
        command = worker(slot, self.words, threads, self.address, self.port, self.environ)
        try:
            process = start(command, fed=True)
        except OSError as error:
            log.warning("hvdtrain: %s: %s", command.argv[0], error.strerror)
            return NOT_FOUND, time.time()
        self.driver.running[slot.hostname] = process
        while process.poll() is None:
            if any(event.is_set() for event in events):
                _release(process)
            time.sleep(POLL)
        code, rank = exit_code(process.returncode), self.driver.rank_of(slot.hostname)
        if rank is not None:
            self.driver.codes[rank] = code
            self.over = self.over or code == EXIT_USAGE
            if code and not (self.asked or self.over or slot.hostname in self.given_up):
                # ssh itself ends with 255, which is no signal's.
                by = signal.Signals(code - 128).name if is_of_a_signal(code) else f"code {code}"
                log.info(
                    "hvdtrain: rank %d on %s was ended by %s",
                    *(rank, _shown(host_of(slot.hostname)), by),
                )
        del self.driver.running[slot.hostname]
        return code, time.time()

    def _note_signals(self) -> None:
        numbers, self.signals.came = self.signals.came, []
        for number in numbers:
            if self.asked and number == signal.SIGINT:
                log.info("hvdtrain: SIGINT again: the ranks are ended")
                self.over = True
            elif not self.asked:
                self.asked = signal.Signals(number).name
                log.info("hvdtrain: %s: the ranks are asked to save and stop", self.asked)

    def _hurry(self) -> None:
        """Start the ranks anew that others wait for, and in the end give them up.

        A rank that is still connecting does not learn that another one is lost; and where a host is
        out of reach, ssh may wait for it.
        """
        driver, now = self.driver, time.monotonic()
        late = driver.running.keys() & driver.host_assignments.keys() - driver.ready
        if self.asked or not late or not (driver.failed or driver.ready):
            self.well_at, self.told = now, False
            self.given_up.clear()
        elif now > self.well_at + GIVEN_UP:
            for slot in late - self.given_up:
                log.info("hvdtrain: %s does not answer: its rank counts as lost", host_of(slot))
                self.given_up.add(slot)
                driver.running[slot].kill()
        elif now > self.well_at + AFTER_LOSS and not self.told:
            self.told = True
            self._order(ANEW, late)

    def _order(self, order: bytes, slots: Iterable[str]) -> None:
        for process in [self.driver.running.get(slot) for slot in slots]:
            with contextlib.suppress(OSError, ValueError):  # it has ended
                if process and process.stdin:
                    os.write(process.stdin.fileno(), order)

    def _end(self) -> None:
        """End all that is left, and the driver."""
        self.over = True
        left = list(self.driver.running.values())
        for process in left:
            _release(process)
        for process in left:
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
        self.driver.stop()


def _release(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin
    process.stdin.close()


def _shown(host: str) -> str:
    return socket.gethostname() if host == "localhost" else host
