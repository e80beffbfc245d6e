"""Horovod's elastic driver: it assigns ranks to slots and answers the requests of ranks.

Horovod blacklists a whole host when a rank on it fails, and ends the other ranks there. So the
driver gets each slot as a host, named ``node1+0``: a rank that is killed costs only its slot, also
on one machine. A blacklisted slot comes back after 2 to 3 s, the next time after 4 to 5, and so on,
at most an hour. The ranks get the real host names.
"""

from __future__ import annotations

import hmac
import logging
import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from horovod.runner.common.util.hosts import HostInfo, SlotInfo, get_host_assignments
from horovod.runner.common.util.timeout import TimeoutException
from horovod.runner.elastic.discovery import HostDiscovery
from horovod.runner.elastic.driver import ELASTIC_TIMEOUT_SECS, ElasticDriver
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.http.http_server import (
    RendezvousHandler,
    RendezvousHTTPServer,
    RendezvousServer,
)
from horovod.runner.util.threads import in_thread
from typing_extensions import override

from hvdtrain.commands.launch.hosts import Host
from hvdtrain.commands.launch.prepare import Pool
from hvdtrain.commands.launch.remote import Reachable
from hvdtrain.config.values import positive
from hvdtrain.errors import EXIT_OK, EXIT_PREEMPTED, EXIT_USAGE, UsageError
from hvdtrain.system.output.text import plural
from hvdtrain.system.runtime import elastic

log = logging.getLogger(__name__)

COOLDOWN = (1, 3600)  # seconds that a slot is blacklisted: half the minimum, and the maximum
TIMEOUT = "HOROVOD_ELASTIC_TIMEOUT"  # seconds to wait for slots
MOMENT = 4.5  # seconds until a slot that failed for the first time is available again
POLL = 0.1  # seconds between two checks of processes and signals


@dataclass
class Slot(SlotInfo):
    """A slot and its rank; for Horovod's driver a host with one rank."""

    real: SlotInfo | None = None  # rank, local rank and so on, by real host

    @override
    def to_response_string(self) -> str:
        return str(self.real.to_response_string() if self.real else "")


def slot_names(hosts: Iterable[Host]) -> list[str]:
    """Return the names of the slots of ``hosts``."""
    return [f"{host.name}+{number}" for host in hosts for number in range(host.slots)]


def host_of(slot: str) -> str:
    """Return the host of a slot's name."""
    return slot.rpartition("+")[0]


def choose_slots(available: Iterable[str], used: Collection[str], most: int) -> list[str]:
    """Return the names of at most ``most`` of the available slots, those in use first."""
    return sorted(available, key=lambda name: name not in used)[:most]


def assign_ranks(slots: Iterable[str], hosts: Sequence[str]) -> list[Slot]:
    """Assign a rank to each of ``slots``, host by host, in the order of ``hosts``."""
    names = sorted(slots, key=lambda name: _position(name, hosts))
    ranks = [HostInfo(host, number) for host, number in Counter(map(host_of, names)).items()]
    assignments = get_host_assignments(ranks, len(names))
    return [
        Slot(name, real.rank, 0, real.rank, real.size, 1, real.size, real)
        for name, real in zip(names, assignments, strict=True)
    ]


def _position(slot: str, hosts: Sequence[str]) -> tuple[int, int]:
    """Return the index of the host of ``slot``, and that of the slot on it."""
    return hosts.index(host_of(slot)), int(slot.rpartition("+")[2])


class Discovery(HostDiscovery):
    """The slots of a pool on hosts that answer; the driver queries them every second."""

    def __init__(self, pool: Pool, reachable: Reachable) -> None:
        self.pool, self.reachable = pool, reachable
        self.hosts: list[str] = []  # all hosts seen so far, in order
        self.queried = threading.Event()

    @override
    def find_available_hosts_and_slots(self) -> dict[str, int]:
        try:
            hosts = self.pool.find()
            answering = self.reachable.among(host.name for host in hosts)
        finally:
            self.queried.set()
        self.hosts += [host.name for host in hosts if host.name not in self.hosts]
        return dict.fromkeys(slot_names(host for host in hosts if host.name in answering), 1)


