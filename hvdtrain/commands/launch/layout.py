"""The number of ranks on each host: pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.commands.launch.hosts import Allocation, Host
from hvdtrain.errors import UsageError
from hvdtrain.system.output.text import plural

BATCH_SYSTEMS = ("PBS", "Slurm", "LSF")


@dataclass(frozen=True)
class RankLayout:
    """Ranks placed host by host, in the order in which all launchers number them."""

    ranks: int  # total number of ranks
    hosts: tuple[Host, ...] = ()  # ``slots``: ranks started there; empty: this machine
    idle: tuple[str, ...] = ()  # hosts of the allocation without a rank
    over_slots: bool = False  # whether a host gets more ranks than it has slots

    @property
    def per_host(self) -> int:
        """The largest number of ranks on a host."""
        return max((host.slots for host in self.hosts), default=self.ranks)

    def host_of(self, rank: int) -> str | None:
        """Return the host of ``rank``; None: this machine."""
        names = [host.name for host in self.hosts for _ in range(host.slots)]
        return names[rank] if rank < len(names) else None


def lay_out(ranks: int, allocation: Allocation, ppn: int | None = None) -> RankLayout:
    """Place ``ranks`` on the hosts of ``allocation``.

    Args:
        ranks: total number of ranks.
        allocation: the hosts and their slots.
        ppn: ranks per host; None fills the slots host by host.

    Raises:
        UsageError: the ranks do not fit.
    """
    for option, value in (("-n", ranks), ("--ppn", ppn)):
        if value is not None and value < 1:
            raise UsageError(f"{option} {value}: must be at least 1")
    if not allocation.hosts:
        if ppn not in (None, ranks):
            raise UsageError(
                f"-n {ranks} --ppn {ppn}: only this machine is available outside an allocation; "
                "specify other hosts by --hosts or --hostfile"
            )
        return RankLayout(ranks)
    return _even(ranks, allocation, ppn) if ppn else _fill(ranks, allocation)


def _fill(ranks: int, allocation: Allocation) -> RankLayout:
    if ranks > allocation.slots:
        raise UsageError(
            f"-n {ranks} is more than the {allocation.slots} slots of {_describe(allocation)}: "
            f"request more slots {_origin(allocation)}, or use --ppn K to oversubscribe the hosts"
        )
    used, remaining = [], ranks
    for host in allocation.hosts:
        if remaining:
            used.append(Host(host.name, min(host.slots, remaining)))
            remaining -= used[-1].slots
    return RankLayout(ranks, tuple(used), tuple(h.name for h in allocation.hosts[len(used) :]))


def _even(ranks: int, allocation: Allocation, ppn: int) -> RankLayout:
    needed, rest = divmod(ranks, ppn)
    count = len(allocation.hosts)
    # A user who names hosts wants all of them used; a job may use a part of an allocation.
    if rest or needed > count or (needed < count and allocation.source not in BATCH_SYSTEMS):
        raise UsageError(
            f"-n {ranks} is not --ppn {ppn} times the {plural(count, 'host')} of "
            f"{_describe(allocation)}: {count} x {ppn} is {count * ppn}"
        )
    used = tuple(Host(host.name, ppn) for host in allocation.hosts[:needed])
    return RankLayout(
        ranks,
        used,
        idle=tuple(host.name for host in allocation.hosts[needed:]),
        over_slots=any(host.slots < ppn for host in allocation.hosts[:needed]),
    )


def _origin(allocation: Allocation) -> str:
    by_system = allocation.source in BATCH_SYSTEMS
    return f"from {allocation.source}" if by_system else f"by {allocation.source}"


def _describe(allocation: Allocation) -> str:
    shown = ",".join(f"{host.name}:{host.slots}" for host in allocation.hosts[:4])
    more = ",..." if len(allocation.hosts) > 4 else ""
    return f"{allocation.source} ({shown}{more})"
