"""Horovod's elastic driver: which slot has which rank, and what ranks ask.

Horovod blacklists a whole host when a rank on it fails, and ends the other ranks there. So each
slot is a host to it, named ``node1+0``: a rank that is killed costs its own slot, on one machine
too. A blacklisted slot comes back after 2 to 3 s, the next time 4 to 5, and so on, at most an hour.
The ranks themselves are told of hosts as they are.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from horovod.runner.common.util.hosts import HostInfo, SlotInfo, get_host_assignments
from horovod.runner.common.util.timeout import TimeoutException
from horovod.runner.elastic.discovery import HostDiscovery
from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.http.http_server import RendezvousServer
from typing_extensions import override

from hvdtrain.commands.launch.elastic import Pool
from hvdtrain.commands.launch.remote import Reachable
from hvdtrain.errors import (
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_USAGE,
)
from hvdtrain.system.output.text import plural
from hvdtrain.system.runtime import elastic

log = logging.getLogger(__name__)

COOLDOWN = (1, 3600)  # seconds that a slot is blacklisted: half of the shortest, and the longest
MOMENT = 4.5  # seconds in which a slot is used again that has failed for the first time
POLL = 0.1  # seconds between two looks at processes and signals


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
    names = sorted(slots, key=lambda name: _place(name, hosts))
    ranks = [HostInfo(host, number) for host, number in Counter(map(host_of, names)).items()]
    places = get_host_assignments(ranks, len(names))
    return [
        Slot(name, place.rank, 0, place.rank, place.size, 1, place.size, place)
        for name, place in zip(names, places, strict=True)
    ]


def _place(slot: str, hosts: Sequence[str]) -> tuple[int, int]:
    """Return where ``slot`` stands, host after host."""
    return hosts.index(host_of(slot)), int(slot.rpartition("+")[2])


class Discovery(HostDiscovery):
    """The slots of a pool on hosts that answer, as the driver asks for them every second."""

    def __init__(self, pool: Pool, reachable: Reachable) -> None:
        self.pool, self.reachable = pool, reachable
        self.hosts: list[str] = []  # all that were ever there, in order
        self.asked = threading.Event()

    @override
    def find_available_hosts_and_slots(self) -> dict[str, int]:
        try:
            found = self.pool.find()
            answer = self.reachable.among(host.name for host in found)
        finally:
            self.asked.set()
        self.hosts += [host.name for host in found if host.name not in self.hosts]
        there = [host for host in found if host.name in answer]
        return {f"{host.name}+{number}": 1 for host in there for number in range(host.slots)}


class Driver(ElasticDriver):
    """Horovod's driver for a ``pool``; ``server`` is where ranks ask it."""

    def __init__(self, pool: Pool, server: RendezvousServer) -> None:
        self.pool, self.discovery = pool, Discovery(pool, Reachable())
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
        return {rank for rank, code in list(self.codes.items()) if code not in well}

    @override
    def record_ready(self, host: str, slot: int) -> None:
        self.ready.add(host)
        super().record_ready(host, slot)

    @override
    def resume(self) -> None:
        # A slot that failed for the first time is back in a moment: one start instead of two.
        end = time.monotonic() + MOMENT
        while self.failed and self._slots() < self.world_size() and time.monotonic() < end:
            time.sleep(POLL)
        try:
            super().resume()
        except Exception as error:
            self.trouble = self.told(error)
            raise

    def told(self, error: Exception) -> str:
        """Return what the user is told of an error of Horovod's driver."""
        if isinstance(error, TimeoutException):
            return (
                f"{plural(self._slots(), 'slot')} after {self._timeout} s, and --min asks for "
                f"{self.pool.fewest} ({self.pool.source}); HOROVOD_ELASTIC_TIMEOUT gives it longer"
            )
        return str(error)

    def _slots(self) -> int:
        """Return how many slots are there and not blacklisted."""
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
        # Horovod's order is that of a set.
        hosts = self.discovery.hosts
        there = sorted(current_hosts.host_assignment_order, key=lambda name: _place(name, hosts))
        chosen = choose_slots(there, self._host_assignments, self.pool.most)
        slots = place_ranks(chosen, hosts)
        return {slot.hostname: [slot] for slot in slots}, slots

    @override
    def _update_host_assignments(self, current_hosts: Any) -> Any:
        self.codes.clear()
        self.ready.clear()
        # A slot that came back while all waited for it has no process any more; Horovod's driver
        # would not start one in a slot that is in use.
        kept = {
            name: slots for name, slots in self.host_assignments.items() if name in self.running
        }
        # It ends the job where none of the slots stays, which would have the state; here that comes
        # from the checkpoint.
        stays = kept.keys() & self._get_host_assignments(current_hosts)[0].keys()
        self._host_assignments: dict[str, list[Slot]] = kept if stays else {}
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
