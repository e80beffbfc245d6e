"""Step 1, integrity: what each rank tells of itself, and the rules that they must fit together.

A difference that nobody notices costs more than a run that does not start: two versions of a
framework train two models, two ranks on one GPU take twice the time. The rules are pure functions
of what all ranks told, so that every rank finds the same and says the same.
"""

from __future__ import annotations

import hashlib
import json
import platform
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import hvdtrain
from hvdtrain.errors import UsageError
from hvdtrain.system.output.text import plural

ALLOW = "HVDTRAIN_ALLOW"
"""Variable that lets a known difference pass, separated by commas: see the two below."""
MIXED_VERSIONS = "mixed-versions"
SHARED_GPU = "shared-gpu"

PACKAGES = ("torch", "tensorflow", "keras", "horovod")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # tells machines apart that have one name
FEW = 4  # hosts that a message names before it only counts


@dataclass(frozen=True)
class RankFacts:
    """What one rank tells all others when it joins."""

    host: str  # name of its host
    machine: str  # what tells two hosts of one name apart
    software: Mapping[str, str]  # version by name, of what is loaded in its process
    allow: tuple[str, ...] = ()  # differences that the user lets pass; rank 0's count

    @property
    def place(self) -> tuple[str, str]:
        """The host, told apart from another one of the same name."""
        return self.host, self.machine

    def encode(self) -> bytes:
        """Return the facts as JSON."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @staticmethod
    def decode(data: bytes) -> RankFacts:
        """Return the facts that ``encode`` wrote."""
        facts = json.loads(data)
        return RankFacts(**{**facts, "allow": tuple(facts["allow"])})


def rank_facts(environ: Mapping[str, str], mpi: str) -> RankFacts:
    """Return the facts of this rank; ``mpi`` is the MPI library in its process, as MPICH 4.2."""
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
    words = environ.get(ALLOW, "").split(",")
    return RankFacts(
        host=socket.gethostname(),
        machine=BOOT_ID.read_text().strip() if BOOT_ID.is_file() else "",
        software=software,
        allow=tuple(word.strip() for word in words if word.strip()),
    )


def source_digest(package: Path) -> str:
    """Eight digits that change with any source file: the version number seldom does."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def check_software(everyone: Sequence[RankFacts]) -> None:
    """Raise where ranks run different versions of the same thing; the absent is not compared.

    Args:
        everyone: the facts of all ranks, by rank.

    Raises:
        UsageError: on every rank, telling who has what.
    """
    hosts = [facts.host for facts in everyone]
    software = [facts.software for facts in everyone]
    found = [f"{name} {owners}" for name, owners in differences(software, hosts)]
    if found:
        raise UsageError(
            f"the ranks do not run the same software: {'; '.join(found)}. Use one "
            "environment on a file system that all hosts share, or install the same versions on "
            f"each host ({ALLOW}={MIXED_VERSIONS} trains all the same)"
        )


def differences(
    told: Sequence[Mapping[str, str]], hosts: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield each name that ranks tell different values of, and who tells what.

    Args:
        told: values by name, by rank; a name that a rank does not tell is not compared.
        hosts: the host of each rank.
    """
    for name in dict.fromkeys(name for values in told for name in values):
        owners: dict[str, list[int]] = {}
        for rank, values in enumerate(told):
            if name in values:
                owners.setdefault(values[name], []).append(rank)
        if len(owners) > 1:
            parts = [f"{value} on {places(ranks, hosts)}" for value, ranks in owners.items()]
            yield name, ", ".join(parts)


@dataclass(frozen=True)
class Device:
    """The device that a rank took in step 2."""

    name: str  # in words
    identity: str  # tells the GPUs of a host apart; empty for a CPU
    visible: int  # GPUs that the rank could see


def check_devices(devices: Sequence[Device], everyone: Sequence[RankFacts]) -> None:
    """Raise where two ranks of one host took the same GPU, or where only some have one.

    Args:
        devices: each rank's device, by rank.
        everyone: the facts of all ranks, by rank.

    Raises:
        UsageError: on every rank, naming ranks, host and device.
    """
    without = [rank for rank, device in enumerate(devices) if not device.identity]
    if without and len(without) < len(devices):
        hosts = [facts.host for facts in everyone]
        raise UsageError(
            f"{places(without, hosts)} see{'s' if len(without) == 1 else ''} no GPU, the other "
            "ranks do: give each rank a GPU (the batch system's GPU option, "
            "CUDA_VISIBLE_DEVICES), or train on the CPU everywhere (CUDA_VISIBLE_DEVICES=)"
        )
    users: dict[tuple[tuple[str, str], str], list[int]] = {}
    for rank, device in enumerate(devices):
        if device.identity:
            users.setdefault((everyone[rank].place, device.identity), []).append(rank)
    for ((host, _), identity), ranks in users.items():
        if len(ranks) > 1:
            device = devices[ranks[0]]
            number = plural(device.visible, "GPU")
            raise UsageError(
                f"ranks {spans(ranks)} on host {host} use the same GPU, {device.name} "
                f"({identity}): they see {number}. Start one rank per GPU (hvdtrain launch --ppn, "
                "mpirun --map-by ppr:N:node), each of which sees all GPUs of its host or one of "
                f"its own. {ALLOW}={SHARED_GPU} lets them share it, CUDA_VISIBLE_DEVICES= trains "
                "on the CPU"
            )


def places(ranks: Sequence[int], hosts: Sequence[str] | Mapping[int, str]) -> str:
    """Return where ``ranks`` are, such as ``node1 (ranks 0-3) and node2 (rank 4)``."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    words = [
        f"{host} (rank{'s' if len(here) > 1 else ''} {spans(here)})"
        for host, here in list(by_host.items())[:FEW]
    ]
    if len(by_host) > FEW:
        words.append(f"{len(by_host) - FEW} more hosts")
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def spans(numbers: Iterable[int]) -> str:
    """Return ascending numbers in short: ``0-3,5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)
