"""What this machine has for its ranks, read from the kernel's files: no framework, no MPI."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
DEVICES = Path("/dev")
CPUINFO = Path("/proc/cpuinfo")


def physical_cores(cpus: Iterable[int] | None = None, system: Path = CPUS) -> int:
    """Cores among ``cpus`` (default: those that this process may use).

    Two hardware threads of one core count once, as launchers count when they bind.
    """
    allowed = os.sched_getaffinity(0) if cpus is None else set(cpus)
    cores = set()
    for cpu in allowed:
        try:
            siblings = (system / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:  # not told, as in some containers
            siblings = str(cpu)
        cores.add(siblings)
    return len(cores)


def packages(cpus: Iterable[int] | None = None, system: Path = CPUS) -> int:
    """Processor packages with any of ``cpus`` in them; 0 where they hold different numbers."""
    allowed = os.sched_getaffinity(0) if cpus is None else set(cpus)
    counts: dict[str, int] = {}
    for cpu in allowed:
        try:
            package = (system / f"cpu{cpu}/topology/physical_package_id").read_text().strip()
        except OSError:
            package = "0"
        counts[package] = counts.get(package, 0) + 1
    return len(counts) if len(set(counts.values())) == 1 else 0


def gpus(environ: Mapping[str, str], devices: Path = DEVICES) -> int:
    """GPUs that a rank here may use: CUDA_VISIBLE_DEVICES where it is set, else what is there."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([name for name in chosen.split(",") if name.strip() not in ("", "-1")])
    return len(list(devices.glob("nvidia[0-9]*")))


def processor(cpuinfo: Path = CPUINFO) -> str:
    """The processor's name, such as ``AMD EPYC 7763 64-Core Processor``."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else os.uname().machine
