"""How many ranks on which host, with what share of it: pure functions."""

from __future__ import annotations

from collections.abc import Mapping
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


def batch_share(environ: Mapping[str, str]) -> int:
    """Return the cores or hardware threads of this host that the batch system gave; 0: unknown."""
    names = ("SLURM_CPUS_ON_NODE", "NCPUS")
    given = next((environ[name] for name in names if environ.get(name)), "")
    return int(given) if given.isdecimal() else 0


def own_cores(cores: int, environ: Mapping[str, str]) -> int:
    """Return how many cores of this host are the job's: others may compute on the rest."""
    return min(cores, batch_share(environ) or cores)


def asked_threads(environ: Mapping[str, str]) -> str:
    """Return OMP_NUM_THREADS as the user has set it; empty where it is unset, or PBS set it.

    PBS sets it to the cores of a whole chunk, however many ranks share them.
    """
    asked = environ.get("OMP_NUM_THREADS", "")
    return "" if "PBS_JOBID" in environ and asked == environ.get("NCPUS") else asked


def fair_threads(
    ranks_per_host: int, cores: int, gpus: int, environ: Mapping[str, str]
) -> int | None:
    """Return the threads per rank with which ``ranks_per_host`` ranks would just fill a host.

    None where the user has set OMP_NUM_THREADS, or GPUs compute: then the cores that a rank is
    bound to decide how many threads help it.

    Args:
        ranks_per_host: ranks to share the host out among, even if fewer run.
        cores: of the host.
        gpus: of the host.
        environ: the user's environment.
    """
    if asked_threads(environ) or gpus:
        return None
    return max(1, cores // ranks_per_host)
