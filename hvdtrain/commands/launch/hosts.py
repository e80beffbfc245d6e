"""The hosts of the batch system or the user, and the ranks on each; no name is resolved.

PBS provides a file with a line per slot, Slurm sets variables. A slot is the room for one rank, as
counted by the batch system.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.system.files import read_regular
from hvdtrain.system.machine.limits import physical_cores
from hvdtrain.system.output.text import plural

BATCH_SYSTEMS = ("PBS", "Slurm")
SLOTS = "give each host its slots, e.g. --hosts node1:2,node2:2"
MAX_PER_CORE = 32  # ranks on this machine; one that imports PyTorch takes 200 MB
SHOWN = 200  # characters of an invalid value

OPTIONS = {"slots", "max_slots", "max-slots"}  # of a host in a file
IPV6 = re.compile(r"::|(?:[0-9a-fA-F]+:){3}")
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
MAX_NAME = 255  # characters, as in the DNS
# mpirun would read a name that starts with a dash as an option.
_NAME = re.compile(rf"[A-Za-z0-9_][\w.-]{{0,{MAX_NAME - 1}}}", re.ASCII)


@dataclass(frozen=True)
class Host:
    """A host and its slots."""

    name: str  # as spelled by the batch system or the user
    slots: int  # number of ranks it has room for, at least 1


@dataclass(frozen=True)
class Allocation:
    """The hosts that ranks may be started on."""

    source: str  # their origin: "PBS", "Slurm", the option with the hosts, or "none"
    hosts: tuple[Host, ...] = ()  # in their original order; empty: this machine

    @property
    def slots(self) -> int:
        """The total number of slots."""
        return sum(host.slots for host in self.hosts)


def find_allocation(environ: Mapping[str, str]) -> Allocation:
    """Return the hosts of this batch job, from ``environ`` and the nodefile.

    Slurm jobs submitted by the Torque wrappers have no PBS_NODEFILE; Slurm's variables count.

    Raises:
        UsageError: the batch system's file is missing or empty, or a variable cannot be read.
    """
    if environ.get("PBS_NODEFILE"):
        return Allocation("PBS", read_hostfile(Path(environ["PBS_NODEFILE"]), "PBS_NODEFILE"))
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if nodes:
        return Allocation("Slurm", _slurm(nodes, environ))
    return Allocation("none")


def read_hostfile(path: Path, named_by: str) -> tuple[Host, ...]:
    """Return the hosts in a file of lines `host`, `host:4`, `host slots=4`; repeated ones add up.

    Blank lines and comments after a ``#`` are skipped. Messages contain ``named_by``, the option or
    variable with the path.

    Raises:
        UsageError: missing, empty, or a line has another form.
    """
    try:
        lines = read_regular(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UsageError(f"{named_by}: {path}: {reason}; specify the hosts by --hosts") from error
    hosts = parse_lines(lines, f"{named_by}: {path}")
    if not hosts:
        raise UsageError(f"{named_by}: {path} contains no host; specify the hosts by --hosts")
    return hosts


def parse_lines(lines: Iterable[str], source: str) -> tuple[Host, ...]:
    """Return the hosts in ``lines``, possibly none; see ``read_hostfile``.

    Raises:
        UsageError: a line has another form; the message contains ``source``.
    """
    hosts = []
    for number, line in enumerate(lines, 1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if not words:
            continue
        options = dict(word.partition("=")[::2] for word in words[1:])
        name, slots = _split(words[0], options.get("slots"))
        repeated = len(options) < len(words) - 1
        if not name or not slots or repeated or options.keys() - OPTIONS:
            raise UsageError(
                f"{source}, line {number}: {line.strip()[:SHOWN]!r} is not of the form "
                f"`host`, `host:4` or `host slots=4`{_hint(line)}"
            )
        hosts.append(Host(name, slots))
    return merge(hosts)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts in `a:2,b:2`, the form of --hosts; the default number of slots is 1.

    Raises:
        UsageError: a part is empty or its number of slots is invalid.
    """
    hosts = [Host(*_split(part.strip(), None)) for part in text.split(",")]
    if not all(host.name and host.slots for host in hosts):
        raise UsageError(f"--hosts {text}: must be a list such as node1:4,node2:4{_hint(text)}")
    return merge(hosts)


def _hint(text: str) -> str:
    """Return the end of the message about ``text``, which is not a list of hosts."""
    return "; IPv6 addresses are not supported: use names" if IPV6.search(text) else ""


