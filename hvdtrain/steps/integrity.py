"""Step 1, integrity: facts about each rank, and checks that they are consistent.

An undetected difference costs more than a run that does not start: two versions of a framework
train two models, two ranks on one GPU take twice the time. The checks are pure functions of the
facts of all ranks, so that all ranks raise the same error.
"""

from __future__ import annotations

import hashlib
import platform
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import hvdtrain
from hvdtrain.errors import UsageError
from hvdtrain.system.machine import network
from hvdtrain.system.output.text import plural

ALLOW = "HVDTRAIN_ALLOW"
"""Variable of accepted differences, separated by commas: the two below."""
MIXED_VERSIONS = "mixed-versions"
SHARED_GPU = "shared-gpu"

PACKAGES = ("torch", "tensorflow", "keras", "horovod")
MAX_HOSTS = 4  # maximum number of hosts named in a message


@dataclass(frozen=True)
class RankFacts:
    """Facts that a rank sends to all other ranks at the start."""

    host: str  # name of its host
    machine: str  # distinguishes hosts of the same name
    software: Mapping[str, str]  # versions of the packages loaded in its process, by name
    allow: tuple[str, ...] = ()  # differences accepted by the user; rank 0's are used
    addresses: tuple[str, ...] = ()  # of its host, e.g. 10.0.0.7/24

    @property
    def host_id(self) -> tuple[str, str]:
        """Return the identity of the host, unique among hosts of the same name."""
        return self.host, self.machine


def accepted(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the differences that the user accepts."""
    words = environ.get(ALLOW, "").split(",")
    return tuple(word.strip() for word in words if word.strip())


def rank_facts(environ: Mapping[str, str], mpi: str) -> RankFacts:
    """Return the facts of this rank; ``mpi``: MPI library of its process, e.g. MPICH 4.2."""
    code = source_digest(Path(hvdtrain.__file__).parent)
    software = {
        "hvdtrain": f"{hvdtrain.__version__} (code {code})",
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }
    for name in PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version:
            software[name] = str(version)
    if mpi:
        software["MPI"] = mpi
    return RankFacts(
        host=socket.gethostname(),
        machine=network.boot_id(),
        software=software,
        allow=accepted(environ),
        addresses=tuple(network.addresses(environ.get(network.INTERFACE))),
    )


def source_digest(package: Path) -> str:
    """Return eight digits that change with any source file, unlike the version number."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def check_software(all_ranks: Sequence[RankFacts]) -> None:
    """Raise if ranks run different versions of a package; missing packages are not compared."""
    hosts = [facts.host for facts in all_ranks]
    software = [facts.software for facts in all_ranks]
    mixed = [f"{name} {owners}" for name, owners in differences(software, hosts)]
    if mixed:
        raise UsageError(
            f"the ranks do not run the same software: {'; '.join(mixed)}. Use one environment on "
            "a shared file system, or install the same versions on each host "
            f"({ALLOW}={MIXED_VERSIONS} accepts the difference)"
        )


def differences(
    reported: Sequence[Mapping[str, str]], hosts: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield each name whose values differ between ranks, and the values with their ranks.

    Both arguments are by rank; names missing on a rank are not compared.
    """
    for name in dict.fromkeys(name for values in reported for name in values):
        owners: dict[str, list[int]] = {}
        for rank, values in enumerate(reported):
            if name in values:
                owners.setdefault(values[name], []).append(rank)
        if len(owners) > 1:
            parts = [f"{value} on {rank_names(ranks, hosts)}" for value, ranks in owners.items()]
            yield name, ", ".join(parts)


@dataclass(frozen=True)
class Device:
    """The device of a rank, selected in step 2."""

    name: str  # product name
    identity: str  # unique among the GPUs of a host; empty for a CPU
    visible: int  # number of GPUs visible to the rank


def check_devices(devices: Sequence[Device], all_ranks: Sequence[RankFacts]) -> None:
    """Raise if ranks of a host share a GPU, or only some ranks have a GPU."""
    without = [rank for rank, device in enumerate(devices) if not device.identity]
    if without and len(without) < len(devices):
        hosts = [facts.host for facts in all_ranks]
        raise UsageError(
            f"{rank_names(without, hosts)} see{'s' if len(without) == 1 else ''} no GPU, the other "
            "ranks do: give each rank a GPU (the batch system's GPU option, "
            "CUDA_VISIBLE_DEVICES), or train on the CPU everywhere (CUDA_VISIBLE_DEVICES=)"
        )
    users: dict[tuple[tuple[str, str], str], list[int]] = {}
    for rank, device in enumerate(devices):
        if device.identity:
            users.setdefault((all_ranks[rank].host_id, device.identity), []).append(rank)
    for ((host, _), identity), ranks in users.items():
        if len(ranks) > 1:
            device = devices[ranks[0]]
            number = plural(device.visible, "GPU")
            raise UsageError(
                f"ranks {spans(ranks)} on host {host} use the same GPU, {device.name} "
                f"({identity}): they see {number}. Start one rank per GPU (hvdtrain launch --ppn, "
                "mpirun --map-by ppr:N:node), each with all GPUs of its host visible, or only its "
                f"GPU. {ALLOW}={SHARED_GPU} lets them share it, CUDA_VISIBLE_DEVICES= trains on "
                "the CPU"
            )


def rank_names(ranks: Sequence[int], hosts: Sequence[str] | Mapping[int, str]) -> str:
    """Return hosts and ranks as text, e.g. ``node1 (ranks 0-3) and node2 (rank 4)``."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    words = [
        f"{host} (rank{'s' if len(here) > 1 else ''} {spans(here)})"
        for host, here in list(by_host.items())[:MAX_HOSTS]
    ]
    if len(by_host) > MAX_HOSTS:
        words.append(f"{len(by_host) - MAX_HOSTS} more hosts")
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def spans(numbers: Iterable[int]) -> str:
    """Return ascending numbers as text, e.g. ``0-3,5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)
