"""The hosts that the batch system gave, or that the user names; nothing is resolved.

PBS gives a file that names a host once per slot, Slurm and LSF give variables. A slot is room for
one rank, as the batch system counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.system.files import read_regular

MOST_NODES = 250_000  # of a job; a list of more is no list of nodes
MOST_BRACKETS = 8  # in a name
SHOWN = 200  # characters of a wrong value

_NUMBER = re.compile(r"\d{1,9}", re.ASCII)


@dataclass(frozen=True)
class Host:
    """A host and its slots."""

    name: str  # as the batch system or the user spells it
    slots: int  # ranks it has room for, at least 1


@dataclass(frozen=True)
class Allocation:
    """The hosts that ranks may be started on."""

    source: str  # who gave them: "PBS", "Slurm", "LSF", the option that names them, or "none"
    hosts: tuple[Host, ...] = ()  # in the order given; empty: this machine

    @property
    def slots(self) -> int:
        """The slots of all hosts together."""
        return sum(host.slots for host in self.hosts)


def find_allocation(environ: Mapping[str, str]) -> Allocation:
    """Return what the batch system gave this job, from ``environ`` and the file it names.

    A Slurm job of the Torque wrappers has no PBS_NODEFILE; Slurm's variables serve it.

    Raises:
        UsageError: the batch system's file is missing or empty, or a variable cannot be read.
    """
    if environ.get("PBS_NODEFILE"):
        return Allocation("PBS", read_hostfile(Path(environ["PBS_NODEFILE"]), "PBS_NODEFILE"))
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if nodes:
        return Allocation("Slurm", _slurm(nodes, environ))
    if environ.get("LSB_DJOB_HOSTFILE"):
        file = Path(environ["LSB_DJOB_HOSTFILE"])
        return Allocation("LSF", read_hostfile(file, "LSB_DJOB_HOSTFILE"))
    if environ.get("LSB_MCPU_HOSTS"):
        words = environ["LSB_MCPU_HOSTS"].split()
        if len(words) % 2 or not all(_NUMBER.fullmatch(number) for number in words[1::2]):
            raise UsageError(f"LSB_MCPU_HOSTS={' '.join(words)}: expected pairs `host slots`")
        pairs = zip(words[::2], words[1::2], strict=True)
        return Allocation("LSF", merge(Host(name, int(slots)) for name, slots in pairs))
    return Allocation("none")


def read_hostfile(path: Path, named_by: str) -> tuple[Host, ...]:
    """Return the hosts in a file of lines `host`, `host:4`, `host slots=4`; repeated ones add up.

    Args:
        path: the file; blank lines and what follows a ``#`` do not count.
        named_by: the option or variable that names it, for messages.

    Raises:
        UsageError: missing, empty, or with a line that is none of these.
    """
    try:
        lines = read_regular(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UsageError(f"{named_by}: {path}: {reason}; name the hosts by --hosts") from error
    found = parse_lines(lines, f"{named_by}: {path}")
    if not found:
        raise UsageError(f"{named_by}: {path} names no host; name them by --hosts")
    return found


def parse_lines(lines: Iterable[str], source: str) -> tuple[Host, ...]:
    """Return the hosts in ``lines``, which may name none; see ``read_hostfile``.

    Raises:
        UsageError: a line of ``source``, which the message names, is none of those.
    """
    found = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        options = dict(word.partition("=")[::2] for word in words[1:])
        name, slots = _split(words[0], options.get("slots"))
        if not name or not slots or set(options) - {"slots", "max_slots", "max-slots"}:
            raise UsageError(
                f"{source}, line {number}: {line.strip()!r} is none of "
                "`host`, `host:4`, `host slots=4`"
            )
        found.append(Host(name, slots))
    return merge(found)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts in `a:2,b:2`, the form of --hosts; without a number a host has one slot.

    Raises:
        UsageError: a part is empty or its number is none.
    """
    found = []
    for part in text.split(","):
        name, slots = _split(part.strip(), None)
        if not name or not slots:
            raise UsageError(f"--hosts {text}: write it like node1:4,node2:4")
        found.append(Host(name, slots))
    return merge(found)


