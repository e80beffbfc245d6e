"""This machine: compiler, CUDA, GPUs, and the limits of its ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hvdtrain.commands.doctor.findings import ABSENT, ERROR, OK, WARNING, Finding, warning_if
from hvdtrain.commands.install_horovod.toolchain import Toolchain
from hvdtrain.system.machine.gpus import Driver
from hvdtrain.system.machine.limits import GIB, Resources
from hvdtrain.system.machine.threads import THREADS, binding, requested_threads, set_by_pbs
from hvdtrain.system.output.text import plural, size

MEMORY_PER_RANK = 2 * GIB  # a framework takes 0.5 to 1 GiB before the first sample
MIN_SHM = GIB  # used by the ranks of one host, and by workers of data loaders
MIN_LOCKED = GIB  # memory registered by InfiniBand and Omni-Path
MIN_FILES = 1024
MIN_PROCESSES = 64  # of a rank: threads of its cores, of MPI, workers
BUILD_VARIABLE = re.compile(r"HOROVOD_(WITH|WITHOUT|BUILD|GPU|NCCL|CUDA|ROCM|MPICXX|CMAKE)(_.*|$)")


def tool_findings(toolchain: Toolchain) -> Iterator[Finding]:
    """Yield findings on the tools to build Horovod."""
    compiler, cuda, nccl = toolchain.compiler, toolchain.cuda, toolchain.nccl
    purpose = "needed only to build Horovod"
    present = {
        "compiler": compiler and compiler.identity,
        "CUDA": cuda and f"toolkit {cuda.version}, {cuda.home}",
        "NCCL": nccl and f"{nccl.version}, {nccl.library}",
    }
    absent = {
        "compiler": f"none found; {purpose}",
        "CUDA": f"no toolkit with nvcc; {purpose} with GPU operations",
        "NCCL": "no library with its header; needed only on GPUs",
    }
    for check, evidence in present.items():
        yield Finding(check, OK if evidence else ABSENT, evidence or absent[check])


def gpu_finding(driver: Driver | None, toolchain: Toolchain) -> Finding:
    """Judge the GPUs of NVIDIA's driver, and whether the installed frameworks can use them."""
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

    ``fabric``: whether it has an InfiniBand or Omni-Path adapter, which registers memory.
    """
    cores, memory = resources.usable_cores, resources.memory
    quota = f", {resources.quota:g} of them by the control group's quota" if resources.quota else ""
    share = f" for {ranks} ranks: {cores / ranks:.3g} each" if ranks > 1 else ""
    remedy = "request a core per rank, or start fewer ranks" if cores < ranks else ""
    yield warning_if(remedy, "cores", f"{resources.cores}{quota}{share}")

    limited = " (limit of the control group)" if resources.memory_limited else ""
    share = f" for {ranks} ranks: {size(memory / ranks)} each" if ranks > 1 else ""
    need = f"request {MEMORY_PER_RANK / GIB:.0f} GiB per rank, or start fewer ranks"
    remedy = need if memory < ranks * MEMORY_PER_RANK else ""
    yield warning_if(remedy, "memory", f"{size(memory)}{limited}{share}")

    yield threads_finding(cores, ranks, environ)
    if bound := binding(environ):
        evidence = f"{environ[bound]}: ranks that no launcher has bound share their first cores"
        yield Finding(bound, WARNING, evidence, f"unset {bound}")

    free = resources.shared_memory_free
    clear = (
        "remove files of ended jobs from /dev/shm; start a container with a larger one (--shm-size)"
    )
    evidence = f"{size(resources.shared_memory)}, {size(free)} free"
    yield warning_if(clear if free < MIN_SHM else "", "/dev/shm", evidence)

    locked, remedy = resources.locked_memory, ""
    if fabric and locked is not None and locked < MIN_LOCKED:
        remedy = "have `ulimit -l unlimited` set on the compute nodes: InfiniBand registers memory"
    evidence = "unlimited" if locked is None else size(locked)
    evidence += "" if fabric else "; no InfiniBand here"
    yield warning_if(remedy, "locked memory", evidence)

    files = resources.open_files
    remedy = (
        "ulimit -n 4096, in the job script too" if files is not None and files < MIN_FILES else ""
    )
    yield warning_if(remedy, "open files", "unlimited" if files is None else str(files))

    limit = resources.processes
    few = limit is not None and limit < MIN_PROCESSES * ranks
    remedy = "raise ulimit -u, or pids.max (docker: --pids-limit)" if few else ""
    evidence = f"{limit or 'unlimited'}, threads included"
    yield warning_if(remedy, "processes", evidence)


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
        evidence = f"{requested} threads per rank, {plural(ranks, 'rank')}, {cores:g} cores"
        remedy = f"unset {check}, or set it to {max(1, int(cores) // ranks)}"
        return Finding(check, WARNING, evidence, remedy)
    return Finding(check, OK, f"{requested} threads per rank")


def horovod_variables(environ: Mapping[str, str], known: Sequence[str]) -> Finding:
    """Judge the HOROVOD_... variables that are set; ``known``: those of the installed Horovod."""
    settings = {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith("HOROVOD_") and not BUILD_VARIABLE.match(name)
    }
    evidence = ", ".join(f"{name}={value}" for name, value in settings.items())
    started = [name for name in ("HOROVOD_RANK", "HOROVOD_SIZE") if name in settings]
    unknown = [name for name in settings if known and name not in known]
    remedy = ""
    if settings.get("HOROVOD_CPU_OPERATIONS", "").lower() == "gloo":
        remedy = "unset HOROVOD_CPU_OPERATIONS: hvdtrain starts Horovod with MPI, not Gloo"
    elif started:
        remedy = f"unset {' '.join(started)}: horovodrun sets them for its ranks"
    elif unknown:
        remedy = f"{', '.join(unknown)}: unknown to this Horovod, check the spelling"
    return warning_if(remedy, "HOROVOD_*", evidence or "none set")


def known_variables(horovod: Path) -> list[str]:
    """Return the names HOROVOD_... that occur in the installed Horovod."""
    names: set[bytes] = set()
    for path in (*horovod.rglob("*.so"), *horovod.rglob("*.py")):
        names |= set(re.findall(rb"HOROVOD_[A-Z][A-Z0-9_]+", path.read_bytes()))
    return sorted(name.decode() for name in names)
