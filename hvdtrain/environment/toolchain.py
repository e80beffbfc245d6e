"""What is there to build Horovod with: frameworks, MPI, compiler, make, Python's headers."""

from __future__ import annotations

import importlib.util
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

from hvdtrain.environment.cuda import Cuda, Nccl, find_cuda, find_nccl
from hvdtrain.environment.frameworks import TensorFlow, Torch, find_tensorflow, find_torch
from hvdtrain.launch.run import Command, run


@dataclass(frozen=True)
class Mpi:
    """An MPI library, by its compiler wrapper."""

    mpicxx: Path
    """The C++ wrapper; ``mpicc`` and ``mpirun`` are taken from beside it."""
    identity: str
    """Library and version, such as ``Open MPI 5.0.11``."""
    libraries: tuple[Path, ...]
    """Directories that it links from."""
    mpirun: Path | None
    """The launcher beside the wrapper."""

    @property
    def is_open_mpi(self) -> bool:
        """Whether the launcher takes Open MPI's options."""
        return self.identity.startswith("Open MPI")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler."""

    argv: tuple[str, ...]
    """How it is called."""
    identity: str
    """First line of its ``--version``."""
    major: int
    """First number of its version; 0 when it does not say."""


@dataclass(frozen=True)
class Toolchain:
    """All that a build of Horovod depends on, as found. None stands for: not there."""

    python: Path
    """The interpreter that Horovod is built for and installed into."""
    python_tag: str
    """ABI and platform, such as ``cpython-311-x86_64-linux-gnu``."""
    prefix: Path
    """Root of the environment."""
    site_packages: Path
    """Where compiled packages are installed."""
    headers: Path
    """Where Python.h should be."""
    has_headers: bool
    """Whether it is there."""
    has_pip: bool
    """Whether this interpreter has pip."""
    make: Path | None
    """GNU make."""
    compiler: Compiler | None
    """The C++ compiler."""
    mpi: Mpi | None
    """The MPI library."""
    torch: Torch | None
    """PyTorch."""
    tensorflow: TensorFlow | None
    """TensorFlow."""
    cuda: Cuda | None
    """The CUDA toolkit with its compiler."""
    cuda_remains: Path | None
    """A CUDA directory without a compiler that PyTorch would take for a toolkit."""
    nccl: Nccl | None
    """NVIDIA's collective library."""
    cpu_flags: tuple[str, ...]
    """Which of Horovod's vector instructions this processor has."""

    def installed_frameworks(self) -> tuple[str, ...]:
        """Return the names of the frameworks that are installed."""
        pairs = (("pytorch", self.torch), ("tensorflow", self.tensorflow))
        return tuple(name for name, found in pairs if found)


def find(environ: Mapping[str, str]) -> Toolchain:
    """Look at this environment and this machine; changes nothing."""
    site_packages = Path(sysconfig.get_path("platlib"))
    headers = Path(sysconfig.get_path("include"))
    cuda, remains = find_cuda(environ)
    make = shutil.which("make", path=environ.get("PATH"))
    return Toolchain(
        python=Path(sys.executable),
        python_tag=str(sysconfig.get_config_var("EXT_SUFFIX")).strip(".").removesuffix(".so"),
        prefix=Path(sys.prefix),
        site_packages=site_packages,
        headers=headers,
        has_headers=(headers / "Python.h").is_file(),
        has_pip=importlib.util.find_spec("pip") is not None,
        make=Path(make) if make else None,
        compiler=find_compiler(environ),
        mpi=find_mpi(environ, Path(sys.executable).parent),
        torch=find_torch(),
        tensorflow=find_tensorflow(),
        cuda=cuda,
        cuda_remains=remains,
        nccl=find_nccl(environ, cuda, site_packages),
        cpu_flags=find_cpu_flags(Path("/proc/cpuinfo")),
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
    """Return 12 for ``g++ (Debian 12.2.0-14) 12.2.0``: the last dotted number is the version."""
    numbers = re.findall(r"(?<![\w.-])(\d+)\.\d+", identity)
    return int(numbers[-1]) if numbers else 0


def find_mpi(environ: Mapping[str, str], scripts: Path) -> Mpi | None:
    """Find MPI by ``mpicxx``: first on PATH, then beside the interpreter.

    PATH comes first because that is where the user's ``mpirun`` comes from: with a cluster's MPI
    module loaded it must be that library that Horovod is built for.
    """
    search = os.pathsep.join([environ.get("PATH", ""), str(scripts)])
    for name in ("mpicxx", "mpic++", "mpiicpc"):
        program = shutil.which(name, path=search)
        if program:
            return _describe_mpi(Path(program))
    return None


def _describe_mpi(mpicxx: Path) -> Mpi:
    """Ask the wrapper ``mpicxx`` which library it stands for."""
    texts = [
        run(Command((str(mpicxx), flag)), timeout=30).output
        for flag in ("-showme:version", "-v", "-show")
    ]
    names = (mpicxx.parent / name for name in ("mpirun", "mpiexec"))
    mpirun = next((path for path in names if path.is_file()), None)
    return Mpi(mpicxx, mpi_identity("\n".join(texts[:2])), mpi_libraries(texts[2]), mpirun)


def mpi_identity(text: str) -> str:
    """Return library and version from what an MPI library or its wrapper says of itself."""
    for name, pattern in (
        ("Open MPI", r"Open MPI v?([\w.]+)"),
        ("Intel MPI", r"Intel\(R\) MPI Library ([\w.]+)"),
        ("MVAPICH", r"MVAPICH2? version\s*:?\s*([\w.]+)"),
        ("Cray MPICH", r"CRAY MPICH version\s*:?\s*([\w.]+)"),
        ("MPICH", r"MPICH version\s*:?\s*([\w.]+)"),
    ):
        found = re.search(pattern, text, re.IGNORECASE)
        if found:
            return f"{name} {found[1]}"
    return "unknown MPI"


def mpi_libraries(show: str) -> tuple[Path, ...]:
    """Return the -L directories of a wrapper's ``-show`` line."""
    try:
        words = shlex.split(show)
    except ValueError:
        return ()
    return tuple(Path(word[2:]) for word in words if word.startswith("-L") and len(word) > 2)


def find_cpu_flags(cpuinfo: Path) -> tuple[str, ...]:
    """Return the compiler flags for those of F16C, AVX and FMA that the processor has.

    Horovod would ask the compiler the same; here the answer also tells two kinds of node apart
    that share one cache.
    """
    if platform.machine() not in ("x86_64", "AMD64") or not cpuinfo.is_file():
        return ()
    line = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    present = set(line[1].split()) if line else set()
    return tuple(f"-m{name}" for name in ("f16c", "avx", "fma") if name in present)