def merge(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Return each host once, in the order first named, with its slots added up."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, number) for name, number in slots.items())


def _split(word: str, slots: str | None) -> tuple[str, int]:
    """Return name and slots of `host` or `host:4`; 0 slots where the number is none."""
    name, colon, behind = word.partition(":")
    number = behind if colon else slots if slots is not None else "1"
    valid = _NUMBER.fullmatch(number) and not (colon and slots is not None)
    # A name that starts with a dash would reach mpirun as an option.
    plain = re.fullmatch(r"[A-Za-z0-9_][\w.-]*", name, re.ASCII)
    return name if plain else "", int(number) if valid else 0


def _slurm(nodes: str, environ: Mapping[str, str]) -> tuple[Host, ...]:
    names = expand_nodelist(nodes)
    # Tasks as asked for; a job that asked for nodes only has as many slots as CPUs.
    variables = ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE")
    variable = next((name for name in variables if environ.get(name)), None)
    if variable is None:
        raise UsageError("SLURM_TASKS_PER_NODE is not set in this Slurm job; name them by --hosts")
    slots = expand_counts(environ[variable])
    if len(slots) != len(names):
        raise UsageError(
            f"{variable}={environ[variable][:SHOWN]} is for {len(slots)} nodes, "
            f"SLURM_JOB_NODELIST={nodes[:SHOWN]} has {len(names)}; name them by --hosts"
        )
    return tuple(Host(name, number) for name, number in zip(names, slots, strict=True))


def expand_counts(text: str) -> list[int]:
    """Expand Slurm's counts, one per node: "4(x2),3" is [4, 4, 3].

    Raises:
        UsageError: it is written otherwise.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9]\d{0,8})(?:\(x([1-9]\d{0,8})\))?", part.strip(), re.ASCII)
        times = int(match[2] or 1) if match else 0
        if not match or len(counts) + times > MOST_NODES:
            raise UsageError(
                f"{text[:SHOWN]!r} does not count tasks as Slurm does, such as 4(x2),3"
            )
        counts += [int(match[1])] * times
    return counts


def expand_nodelist(text: str) -> list[str]:
    """Expand Slurm's list of nodes: "a[01-03,7],b" is [a01, a02, a03, a7, b].

    Several brackets in one name multiply, the last one running fastest.

    Raises:
        UsageError: it is written otherwise.
    """
    names = list(islice(_names(text), MOST_NODES + 1))
    if len(names) > MOST_NODES:
        raise UsageError(f"{text[:SHOWN]!r} names more than {MOST_NODES:,} nodes")
    if not names or not all(re.fullmatch(r"[\w.-]+", name, re.ASCII) for name in names):
        raise UsageError(f"{text[:SHOWN]!r} does not name nodes as Slurm does, such as node[01-04]")
    return names


def _names(text: str) -> Iterator[str]:
    # A comma inside brackets does not end a name.
    for part in re.findall(r"(?:\[[^\[\]]*\]|[^,\[])+|,|\[", text):
        pieces = re.split(r"\[([^\]]*)\]", part)
        if part != "," and len(pieces) <= 2 * MOST_BRACKETS:
            yield from _expanded(pieces[0].strip(), pieces[1:], text)
        elif part != ",":
            yield part  # no name of a node


def _expanded(head: str, pieces: list[str], whole: str) -> Iterator[str]:
    """Yield ``head`` with the ranges and the texts behind them, which alternate in ``pieces``."""
    if not pieces:
        yield head
        return
    ranges, tail, *others = pieces
    for number in _numbers(ranges, whole):
        yield from _expanded(f"{head}{number}{tail}", others, whole)


def _numbers(ranges: str, whole: str) -> Iterator[str]:
    """Yield the numbers in `01-03,7`, with their leading zeros."""
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", part.strip(), re.ASCII)
        low, high = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(high) < int(low):
            where = f"[{ranges[:SHOWN]}]"
            raise UsageError(f"{whole[:SHOWN]!r} does not name nodes as Slurm does: {where}")
        for number in range(int(low), int(high) + 1):
            yield f"{number:0{len(low)}d}"