def merge(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Return each host once, in order of first occurrence, with the sum of its slots."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, number) for name, number in slots.items())


def _split(word: str, slots: str | None) -> tuple[str, int]:
    """Return name and slots of `host` or `host:4`; 0 slots if the number is invalid."""
    name, colon, suffix = word.partition(":")
    number = suffix if colon else slots if slots is not None else "1"
    valid = _NUMBER.fullmatch(number) and not (colon and slots is not None)
    return name if _NAME.fullmatch(name) else "", int(number) if valid else 0


def _slurm(nodes: str, environ: Mapping[str, str]) -> tuple[Host, ...]:
    names = expand_nodelist(nodes)
    # The requested tasks; a job that requested only nodes has one slot per CPU.
    variables = ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE")
    variable = next((name for name in variables if environ.get(name)), None)
    if variable is None:
        raise UsageError(
            "SLURM_TASKS_PER_NODE is not set in this Slurm job; specify the hosts by --hosts"
        )
    slots = expand_counts(environ[variable])
    if len(slots) != len(names):
        raise UsageError(
            f"{variable}={environ[variable]} is for {len(slots)} nodes, "
            f"SLURM_JOB_NODELIST={nodes} has {len(names)}; specify the hosts by --hosts"
        )
    return tuple(Host(name, number) for name, number in zip(names, slots, strict=True))


def expand_counts(text: str) -> list[int]:
    """Expand Slurm's counts, one per node: "4(x2),3" is [4, 4, 3].

    Raises:
        UsageError: the text has another form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip(), re.ASCII)
        if not match:
            raise UsageError(f"{text!r} is not a list of task counts of Slurm such as 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_nodelist(text: str) -> list[str]:
    """Expand Slurm's node list: "a[01-03,7],b" is [a01, a02, a03, a7, b].

    Several brackets in a name give all combinations, the last one varying fastest.

    Raises:
        UsageError: the text has another form.
    """
    names: list[str] = []
    # A comma inside brackets does not end a name.
    for part in re.findall(r"(?:\[[^\[\]]*\]|[^,\[])+|\[", text):
        pieces = re.split(r"\[([^\]]*)\]", part.strip())
        for numbers in product(*(_expand_ranges(piece) for piece in pieces[1::2])):
            inner = map("".join, zip(numbers, pieces[2::2], strict=True))
            names.append(pieces[0] + "".join(inner))
    if not names or not all(map(_NAME.fullmatch, names)):
        raise UsageError(f"{text!r} is not a node list of Slurm such as node[01-04]")
    return names


def _expand_ranges(ranges: str) -> list[str]:
    """Return the numbers in `01-03,7`, with their leading zeros."""
    numbers: list[str] = []
    for part in ranges.split(","):
        low, _, high = part.strip().partition("-")
        numbers += [f"{number:0{len(low)}d}" for number in range(int(low), int(high or low) + 1)]
    return numbers


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
    """Place ``ranks`` on the hosts of ``allocation``: ``ppn`` on each; None fills their slots.

    Raises:
        UsageError: the ranks do not fit.
    """
    if not allocation.hosts:
        if ppn not in (None, ranks):
            raise UsageError(
                f"-n {ranks} --ppn {ppn}: only this machine is available outside an allocation; "
                "specify other hosts by --hosts or --hostfile"
            )
        if ranks > (most := MAX_PER_CORE * physical_cores()):
            raise UsageError(
                f"-n {ranks}: more than {most}, {MAX_PER_CORE} per core of this machine, may fill "
                f"its memory; if that is intended, use --hosts localhost:{ranks}"
            )
        return RankLayout(ranks)
    return _even(ranks, allocation, ppn) if ppn else _fill(ranks, allocation)


def _fill(ranks: int, allocation: Allocation) -> RankLayout:
    if ranks > allocation.slots:
        by_system = allocation.source in BATCH_SYSTEMS
        more = f"request more slots from {allocation.source}" if by_system else SLOTS
        raise UsageError(
            f"-n {ranks} is more than the {allocation.slots} slots of {_describe(allocation)}: "
            f"{more}, or use --ppn K to oversubscribe the hosts"
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


def _describe(allocation: Allocation) -> str:
    shown = ",".join(f"{host.name}:{host.slots}" for host in allocation.hosts[:4])
    more = ",..." if len(allocation.hosts) > 4 else ""
    return f"{allocation.source} ({shown}{more})"
