"""This machine: compiler, CUDA, GPUs, and the limits of its ranks."""

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
LEAST_SHM = GIB  # used by the ranks of one host, and by workers of data loaders
LEAST_LOCKED = GIB  # memory registered by InfiniBand and Omni-Path
LEAST_FILES = 1024
BUILD_VARIABLE = re.compile(r"HOROVOD_(WITH|WITHOUT|BUILD|GPU|NCCL|CUDA|ROCM|MPICXX|CMAKE)(_.*|$)")


def tool_findings(toolchain: Toolchain) -> Iterator[Finding]:
    """Yield findings on the tools to build Horovod."""
    compiler, cuda, nccl = toolchain.compiler, toolchain.cuda, toolchain.nccl
    purpose = "needed only to build Horovod"
    for check, present, absent in (
        ("compiler", compiler and compiler.identity, f"none found; {purpose}"),
        (
            "CUDA",
            cuda and f"toolkit {cuda.version}, {cuda.home}",
            f"no toolkit with nvcc; {purpose} with GPU operations",
        ),
        (
            "NCCL",
            nccl and f"{nccl.version}, {nccl.library}",
            "no library with its header; needed only on GPUs",
        ),
    ):
        yield Finding(check, OK, present) if present else Finding(check, ABSENT, absent)


def gpu_finding(driver: Driver | None, toolchain: Toolchain) -> Finding:
    """Judge the GPUs, and whether the installed frameworks can use them.

    Args:
        driver: properties reported by NVIDIA's driver; None: no driver, or no GPU.
        toolchain: for the frameworks.
    """
    if driver is None or not driver.gpus:
        return Finding("GPUs", ABSENT, "no NVIDIA GPU is visible to this process")
    count, first = len(driver.gpus), driver.gpus[0]
    gpus = f"{count} x {first.name}, {first.memory / GIB:.0f} GiB, driver for CUDA {driver.cuda}"
    torch, tensorflow = toolchain.torch, toolchain.tensorflow
    if torch and torch.cuda and _numbers(torch.cuda)[:1] > _numbers(driver.cuda)[:1]:
        remedy = f"update the driver, or install a PyTorch for CUDA {driver.cuda}"
        return Finding("GPUs", ERROR, f"{gpus}; PyTorch is for CUDA {torch.cuda}", remedy)
    if not (torch and torch.cuda) and not (tensorflow and tensorflow.cuda):
        evidence = f"{gpus}; the installed frameworks are built for the CPU"
        return Finding("GPUs", WARNING, evidence, "install a CUDA build of PyTorch or TensorFlow")
    return Finding("GPUs", OK, gpus)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def resource_findings(
    resources: Resources, ranks: int, environ: Mapping[str, str], fabric: bool
) -> Iterator[Finding]:
    """Judge cores, memory and limits for ``ranks`` ranks on this host.

    Args:
        resources: available to this process.
        ranks: number of ranks that share them.
        environ: for OMP_NUM_THREADS.
        fabric: whether this host has an InfiniBand or Omni-Path adapter.
    """
    yield _cores(resources, ranks)
    limited = " (limit of the control group)" if resources.memory_limited else ""
    share = f" for {ranks} ranks: {size(resources.memory / ranks)} each" if ranks > 1 else ""
    memory = f"{size(resources.memory)}{limited}{share}"
    if resources.memory < ranks * MEMORY_PER_RANK:
        need = f"{MEMORY_PER_RANK / GIB:.0f} GiB per rank"
        yield Finding("memory", WARNING, memory, f"request {need}, or start fewer ranks")
    else:
        yield Finding("memory", OK, memory)
    yield threads_finding(resources.usable_cores, ranks, environ)
    yield _shared_memory(resources)
    yield _locked_memory(resources.locked_memory, fabric)
    yield _open_files(resources.open_files)


def _cores(resources: Resources, ranks: int) -> Finding:
    share = f" for {ranks} ranks: {resources.usable_cores / ranks:.3g} each" if ranks > 1 else ""
    quota = f", {resources.quota:g} of them by the control group's quota" if resources.quota else ""
    cores = f"{resources.cores}{quota}{share}"
    if resources.usable_cores < ranks:
        return Finding("cores", WARNING, cores, "request a core per rank, or start fewer ranks")
    return Finding("cores", OK, cores)


