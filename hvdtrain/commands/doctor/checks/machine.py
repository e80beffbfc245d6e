"""This machine: compiler, CUDA, GPUs, and what limits its ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hvdtrain.commands.doctor.findings import ABSENT, ERROR, OK, WARNING, Finding
from hvdtrain.system.machine.gpus import Driver
from hvdtrain.system.machine.limits import GIB, Resources
from hvdtrain.system.machine.threads import THREADS, requested_threads, set_by_pbs
from hvdtrain.system.machine.toolchain import Toolchain
from hvdtrain.system.output.text import plural, size

MEMORY_PER_RANK = 2 * GIB  # a framework takes 0.5 to 1 GiB before the first sample
LEAST_SHM = GIB  # ranks of one host, and workers of data loaders, exchange through it
LEAST_LOCKED = GIB  # what InfiniBand and Omni-Path register
LEAST_FILES = 1024
BUILD_VARIABLE = re.compile(r"HOROVOD_(WITH|WITHOUT|BUILD|GPU|NCCL|CUDA|ROCM|MPICXX|CMAKE)(_.*|$)")


def tool_findings(toolchain: Toolchain) -> Iterator[Finding]:
    """Tell what there is to build Horovod with; needed only for that."""
    compiler, cuda, nccl = toolchain.compiler, toolchain.cuda, toolchain.nccl
    why = "needed only to build Horovod"
    for check, found, absent in (
        ("compiler", compiler and compiler.identity, f"none found; {why}"),
        (
            "CUDA",
            cuda and f"toolkit {cuda.version}, {cuda.home}",
            f"no toolkit with nvcc; {why} with GPU operations",
        ),
        (
            "NCCL",
            nccl and f"{nccl.version}, {nccl.library}",
            "no library with its header; needed only on GPUs",
        ),
    ):
        yield Finding(check, OK, found) if found else Finding(check, ABSENT, absent)


def gpu_finding(driver: Driver | None, toolchain: Toolchain) -> Finding:
    """Judge the GPUs, and whether what is installed can use them.

    Args:
        driver: what NVIDIA's driver tells; None: no driver, or no GPU.
        toolchain: for the frameworks.
    """
    if driver is None or not driver.gpus:
        return Finding("GPUs", ABSENT, "none of NVIDIA's that this process can use")
    count, first = len(driver.gpus), driver.gpus[0]
    found = f"{count} x {first.name}, {first.memory / GIB:.0f} GiB, driver for CUDA {driver.cuda}"
    torch, tensorflow = toolchain.torch, toolchain.tensorflow
    if torch and torch.cuda and _numbers(torch.cuda)[:1] > _numbers(driver.cuda)[:1]:
        remedy = f"update the driver, or install a PyTorch for CUDA {driver.cuda}"
        return Finding("GPUs", ERROR, f"{found}; PyTorch is for CUDA {torch.cuda}", remedy)
    if not (torch and torch.cuda) and not (tensorflow and tensorflow.cuda):
        evidence = f"{found}; what is installed is built for the CPU"
        return Finding("GPUs", WARNING, evidence, "install a CUDA build of PyTorch or TensorFlow")
    return Finding("GPUs", OK, found)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def resource_findings(
    found: Resources, ranks: int, environ: Mapping[str, str], fabric: bool
) -> Iterator[Finding]:
    """Judge cores, memory and limits for ``ranks`` ranks on this host.

    Args:
        found: what this process may use.
        ranks: how many ranks share it.
        environ: for OMP_NUM_THREADS.
        fabric: whether this host has an InfiniBand or Omni-Path adapter.
    """
    yield _cores(found, ranks)
    limited = " (limit of the control group)" if found.memory_limited else ""
    share = f" for {ranks} ranks: {size(found.memory / ranks)} each" if ranks > 1 else ""
    memory = f"{size(found.memory)}{limited}{share}"
    if found.memory < ranks * MEMORY_PER_RANK:
        need = f"{MEMORY_PER_RANK / GIB:.0f} GiB per rank"
        yield Finding("memory", WARNING, memory, f"ask for {need}, or start fewer ranks")
    else:
        yield Finding("memory", OK, memory)
    yield threads_finding(found.usable_cores, ranks, environ)
    yield _shared_memory(found)
    yield _locked_memory(found.locked_memory, fabric)
    yield _open_files(found.open_files)


def _cores(found: Resources, ranks: int) -> Finding:
    share = f" for {ranks} ranks: {found.usable_cores / ranks:.3g} each" if ranks > 1 else ""
    quota = f", {found.quota:g} of them by the control group's quota" if found.quota else ""
    cores = f"{found.cores}{quota}{share}"
    if found.usable_cores < ranks:
        return Finding("cores", WARNING, cores, "ask for as many cores as ranks, or start fewer")
    return Finding("cores", OK, cores)


def threads_finding(cores: float, ranks: int, environ: Mapping[str, str]) -> Finding:
    """Judge OMP_NUM_THREADS, which every rank reads."""
    check = THREADS
    if set_by_pbs(environ):
        told = f"{environ[check]}, set by PBS for the whole chunk: each rank takes its share of it"
        return Finding(check, OK, told)
    asked = requested_threads(environ)
    if not asked:
        return Finding(check, OK, "not set: each rank takes its share of the cores")
    if not asked.isdecimal() or not int(asked):
        return Finding(check, WARNING, f"{asked!r} is no number of threads", f"unset {check}")
    if int(asked) * ranks > cores:
        right = max(1, int(cores) // ranks)
        return Finding(
            check,
            WARNING,
            f"{asked} threads per rank, {plural(ranks, 'rank')}, {cores:g} cores",
            f"unset {check}, or set it to {right}",
        )
    return Finding(check, OK, f"{asked} threads per rank")


def _shared_memory(found: Resources) -> Finding:
    room = f"{size(found.shared_memory)}, {size(found.shared_memory_free)} free"
    if found.shared_memory_free < LEAST_SHM:
        remedy = (
            "remove what ended jobs left in /dev/shm; in a container start it with a larger one "
            "(--shm-size)"
        )
        return Finding("/dev/shm", WARNING, room, remedy)
    return Finding("/dev/shm", OK, room)


def _locked_memory(limit: int | None, fabric: bool) -> Finding:
    told = "unlimited" if limit is None else size(limit)
    if fabric and limit is not None and limit < LEAST_LOCKED:
        remedy = "ask for `ulimit -l unlimited` on the compute nodes: InfiniBand registers memory"
        return Finding("locked memory", WARNING, told, remedy)
    return Finding("locked memory", OK, told if fabric else f"{told}; no InfiniBand here")


def _open_files(limit: int | None) -> Finding:
    told = "unlimited" if limit is None else str(limit)
    if limit is not None and limit < LEAST_FILES:
        return Finding("open files", WARNING, told, "ulimit -n 4096, in the job script too")
    return Finding("open files", OK, told)


def has_fabric() -> bool:
    """Return whether this host has an adapter that registers memory (InfiniBand and its kin)."""
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def horovod_variables(environ: Mapping[str, str], known: Sequence[str]) -> Finding:
    """Tell which HOROVOD_... are set, and which of them is a trap.

    Args:
        environ: the environment.
        known: the names that the installed Horovod reads; empty where none is installed.
    """
    check = "HOROVOD_*"
    found = {k: v for k, v in sorted(environ.items()) if k.startswith("HOROVOD_")}
    settings = {k: v for k, v in found.items() if not BUILD_VARIABLE.match(k)}
    told = ", ".join(f"{name}={value}" for name, value in settings.items())
    if not settings:
        return Finding(check, OK, "none set")
    if settings.get("HOROVOD_CPU_OPERATIONS", "").lower() == "gloo":
        remedy = "unset it: under mpirun it crashes"
        return Finding(check, WARNING, told, f"HOROVOD_CPU_OPERATIONS=gloo: {remedy}")
    started = [name for name in ("HOROVOD_RANK", "HOROVOD_SIZE") if name in settings]
    if started:
        remedy = f"unset {' '.join(started)}: horovodrun sets them for its own ranks"
        return Finding(check, WARNING, told, remedy)
    unknown = [name for name in settings if known and name not in known]
    if unknown:
        remedy = f"{', '.join(unknown)}: this Horovod knows no such name, look at its spelling"
        return Finding(check, WARNING, told, remedy)
    return Finding(check, OK, told)


def known_variables(horovod: Path) -> list[str]:
    """Return the names HOROVOD_... that occur in the installed Horovod."""
    names: set[bytes] = set()
    for path in (*horovod.rglob("*.so"), *horovod.rglob("*.py")):
        names |= set(re.findall(rb"HOROVOD_[A-Z][A-Z0-9_]+", path.read_bytes()))
    return sorted(name.decode() for name in names)
