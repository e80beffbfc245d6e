"""Resources available to this process: cores, memory, limits; read from files only."""

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
UNLIMITED_V1 = 2**60  # version 1 represents "no limit" as a number near 2**63


@dataclass(frozen=True)
class Resources:
    """Resources available to this process and to the ranks that it starts here."""

    cores: int  # usable cores (affinity)
    quota: float | None  # CPU quota of its control group in cores; None: no limit
    memory: int  # bytes: of the machine, or the limit of its control group
    memory_limited: bool  # whether the control group's limit is below the machine's memory
    locked_memory: int | None  # limit of locked memory in bytes, for InfiniBand; None: no limit
    open_files: int | None  # limit of open files and sockets; None: no limit
    processes: int | None  # limit of processes and threads; None: no limit
    shared_memory: int  # size of /dev/shm, bytes
    shared_memory_free: int  # free bytes of it

    @property
    def usable_cores(self) -> float:
        """Return the number of cores, limited by the quota."""
        return self.cores if self.quota is None else min(self.cores, self.quota)


def find_resources() -> Resources:
    """Return the resources of this process."""
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
        processes=process_limit(root),
        shared_memory=shm.f_blocks * shm.f_frsize if shm else 0,
        shared_memory_free=shm.f_bavail * shm.f_frsize if shm else 0,
    )


def _soft_limit(number: int) -> int | None:
    soft, _ = resource.getrlimit(number)
    return None if soft == resource.RLIM_INFINITY else soft


def process_limit(root: Path) -> int | None:
    """Return the limit of processes and threads: ``ulimit -u``, or of this control group."""
    texts = [text for controller in ("", "pids") for text in _read(root, controller, "pids.max")]
    limits = [int(text) for text in texts if text.isdecimal()]
    return min(filter(None, (*limits, _soft_limit(resource.RLIMIT_NPROC))), default=None)


def memory_limit(root: Path) -> int | None:
    """Return the smallest memory limit of this process's control groups, in bytes."""
    limits = [
        int(text)
        for controller, file in (("", "memory.max"), ("memory", "memory.limit_in_bytes"))
        for text in _read(root, controller, file)
        if text.isdecimal() and int(text) < UNLIMITED_V1
    ]
    return min(limits, default=None)


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that processes here can still allocate, without other programs' caches."""
    free = 1024 * int(_first_line(root / "proc/meminfo", "MemAvailable").removesuffix("kB") or 0)
    limit = memory_limit(root)
    used = [int(text) for text in _read(root, "", "memory.current") if text.isdecimal()]
    cached = [
        int(match[1])
        for text in _read(root, "", "memory.stat")
        if (match := re.search(r"^inactive_file (\d+)$", text, re.MULTILINE))
    ]
    if limit is None or not used:
        return free
    # The innermost group with figures: its limit may be that of a parent, which others share.
    return min(free, max(0, limit - used[0] + sum(cached[:1])))


def cpu_quota(root: Path) -> float | None:
    """Return the smallest CPU quota of this process's control groups, in cores."""
    quotas = []
    for text in _read(root, "", "cpu.max"):  # "QUOTA PERIOD", the quota a number or "max"
        quota, period = text.split()
        quotas += [int(quota) / int(period)] if quota.isdecimal() else []
    periods = _read(root, "cpu", "cpu.cfs_period_us")
    for quota, period in zip(_read(root, "cpu", "cpu.cfs_quota_us"), periods, strict=False):
        quotas += [int(quota) / int(period)] if quota.isdecimal() and int(period) else []
    return min(quotas, default=None)


def _read(root: Path, controller: str, file: str) -> Iterator[str]:
    """Yield the contents of ``file`` in this process's control group and its parents.

    Source: cgroups(7). Version 2 has one tree and an empty controller name, version 1 a tree per
    controller or group of controllers.
    """
    table = root / "proc" / "self" / "cgroup"
    for line in table.read_text().splitlines() if table.is_file() else ():
        _, names, path = line.split(":", 2)
        if controller not in names.split(","):
            continue
        tree = root / "sys" / "fs" / "cgroup" / names
        group = tree / path.strip("/")
        for folder in (group, *(up for up in group.parents if up.is_relative_to(tree))):
            # A container may see only its tree, and not its path on the host.
            if (folder / file).is_file():
                yield (folder / file).read_text().strip()


def peak_resident_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Return the peak resident memory of this process; 0 if the kernel does not report it.

    Children, such as data workers, are not counted. VmHWM is reset when a program is executed,
    unlike the value of ``getrusage``.
    """
    return 1024 * int(_first_line(status, "VmHWM").removesuffix("kB") or 0)


CPUS = Path("/sys/devices/system/cpu")
CPUINFO = Path("/proc/cpuinfo")


def physical_cores(cpus: Iterable[int] | None = None, system: Path = CPUS) -> int:
    """Return the number of physical cores of ``cpus`` (default: those of this process).

    Hardware threads of one core count once, as launchers count when they bind.
    """
    allowed = os.sched_getaffinity(0) if cpus is None else set(cpus)
    return len({_topology(system, cpu, "thread_siblings_list") or str(cpu) for cpu in allowed})


def packages(cpus: Iterable[int] | None = None, system: Path = CPUS) -> int:
    """Return the number of processor packages of ``cpus``; 0 if they have unequal shares."""
    allowed = os.sched_getaffinity(0) if cpus is None else set(cpus)
    counts = Counter(_topology(system, cpu, "physical_package_id") or "0" for cpu in allowed)
    return len(counts) if len(set(counts.values())) == 1 else 0


def _topology(system: Path, cpu: int, file: str) -> str:
    """Return the kernel's topology value of ``cpu``; empty if missing, as in some containers."""
    with suppress(OSError):
        return (system / f"cpu{cpu}" / "topology" / file).read_text().strip()
    return ""


def processor() -> str:
    """Return the processor's name, e.g. ``AMD EPYC 7763 64-Core Processor``."""
    return _first_line(CPUINFO, "model name") or os.uname().machine


def cpu_flags(cpuinfo: Path = CPUINFO) -> set[str]:
    """Return the processor's feature flags, e.g. ``avx512_bf16`` (empty if not x86)."""
    return set(_first_line(cpuinfo, "flags").split())


def _first_line(cpuinfo: Path, name: str) -> str:
    with suppress(OSError):
        if match := re.search(rf"^{name}\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE):
            return match[1].strip()
    return ""