def threads_finding(cores: float, ranks: int, environ: Mapping[str, str]) -> Finding:
    """Judge OMP_NUM_THREADS, which applies to every rank."""
    check = THREADS
    if set_by_pbs(environ):
        evidence = f"{environ[check]}, set by PBS for the whole chunk: the ranks share it"
        return Finding(check, OK, evidence)
    requested = requested_threads(environ)
    if requested is None:
        return Finding(check, OK, "not set: the ranks share the cores")
    if not requested:
        evidence = f"{environ[check]!r} is not a number of threads"
        return Finding(check, WARNING, evidence, f"unset {check}")
    if requested * ranks > cores:
        right = max(1, int(cores) // ranks)
        return Finding(
            check,
            WARNING,
            f"{requested} threads per rank, {plural(ranks, 'rank')}, {cores:g} cores",
            f"unset {check}, or set it to {right}",
        )
    return Finding(check, OK, f"{requested} threads per rank")


def _shared_memory(resources: Resources) -> Finding:
    room = f"{size(resources.shared_memory)}, {size(resources.shared_memory_free)} free"
    if resources.shared_memory_free < LEAST_SHM:
        remedy = (
            "remove files of ended jobs from /dev/shm; start a container with a larger one "
            "(--shm-size)"
        )
        return Finding("/dev/shm", WARNING, room, remedy)
    return Finding("/dev/shm", OK, room)


def _locked_memory(limit: int | None, fabric: bool) -> Finding:
    text = "unlimited" if limit is None else size(limit)
    if fabric and limit is not None and limit < LEAST_LOCKED:
        remedy = "have `ulimit -l unlimited` set on the compute nodes: InfiniBand registers memory"
        return Finding("locked memory", WARNING, text, remedy)
    return Finding("locked memory", OK, text if fabric else f"{text}; no InfiniBand here")


def _open_files(limit: int | None) -> Finding:
    text = "unlimited" if limit is None else str(limit)
    if limit is not None and limit < LEAST_FILES:
        return Finding("open files", WARNING, text, "ulimit -n 4096, in the job script too")
    return Finding("open files", OK, text)


def has_fabric() -> bool:
    """Return whether this host has an InfiniBand or Omni-Path adapter, which registers memory."""
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def horovod_variables(environ: Mapping[str, str], known: Sequence[str]) -> Finding:
    """Judge the HOROVOD_... variables that are set.

    Args:
        environ: the environment.
        known: variables of the installed Horovod; empty if none is installed.
    """
    check = "HOROVOD_*"
    settings = {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith("HOROVOD_") and not BUILD_VARIABLE.match(name)
    }
    evidence = ", ".join(f"{name}={value}" for name, value in settings.items())
    if not settings:
        return Finding(check, OK, "none set")
    if settings.get("HOROVOD_CPU_OPERATIONS", "").lower() == "gloo":
        remedy = "unset HOROVOD_CPU_OPERATIONS: gloo crashes under mpirun"
        return Finding(check, WARNING, evidence, remedy)
    started = [name for name in ("HOROVOD_RANK", "HOROVOD_SIZE") if name in settings]
    if started:
        remedy = f"unset {' '.join(started)}: horovodrun sets them for its ranks"
        return Finding(check, WARNING, evidence, remedy)
    unknown = [name for name in settings if known and name not in known]
    if unknown:
        remedy = f"{', '.join(unknown)}: unknown to this Horovod, check the spelling"
        return Finding(check, WARNING, evidence, remedy)
    return Finding(check, OK, evidence)


def known_variables(horovod: Path) -> list[str]:
    """Return the names HOROVOD_... that occur in the installed Horovod."""
    names: set[bytes] = set()
    for path in (*horovod.rglob("*.so"), *horovod.rglob("*.py")):
        names |= set(re.findall(rb"HOROVOD_[A-Z][A-Z0-9_]+", path.read_bytes()))
    return sorted(name.decode() for name in names)
