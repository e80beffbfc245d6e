"""An elastic job: a worker in each slot, which stays and starts its rank anew (``worker.py``)."""

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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil
from horovod.runner.http.http_server import RendezvousServer
from horovod.runner.util.network import get_driver_ip

from hvdtrain.commands.launch.elastic import HERE, Pool
from hvdtrain.commands.launch.elastic_driver import (
    POLL,
    Discovery,
    Driver,
    Slot,
    choose_slots,
    host_of,
    make_handler,
    place_ranks,
)
from hvdtrain.commands.launch.remote import NO_SSH, Reachable, is_here, names_here, on_host
from hvdtrain.commands.launch.stop import StopSignals
from hvdtrain.commands.launch.worker import ANEW, ASK, INTERFACE, variables
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
from hvdtrain.system.runtime.processes import AFTER_STOP, exit_code, signal_of

log = logging.getLogger(__name__)

WORKER = (sys.executable, "-m", "hvdtrain.commands.launch.worker")
LONG = "86400"  # seconds
# Seconds in which the other ranks have to ask for a new rank when one is lost or has asked; after
# ``AFTER_LOSS`` their workers start them anew, after ``GIVEN_UP`` they count as lost, too.
AFTER_LOSS, GIVEN_UP = 10.0, 30.0
ASK_AGAIN = 1.0  # seconds; a rank that just started anew has not heard it
PATIENCE = 3.0  # seconds for a worker to end its rank
# Options by which ssh ends where a host is not there, or no longer: the slot is lost then.
NOTICE = ("-oConnectTimeout=10", "-oServerAliveInterval=5", "-oServerAliveCountMax=3")
ELSEWHERE = "198.51.100.1"  # an address that is nobody's: the way there is the way out (RFC 5737)


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
    command = Command((*WORKER, *words), own | thread_variables(threads, environ))
    return on_host(host, command, environ, Path.cwd(), names_here(), *NOTICE)


def show(pool: Pool, words: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return a line per rank that would be started now, but for the driver's address."""
    discovery = Discovery(pool, Reachable(lambda host: None))  # nobody is asked
    chosen = choose_slots(discovery.find_available_hosts_and_slots(), (), pool.most)
    slots = place_ranks(chosen, discovery.hosts)
    return "\n".join(
        worker(slot, words, pool.threads, "ADDRESS", "PORT", environ).show() for slot in slots
    )


def driver_address(pool: Pool, environ: Mapping[str, str]) -> str:
    """Return this machine's address at which the ranks on the hosts of ``pool`` reach it.

    Raises:
        UsageError: there is no way to the hosts, or no such interface.
    """
    if name := environ.get(INTERFACE):
        if name not in psutil.net_if_addrs():
            raise UsageError(f"{INTERFACE}={name}: there is no such interface here")
        return str(get_driver_ip([name]))
    here = names_here()
    others = [host.name for host in pool.find() if not is_here(host.name, here)]
    if others:
        if towards := address_towards(others[0]):
            return towards
        raise UsageError(
            f"host {others[0]} ({pool.source}) is not known here, or there is no way to it: name "
            f"the interface that leads to it, as in {INTERFACE}=eth0"
        )
    return (address_towards(ELSEWHERE) if pool.script else None) or "127.0.0.1"


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
        self.server._httpd.handle_error = lambda *_: None  # of a rank that ended while it waited

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
            # Once one has left, the others follow; those that are starting may not hear it.
            if self._codes and (self.asked or EXIT_PREEMPTED in self._codes.values()):
                ends = min(ends, time.monotonic() + AFTER_STOP)
            self.over = self.over or bool(self.asked and not self.driver.running)
        codes, cut = self._codes, bool(self.driver.running)
        self._end()
        if self.driver.trouble and not self.asked:
            raise HvdtrainError(self.driver.trouble)
        for code in (EXIT_USAGE, EXIT_PREEMPTED):
            if code in codes.values():
                return code
        failed = next((codes[rank] for rank in sorted(codes) if codes[rank]), EXIT_OK)
        if self.asked and (cut or not codes or failed > 128):
            return 128 + signal.Signals[self.asked]
        return failed if codes else EXIT_FAILURE

    @property
    def _codes(self) -> dict[int, int]:
        """The exit codes of this world up to now, by rank."""
        return dict(self.driver.codes)

    def _start(self) -> None:
        try:
            self.driver.start(self.driver.pool.fewest, self._work)
        except Exception as error:  # of Horovod's, one for each cause
            self.driver.trouble = self.driver.told(error)
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
            self.driver.codes[slot.rank] = NOT_FOUND
            return NOT_FOUND, time.time()
        self.driver.running[slot.hostname] = process
        while process.poll() is None:
            if any(event.is_set() for event in events):
                _release(process)
            time.sleep(POLL)
        code, rank = exit_code(process.returncode), self.driver.rank_of(slot.hostname)
        if code == NO_SSH:
            self.driver.discovery.reachable.doubt(host_of(slot.hostname))
        if rank is not None:
            self.driver.codes[rank] = code
            self.over = self.over or code == EXIT_USAGE
            well = code in (EXIT_OK, EXIT_PREEMPTED)
            if not (well or self.asked or self.over or slot.hostname in self.given_up):
                log.info(
                    "hvdtrain: rank %d on %s was ended by %s",
                    *(rank, _shown(host_of(slot.hostname)), signal_of(code) or f"code {code}"),
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
                driver.discovery.reachable.doubt(host_of(slot))
                self._give_up(slot)
        elif now > self.well_at + AFTER_LOSS and not self.told:
            self.told = True
            self._order(ANEW, late)

    def _give_up(self, slot: str) -> None:
        """Let the worker of ``slot`` end its rank; end it itself where it does not."""
        process = self.driver.running.get(slot)
        if process is None:  # it has just ended
            return
        _release(process)
        killer = threading.Timer(PATIENCE, process.kill)
        killer.daemon = True
        killer.start()

    def _order(self, order: bytes, slots: Iterable[str]) -> None:
        for process in [self.driver.running.get(slot) for slot in list(slots)]:
            with contextlib.suppress(OSError, ValueError):  # it has ended
                if process and process.stdin:
                    os.write(process.stdin.fileno(), order)

    def _end(self) -> None:
        """End all that is left, and the driver."""
        self.over = True
        left = list(self.driver.running.values())
        for process in left:
            _release(process)
        end = time.monotonic() + PATIENCE
        for process in left:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        self.driver.stop()


def _release(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin
    process.stdin.close()


def _shown(host: str) -> str:
    return socket.gethostname() if host == HERE else host
