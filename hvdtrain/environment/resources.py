"""What this process may use of its machine: cores, memory, limits. Nothing but files is read."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
UNLIMITED_V1 = 2**60  # version 1 spells "no limit" as a number near 2**63


@dataclass(frozen=True)
class Resources:
    """What this process, and the ranks that it starts here, may use."""

    cores: int
    """Cores that it may run on (affinity)."""
    quota: float | None
    """Cores' worth of time that its control group allows; None: no limit."""
    memory: int
    """Bytes: the machine's, or what its control group allows."""
    memory_limited: bool
    """Whether the control group allows less than the machine has."""
    locked_memory: int | None
    """Bytes that it may lock, for InfiniBand; None: no limit."""
    open_files: int | None
    """Files and sockets that it may have open; None: no limit."""
    shared_memory: int
    """Size of /dev/shm, bytes."""
    shared_memory_free: int
    """What is free of it."""

    @property
    def usable_cores(self) -> float:
        """Cores that it can keep busy."""
        return self.cores if self.quota is None else min(self.cores, self.quota)


def find_resources(root: Path = Path("/")) -> Resources:
    """Look; ``root`` is where ``proc`` and ``sys`` are."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
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
    """The least memory limit of this process's control group and those above it, in bytes."""
    limits = [
        int(text)
        for controller, file in (("", "memory.max"), ("memory", "memory.limit_in_bytes"))
        for text in _read(root, controller, file)
        if text.isdecimal() and int(text) < UNLIMITED_V1
    ]
    return min(limits, default=None)


def cpu_quota(root: Path) -> float | None:
    """The least processor quota of this process's control group and those above it, in cores."""
    quotas = []
    for text in _read(root, "", "cpu.max"):  # "QUOTA PERIOD", the quota a number or "max"
        quota, period = text.split()
        quotas += [int(quota) / int(period)] if quota.isdecimal() else []
    periods = _read(root, "cpu", "cpu.cfs_period_us")
    for quota, period in zip(_read(root, "cpu", "cpu.cfs_quota_us"), periods, strict=False):
        quotas += [int(quota) / int(period)] if quota.isdecimal() and int(period) else []
    return min(quotas, default=None)


def _read(root: Path, controller: str, file: str) -> Iterator[str]:
    """The texts of ``file`` in this process's control group and those above it.

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
