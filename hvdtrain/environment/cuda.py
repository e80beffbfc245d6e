"""Finding the CUDA toolkit and NCCL, in the system or in PyTorch's packages."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.launch.run import Command, run

SYSTEM_CUDA = Path(
    "/usr/local/cuda"
)  # where PyTorch looks last, whether a compiler is there or not
SYSTEM_LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
)


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit that can compile."""

    home: Path
    """Its root: ``bin/nvcc`` and ``include/cuda_runtime.h`` are under it."""
    version: str
    """Its release, such as 13.0."""


@dataclass(frozen=True)
class Nccl:
    """NVIDIA's collective communication library."""

    include: Path
    """Directory of nccl.h."""
    library: Path
    """The shared library itself, under whichever name it has."""
    version: str
    """From nccl.h, such as 2.28.3."""


def find_cuda(
    environ: Mapping[str, str], system: Path = SYSTEM_CUDA
) -> tuple[Cuda | None, Path | None]:
    """Return the first complete toolkit, and a directory that only looks like one.

    PyTorch takes ``/usr/local/cuda`` for a toolkit as soon as the directory exists, and Horovod
    then stops inside CMake for want of a compiler: the second value is that directory.

    Source: ``torch/utils/cpp_extension.py`` (``_find_cuda_home``).
    """
    for home in _cuda_homes(environ, system):
        nvcc = home / "bin" / "nvcc"
        if nvcc.is_file() and (home / "include" / "cuda_runtime.h").is_file():
            result = run(Command((str(nvcc), "--version")), timeout=30)
            if result.ok:
                return Cuda(home, nvcc_release(result.output)), None
    return None, system if system.exists() else None


def _cuda_homes(environ: Mapping[str, str], system: Path) -> Iterator[Path]:
    """Yield where a toolkit may be, most particular first."""
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"):
        if environ.get(name):
            yield Path(environ[name])
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    if nvcc:
        yield Path(nvcc).resolve().parent.parent
    yield system


def nvcc_release(text: str) -> str:
    """Return 13.0 from nvcc's ``--version``."""
    found = re.search(r"release (\d+\.\d+)", text)
    return found[1] if found else "unknown"


def find_nccl(environ: Mapping[str, str], cuda: Cuda | None, site_packages: Path) -> Nccl | None:
    """Return the first NCCL that has both header and library.

    The package that PyTorch brings comes before the system's: one process can hold only one
    ``libnccl.so.2``, and PyTorch has loaded its own when Horovod starts.
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
            return Nccl(include, library, nccl_version((include / "nccl.h").read_text()))
    return None


def nccl_version(header: str) -> str:
    """Return the version that the text of nccl.h defines."""
    parts = [
        re.search(rf"^\s*#define\s+NCCL_{name}\s+(\d+)", header, re.MULTILINE)
        for name in ("MAJOR", "MINOR", "PATCH")
    ]
    return ".".join(part[1] for part in parts if part) or "unknown"
