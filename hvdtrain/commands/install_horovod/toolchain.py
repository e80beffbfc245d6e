"""Requirements of a Horovod build: frameworks, MPI, compiler, make, headers, CUDA and NCCL."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.system.machine import gpus
from hvdtrain.system.machine.frameworks import (
    TensorFlow,
    Torch,
    find_tensorflow,
    find_torch,
    is_installed,
)
from hvdtrain.system.machine.limits import CPUINFO, cpu_flags
from hvdtrain.system.machine.mpi_library import mpi_identity
from hvdtrain.system.runtime.command import Command, run

SYSTEM_CUDA = Path("/usr/local/cuda")
CUDA_HOMES = ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")  # variables, most specific first
SYSTEM_LIBRARIES = tuple(
    f"/usr/{name}" for name in ("lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "lib64", "lib")
)


@dataclass(frozen=True)
class BuildMpi:
    """An MPI library, identified by its compiler wrapper."""

    mpicxx: Path  # the C++ wrapper; ``mpicc`` and ``mpirun`` are in its directory
    identity: str  # library and version, e.g. ``Open MPI 5.0.11``
    libraries: tuple[Path, ...]  # library directories of its link line
    mpirun: Path | None  # the launcher in the wrapper's directory


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler."""

    argv: tuple[str, ...]  # command line
    identity: str  # first line of its ``--version``
    major: int  # major version; 0: unknown


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit with compiler and headers."""

    home: Path  # root directory, with ``bin/nvcc`` and ``include/cuda_runtime.h``
    version: str  # e.g. 13.0
    arches: tuple[int, ...] = ()  # supported compute capabilities, ascending

    @property
    def major(self) -> str:
        """Return 13 for 13.0."""
        return self.version.partition(".")[0]

    @property
    def is_package(self) -> bool:
        """Whether it is from PyPI, whose libraries lack the unversioned name for the linker."""
        libraries = self.home / "lib"
        return any(libraries.glob("libcudart.so.*")) and not (libraries / "libcudart.so").exists()


@dataclass(frozen=True)
class Nccl:
    """NVIDIA's collective communication library."""

    include: Path  # directory of nccl.h
    library: Path  # path of the shared library
    version: str  # from nccl.h, e.g. 2.28.3


@dataclass(frozen=True)
class Toolchain:
    """Everything that a build of Horovod depends on; None: not found."""

    python: Path  # the target interpreter
    python_tag: str  # ABI and platform, e.g. ``cpython-311-x86_64-linux-gnu``
    prefix: Path  # root of the Python environment
    site_packages: Path  # directory of compiled packages
    headers: Path  # expected directory of Python.h
    has_headers: bool  # whether Python.h exists
    has_pip: bool  # whether this interpreter has pip
    make: Path | None  # GNU make
    compiler: Compiler | None  # the C++ compiler
    mpi: BuildMpi | None  # the MPI library
    torch: Torch | None  # PyTorch
    tensorflow: TensorFlow | None  # TensorFlow
    cuda: Cuda | None  # the CUDA toolkit with its compiler
    nccl: Nccl | None  # NVIDIA's collective library
    cpu_flags: tuple[str, ...]  # compiler flags of the processor's vector instructions
    gpu_arches: tuple[int, ...] = ()  # compute capabilities of the local GPUs, ascending

    @property
    def foreign_nccl(self) -> Path | None:
        """Return the directory of NCCL if it belongs to a framework outside this environment."""
        folder = self.nccl.library.parent if self.nccl else Path()
        is_package = folder.parts[-3:] == ("nvidia", "nccl", "lib")
        return folder if is_package and not folder.is_relative_to(self.prefix) else None

    @property
    def frameworks(self) -> dict[str, Torch | TensorFlow]:
        """Return the frameworks that are installed, by name."""
        both = {"pytorch": self.torch, "tensorflow": self.tensorflow}
        return {name: framework for name, framework in both.items() if framework}


def find(environ: Mapping[str, str]) -> Toolchain:
    """Inspect this environment and this machine, without changes."""
    site_packages = Path(sysconfig.get_path("platlib"))
    headers = Path(sysconfig.get_path("include"))
    torch, tensorflow = find_torch(), find_tensorflow()
    wanted = (torch and torch.cuda) or (tensorflow and tensorflow.cuda) or ""
    # A virtual environment may use the system's framework and the packages installed with it.
    roots = [framework.root.parent for framework in (torch, tensorflow) if framework]
    packages = next((root for root in roots if (root / "nvidia").is_dir()), site_packages)
    cuda = find_cuda(environ, site_packages, wanted) or find_cuda(environ, packages, wanted)
    make, driver = shutil.which("make", path=environ.get("PATH")), gpus.find_driver()
    return Toolchain(
        python=Path(sys.executable),
        python_tag=str(sysconfig.get_config_var("EXT_SUFFIX")).strip(".").removesuffix(".so"),
        prefix=Path(sys.prefix),
        site_packages=site_packages,
        headers=headers,
        has_headers=(headers / "Python.h").is_file(),
        has_pip=is_installed("pip"),
        make=Path(make) if make else None,
        compiler=find_compiler(environ),
        mpi=find_mpi(environ, Path(sys.executable).parent),
        torch=torch,
        tensorflow=tensorflow,
        cuda=cuda,
        nccl=find_nccl(environ, cuda, packages),
        cpu_flags=find_cpu_flags(CPUINFO),
        gpu_arches=tuple(sorted({gpu.capability for gpu in driver.gpus})) if driver else (),
    )


