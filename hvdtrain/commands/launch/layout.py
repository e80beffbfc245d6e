"""How many ranks on which host, with what share of it: pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.commands.launch.hosts import Allocation, Host
from hvdtrain.errors import UsageError
from hvdtrain.system.output.text import plural

BATCH_SYSTEMS = ("PBS", "Slurm", "LSF")


@dataclass(frozen=True)
class Layout:
    """Ranks placed on hosts, one host full before the next, as all launchers number them."""

    ranks: int  # of the whole job
    hosts: tuple[Host, ...] = ()  # ``slots`` being the ranks started there; empty: this machine
    idle: tuple[str, ...] = ()  # hosts of the allocation that get no rank
    over_slots: bool = False  # whether some host gets more ranks than it has slots

    @property
    def per_host(self) -> int:
        """The most ranks that one host gets."""
        return max((host.slots for host in self.hosts), default=self.ranks)

    def host_of(self, rank: int) -> str | None:
        """Return the host that ``rank`` runs on; None where it is this machine."""
        names = [host.name for host in self.hosts for _ in range(host.slots)]
        return names[rank] if rank < len(names) else None


def lay_out(ranks: int, allocation: Allocation, ppn: int | None = None) -> Layout:
    """Place ``ranks`` on the hosts of ``allocation``.

    Args:
        ranks: how many.
        allocation: the hosts and their slots.
        ppn: ranks per host; None fills the slots of one host after the other.

    Raises:
        UsageError: they do not fit.
    """
    for option, value in (("-n", ranks), ("--ppn", ppn)):
        if value is not None and value < 1:
            raise UsageError(f"{option} {value}: give a number of at least 1")
    if not allocation.hosts:
        if ppn not in (None, ranks):
            raise UsageError(
                f"-n {ranks} --ppn {ppn}: outside an allocation there is this machine alone; "
                "name the others by --hosts or --hostfile"
            )
        return Layout(ranks)
    return _even(ranks, allocation, ppn) if ppn else _fill(ranks, allocation)


def _fill(ranks: int, allocation: Allocation) -> Layout:
    if ranks > allocation.slots:
        raise UsageError(
            f"-n {ranks} is more than the {allocation.slots} slots of {_describe(allocation)}: "
            f"ask {_giver(allocation)} for more, or give --ppn K to put K ranks on each host anyhow"
        )
    used, left = [], ranks
    for host in allocation.hosts:
        if left:
            used.append(Host(host.name, min(host.slots, left)))
            left -= used[-1].slots
    return Layout(ranks, tuple(used), tuple(h.name for h in allocation.hosts[len(used) :]))


def _even(ranks: int, allocation: Allocation, ppn: int) -> Layout:
    needed, rest = divmod(ranks, ppn)
    there = len(allocation.hosts)
    # Who names the hosts means all of them; of an allocation a job may use a part.
    if rest or needed > there or (needed < there and allocation.source not in BATCH_SYSTEMS):
        raise UsageError(
            f"-n {ranks} is not --ppn {ppn} times the {plural(there, 'host')} of "
            f"{_describe(allocation)}: {there} x {ppn} is {there * ppn}"
        )
    used = tuple(Host(host.name, ppn) for host in allocation.hosts[:needed])
    return Layout(
        ranks,
        used,
        idle=tuple(host.name for host in allocation.hosts[needed:]),
        over_slots=any(host.slots < ppn for host in allocation.hosts[:needed]),
    )


def _giver(allocation: Allocation) -> str:
    return allocation.source if allocation.source in BATCH_SYSTEMS else f"by {allocation.source}"


def _describe(allocation: Allocation) -> str:
    shown = ",".join(f"{host.name}:{host.slots}" for host in allocation.hosts[:4])
    more = ",..." if len(allocation.hosts) > 4 else ""
    return f"{allocation.source} ({shown}{more})"