class PoolDriver(ElasticDriver):
    """Horovod's driver for a ``pool``; ranks reach it through ``server``."""

    def __init__(self, pool: Pool, server: RendezvousServer) -> None:
        self.pool, self.discovery = pool, Discovery(pool, Reachable())
        self.running: dict[str, subprocess.Popen[bytes]] = {}  # workers, by slot
        self.codes: dict[int, int] = {}  # exit codes of this world, by rank
        self.ready: set[str] = set()  # slots that wait for the next world
        self.trouble = ""  # reason why there is no next world; empty: none
        try:
            timeout = positive(os.environ.get(TIMEOUT) or ELASTIC_TIMEOUT_SECS)
        except ValueError as error:
            raise UsageError(f"{TIMEOUT}: {error}") from error
        super().__init__(
            server,
            self.discovery,
            min_num_proc=pool.fewest,
            max_num_proc=pool.most,
            timeout=timeout,
            cooldown_range=COOLDOWN,
        )

    def rank_of(self, slot: str) -> int | None:
        """Return the current rank of the process in ``slot``; None: it has none."""
        here = self.host_assignments.get(slot)
        return here[0].rank if here else None

    def hosts_changed(self) -> bool:
        """Return whether the next world would use other slots than this one."""
        current = self._host_manager.current_hosts
        if current.count_available_slots() < self.pool.fewest:
            return False
        return set(self._get_host_assignments(current)[0]) != set(self.host_assignments)

    @property
    def failed(self) -> set[int]:
        """The lost ranks of this world."""
        orderly = (EXIT_OK, EXIT_PREEMPTED, EXIT_USAGE)
        return {rank for rank, code in list(self.codes.items()) if code not in orderly}

    @override
    def record_ready(self, host: str, slot: int) -> None:
        self.ready.add(host)
        super().record_ready(host, slot)

    @override
    def resume(self) -> None:
        # Wait for a slot that failed for the first time: one restart instead of two.
        end = time.monotonic() + MOMENT
        while self.failed and self._slots() < self.world_size() and time.monotonic() < end:
            time.sleep(POLL)
        try:
            super().resume()
        except Exception as error:
            self.trouble = self.message(error)
            raise

    def message(self, error: Exception) -> str:
        """Return the message for the user about an error of Horovod's driver."""
        if isinstance(error, TimeoutException):
            return (
                f"--min {self.pool.fewest}: {plural(self._slots(), 'slot')} after "
                f"{self._timeout} s ({self.pool.source}); to wait longer, set "
                f"{TIMEOUT}=SECONDS"
            )
        return str(error)

    def _slots(self) -> int:
        """Return the number of available slots that are not blacklisted."""
        with self._wait_hosts_cond:
            return int(self._host_manager.current_hosts.count_available_slots())

    @override
    def wait_for_available_slots(self, min_num_proc: int, min_hosts: int = 1) -> Any:
        self.discovery.queried.wait()
        slots = self._slots()
        if slots < min_num_proc:
            log.info(
                "hvdtrain: --min %d: %s: waiting up to %d s for more (%s; a slot whose rank failed "
                "is available again after 2 s, the next time after 4, and so on)",
                min_num_proc,
                plural(slots, "slot"),
                self._timeout,
                self.pool.source,
            )
        return super().wait_for_available_slots(min_num_proc, min_hosts)

    @override
    def _get_host_assignments(self, current_hosts: Any) -> tuple[dict[str, list[Slot]], list[Slot]]:
        # Horovod's order is that of a set.
        hosts = self.discovery.hosts
        names = sorted(current_hosts.host_assignment_order, key=lambda name: _position(name, hosts))
        chosen = choose_slots(names, self._host_assignments, self.pool.most)
        slots = assign_ranks(chosen, hosts)
        return {slot.hostname: [slot] for slot in slots}, slots

    @override
    def _update_host_assignments(self, current_hosts: Any) -> Any:
        self.codes.clear()
        self.ready.clear()
        # A slot that came back while the others waited for it has no process any more; Horovod's
        # driver would not start one in a slot that is in use.
        kept = {
            name: slots for name, slots in self.host_assignments.items() if name in self.running
        }
        # It ends the job if no slot is kept, since only kept ones have the state; here the state
        # comes from the checkpoint.
        common = kept.keys() & self._get_host_assignments(current_hosts)[0].keys()
        self._host_assignments: dict[str, list[Slot]] = kept if common else {}
        return super()._update_host_assignments(current_hosts)


class Server(RendezvousServer):
    """Horovod's server of its driver, for whoever knows the job's secret."""

    def open(self, driver: PoolDriver, address: str, secret: str) -> int:
        """Listen at ``address`` only, and return the port."""
        handler = make_handler(driver, secret)
        self._httpd = RendezvousHTTPServer((address, 0), handler, verbose=0)
        self._httpd.daemon_threads = True  # requests may wait for ranks that never come
        self._httpd.handle_error = lambda *_: None  # a rank ended while it waited
        self._listen_thread = in_thread(self._httpd.serve_forever)
        return int(self._httpd.server_port)


def make_handler(driver: PoolDriver, secret: str) -> type:
    """Return the class that answers the requests of ranks to ``driver``."""
    base: Any = create_rendezvous_handler(driver)

    class Handler(base):
        path: str

        def parse_request(self) -> bool:
            """Take the secret off the path; refuse a request without it."""
            if not super().parse_request():
                return False
            first, _, rest = self.path.removeprefix("/").partition("/")
            self.path = f"/{rest}"
            # Horovod's own requests have the port after the secret.
            if hmac.compare_digest(first.partition(":")[0].encode(), secret.encode()):
                return True
            self.send_status_code(HTTPStatus.FORBIDDEN)
            return False

        def _put_value(self, scope: str, key: str, value: bytes) -> None:
            # Horovod's handler unpickles the addresses of its own workers, of which there are none.
            RendezvousHandler._put_value(self, scope, key, value)

        def _get_value(self, scope: str, key: str) -> Any:
            if scope == elastic.CHANGED:
                return (elastic.YES if driver.hosts_changed() else elastic.NO).encode()
            if scope == elastic.LOST:
                others = driver.failed - {driver.rank_of(key.partition(":")[0])}
                return (elastic.YES if others else elastic.NO).encode()
            return super()._get_value(scope, key)

    return Handler