def find_compiler(environ: Mapping[str, str]) -> Compiler | None:
    """Find the C++ compiler: ``CXX``, else g++, c++ or clang++ on PATH."""
    path = environ.get("PATH")
    for call in filter(None, (environ.get("CXX", ""), "g++", "c++", "clang++")):
        first, *rest = shlex.split(call)
        program = shutil.which(first, path=path)
        if not program:
            continue
        result = run(Command((program, *rest, "--version")), timeout=30)
        if result.ok:
            identity = result.output.partition("\n")[0].strip()
            return Compiler((program, *rest), identity, major_version(identity))
    return None


def major_version(identity: str) -> int:
    """Return the major version: 12 for ``g++ (Debian 12.2.0-14) 12.2.0``, from the last number."""
    numbers = re.findall(r"(?<![\w.-])(\d+)\.\d+", identity)
    return int(numbers[-1]) if numbers else 0


def find_mpi(environ: Mapping[str, str], scripts: Path) -> BuildMpi | None:
    """Find MPI by ``mpicxx``: on PATH, then in the interpreter's directory.

    PATH comes first because it determines the user's ``mpirun``: with a cluster's MPI module loaded
    Horovod must be built for that library.
    """
    search = os.pathsep.join([environ.get("PATH", ""), str(scripts)])
    for name in ("mpicxx", "mpic++", "mpiicpc"):
        program = shutil.which(name, path=search)
        if program is None:
            continue
        flags = ("-showme:version", "-v", "-show")
        texts = [run(Command((program, flag)), timeout=30).output for flag in flags]
        launchers = (Path(program).with_name(name) for name in ("mpirun", "mpiexec"))
        mpirun = next((path for path in launchers if path.is_file()), None)
        identity, libraries = mpi_identity("\n".join(texts[:2])), mpi_libraries(texts[2])
        return BuildMpi(Path(program), identity, libraries, mpirun)
    return None


def mpi_libraries(show: str) -> tuple[Path, ...]:
    """Return the -L directories of a wrapper's ``-show`` line."""
    try:
        words = shlex.split(show)
    except ValueError:
        return ()
    return tuple(Path(word[2:]) for word in words if word.startswith("-L") and len(word) > 2)


def find_cpu_flags(cpuinfo: Path) -> tuple[str, ...]:
    """Return the compiler flags for the processor's F16C, AVX and FMA.

    Horovod's build tests the same; here they also distinguish node types that share a cache.
    """
    present = cpu_flags(cpuinfo) if platform.machine() in ("x86_64", "AMD64") else set()
    return tuple(f"-m{name}" for name in ("f16c", "avx", "fma") if name in present)


def find_cuda(
    environ: Mapping[str, str], site_packages: Path, wanted: str = "", system: Path = SYSTEM_CUDA
) -> Cuda | None:
    """Return the toolkit to compile with: the user's, else the first with the wanted version.

    ``site_packages`` has PyPI's packages of CUDA 13 and later.
    """
    named = [environ[name] for name in CUDA_HOMES if environ.get(name)]
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    homes = [Path(home) for home in named] or [
        *([Path(nvcc).resolve().parent.parent] if nvcc else []),
        system,
        *sorted(site_packages.glob("nvidia/cu[0-9]*"), reverse=True),
    ]
    toolkits = [cuda for home in homes if (cuda := describe_cuda(home))]
    major = wanted.partition(".")[0]
    return next((cuda for cuda in toolkits if cuda.major == major), next(iter(toolkits), None))


def describe_cuda(home: Path) -> Cuda | None:
    """Return the toolkit in ``home``; None if its compiler or headers are missing."""
    nvcc = home / "bin" / "nvcc"
    if not nvcc.is_file() or not (home / "include" / "cuda_runtime.h").is_file():
        return None
    version = run(Command((str(nvcc), "--version")), timeout=30)
    listing = run(Command((str(nvcc), "--list-gpu-arch")), timeout=30)
    if not version.ok:
        return None
    arches = {int(number) for number in re.findall(r"compute_(\d+)\b", listing.output)}
    release = re.search(r"release (\d+\.\d+)", version.output)
    return Cuda(home, release[1] if release else "unknown", tuple(sorted(arches)))


def find_nccl(environ: Mapping[str, str], cuda: Cuda | None, site_packages: Path) -> Nccl | None:
    """Return the first NCCL with both header and library.

    PyTorch's package comes before the system's: a process can load only one ``libnccl.so.2``, and
    PyTorch's is loaded before Horovod starts.
    """
    pairs: list[tuple[Path, Path]] = []
    if environ.get("HOROVOD_NCCL_HOME"):
        home = Path(environ["HOROVOD_NCCL_HOME"])
        pairs += [(home / "include", home / "lib"), (home / "include", home / "lib64")]
    package = site_packages / "nvidia" / "nccl"
    pairs += [(package / "include", package / "lib")]
    if cuda:
        pairs += [(cuda.home / "include", cuda.home / "lib64")]
    pairs += [(Path("/usr/include"), Path(library)) for library in SYSTEM_LIBRARIES]
    for include, directory in pairs:
        library = next(
            (directory / n for n in ("libnccl.so", "libnccl.so.2") if (directory / n).exists()),
            None,
        )
        if library and (include / "nccl.h").is_file():
            header = (include / "nccl.h").read_text()
            numbers = re.findall(r"^\s*#define\s+NCCL_(?:MAJOR|MINOR|PATCH)\s+(\d+)", header, re.M)
            return Nccl(include, library, ".".join(numbers[:3]) or "unknown")
    return None
