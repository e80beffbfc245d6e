"""What this process may use of its machine: cores, memory, limits. Nothing but files is read."""

from __future__ import annotations

import os
import re
import resource
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
UNLIMITED_V1 = 2**60  # version 1 spells "no limit" as a number near 2**63


@dataclass(frozen=True)
class Resources:
    """What this process, and the ranks that it starts here, may use."""

    cores: int  # cores that it may run on (affinity)
    quota: float | None  # cores' worth of time that its control group allows; None: no limit
    memory: int  # bytes: the machine's, or what its control group allows
    memory_limited: bool  # whether the control group allows less than the machine has
    locked_memory: int | None  # bytes that it may lock, for InfiniBand; None: no limit
    open_files: int | None  # files and sockets that it may have open; None: no limit
    shared_memory: int  # size of /dev/shm, bytes
    shared_memory_free: int  # what is free of it

    @property
    def usable_cores(self) -> float:
        """Cores that it can keep busy."""
        return self.cores if self.quota is None else min(self.cores, self.quota)


def find_resources() -> Resources:
    """Find them."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    root = Path("/")
    limit = memory_limit(root)
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    return Resources(
        cores=len(os.sched_getaffinity(0)),
        quota=cpu_quota(root),
        memory=total if limit is None else min(total, limit),
        memory_limited=limit is not None and limit < total,
        locked_memory=_soft_limit(resource.RLIMIT_MEMLOCK),
        open_files=_soft_limit(resource.RLIMIT_NOFILE),
        shared_memory=shm.f_blocks * shm.f_frsize if shm else 0,
        shared_memory_free=shm.f_bavail * shm.f_frsize if shm else 0,
    )


def _soft_limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def memory_limit(root: Path) -> int | None:
    """Return the least memory limit of this process's control group and those above, in bytes."""
    limits = [
        int(text)
        for controller, file in (("", "memory.max"), ("memory", "memory.limit_in_bytes"))
        for text in _read(root, controller, file)
        if text.isdecimal() and int(text) < UNLIMITED_V1
    ]
    return min(limits, default=None)


def cpu_quota(root: Path) -> float | None:
    """Return the least CPU quota of this process's control group and those above, in cores."""
    quotas = []
    for text in _read(root, "", "cpu.max"):  # "QUOTA PERIOD", the quota a number or "max"
        quota, period = text.split()
        quotas += [int(quota) / int(period)] if quota.isdecimal() else []
    periods = _read(root, "cpu", "cpu.cfs_period_us")
    for quota, period in zip(_read(root, "cpu", "cpu.cfs_quota_us"), periods, strict=False):
        quotas += [int(quota) / int(period)] if quota.isdecimal() and int(period) else []
    return min(quotas, default=None)


def _read(root: Path, controller: str, file: str) -> Iterator[str]:
    """Return the texts of ``file`` in this process's control group and those above it.

    Source: the kernel's ``cgroups(7)``. Version 2 has one tree and the empty controller, version 1
    a tree for each controller, or for several together.
    """
    table = root / "proc" / "self" / "cgroup"
    for line in table.read_text().splitlines() if table.is_file() else ():
        _, names, path = line.split(":", 2)
        if controller not in names.split(","):
            continue
        tree = root / "sys" / "fs" / "cgroup" / names
        group = tree / path.strip("/")
        for folder in (group, *(up for up in group.parents if up.is_relative_to(tree))):
            # A container may see its own tree only, and not the path that it has outside.
            if (folder / file).is_file():
                yield (folder / file).read_text().strip()


def peak_resident_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Return the most memory that this process has held at once; 0 where the kernel tells not.

    Its children, such as data workers, are not counted. The kernel's own high-water mark begins
    anew with a program, which that of ``getrusage`` does not.
    """
    return 1024 * int(_first_line(status, "VmHWM").removesuffix("kB") or 0)


CPUS = Path("/sys/devices/system/cpu")
CPUINFO = Path("/proc/cpuinfo")


def physical_cores(cpus: Iterable[int] | None = None, system: Path = CPUS) -> int:
    """Count the cores among ``cpus`` (default: those that this process may use).

    Two hardware threads of one core count once, as launchers count when they bind.
    """
    allowed = os.sched_getaffinity(0) if cpus is None else set(cpus)
    return len({_topology(system, cpu, "thread_siblings_list") or str(cpu) for cpu in allowed})


def packages(cpus: Iterable[int] | None = None, system: Path = CPUS) -> int:
    """Count the processor packages with any of ``cpus``; 0 where they hold different numbers."""
    allowed = os.sched_getaffinity(0) if cpus is None else set(cpus)
    counts = Counter(_topology(system, cpu, "physical_package_id") or "0" for cpu in allowed)
    return len(counts) if len(set(counts.values())) == 1 else 0


def _topology(system: Path, cpu: int, file: str) -> str:
    """Return what the kernel says of ``cpu``; empty where it does not, as in some containers."""
    with suppress(OSError):
        return (system / f"cpu{cpu}" / "topology" / file).read_text().strip()
    return ""


def processor() -> str:
    """Return the processor's name, such as ``AMD EPYC 7763 64-Core Processor``."""
    return _first_line(CPUINFO, "model name") or os.uname().machine


def cpu_flags(cpuinfo: Path = CPUINFO) -> set[str]:
    """Return what the processor can do, such as ``avx512_bf16`` (x86; elsewhere nothing)."""
    return set(_first_line(cpuinfo, "flags").split())


def _first_line(cpuinfo: Path, name: str) -> str:
    with suppress(OSError):
        if match := re.search(rf"^{name}\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE):
            return match[1].strip()
    return ""
