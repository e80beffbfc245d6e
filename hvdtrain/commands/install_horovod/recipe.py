"""Recipe for Horovod 0.28.1 with current frameworks: pure functions from facts to commands.

The source archive is the released one, unchanged; the build is configured by its environment only.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.commands.install_horovod.toolchain import Toolchain
from hvdtrain.system.runtime.command import Command

HOROVOD_VERSION = "0.28.1"
HOROVOD_ARCHIVE = f"horovod-{HOROVOD_VERSION}.tar.gz"
HOROVOD_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
REQUIREMENT = f"horovod=={HOROVOD_VERSION} --hash=sha256:{HOROVOD_SHA256}\n"  # for pip
# Installed into a temporary directory, so that the environment's tools are unchanged. The hashes
# of their files, written by `make requirements`, are for all platforms and Pythons.
TOOLS_FILE = Path(__file__).with_name("build-tools.txt")
BUILD_TOOLS = tuple(re.findall(r"^\S+==\S+", TOOLS_FILE.read_text(), re.MULTILINE))
RECIPE = 3  # increment it if a change here changes the binary

# The variables of Horovod's build that a user may set. Any other HOROVOD_ variable is a setting of
# a training (or would override this recipe) and is unset in the build.
USER_VARIABLES = (
    "HOROVOD_BUILD_ARCH_FLAGS",
    "HOROVOD_WITHOUT_NVTX",
    "HOROVOD_WITH_GLOO",
    "HOROVOD_WITH_NVTX",
)
FLAG_VARIABLES = ("CPPFLAGS", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDAFLAGS", "NVCC_APPEND_FLAGS")
# CMAKE_GENERATOR: Horovod's setup.py supports make only. MAKELEVEL, MFLAGS: under `make setup`
# they would connect the build's make to the outer one. CCL_*: set by a oneAPI module, they make
# Horovod link against oneCCL, which was not requested.
UNSET_VARIABLES = ("CMAKE_GENERATOR", "MAKELEVEL", "MFLAGS", "CCL_ROOT", "CCL_CONFIGURATION")
CUDA_VARIABLES = ("CUDA_HOME", "CUDA_PATH", "CUDACXX", "CUDAToolkit_ROOT")

# Appended by the compiler wrapper.
CXX_STANDARD = "-std=c++20"
# cstdint, string: used without being included, which works before GCC 13. span: FlatBuffers then
# uses the standard's; GCC 14 rejects its own.
HEADERS = "-include cstdint -include string -include span"
NO_XLA_FILE = "*/horovod/tensorflow/xla_mpi_ops.cc"
NO_XLA = "-UTENSORFLOW_VERSION -DTENSORFLOW_VERSION=0"


# Horovod queries PyTorch, in a `python -c` that imports this file first, for CUDA or ROCm, and
# compiles for it even without GPU operations. PyTorch reports any toolkit, also one of another
# version, or a /usr/local/cuda without a compiler.
NO_GPU = """\
import contextlib
import sys
if sys.orig_argv[1:2] == ["-c"] and "torch" in sys.orig_argv[2]:
    with contextlib.suppress(Exception):
        from torch.utils import cpp_extension
        cpp_extension.CUDA_HOME = cpp_extension.ROCM_HOME = None
"""


@dataclass(frozen=True)
class BuildTarget:
    """The configuration of a build."""

    frameworks: tuple[str, ...]  # ``pytorch``, ``tensorflow`` or both
    gpu: str  # ``none`` or ``nccl``
    jobs: int  # number of parallel compilers
    cuda_arches: tuple[int, ...] = ()  # compute capabilities; empty: all that nvcc supports


class Workshop:
    """The directories of one build, under a temporary root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tools = root / "tools"  # build tools
        self.cmake = self.tools / "cmake" / "data" / "bin" / "cmake"
        self.compiler = root / "c++"  # the wrapper around the C++ compiler
        self.start = root / "start"  # has NO_GPU, executed by each Python of the build
        self.cuda = root / "cuda"  # links to a toolkit of PyPI's packages
        self.nccl = root / "nccl"  # has libnccl.so, the linker name
        self.nothing = root / "nothing"  # empty: the search path of CUDA in a build without it
        self.scratch = root / "tmp"
        self.requirement = root / "horovod.txt"  # the archive's version and hash
        self.wheels = root / "wheels"  # output


def build_environment(
    target: BuildTarget, toolchain: Toolchain, workshop: Workshop, environ: Mapping[str, str]
) -> dict[str, str | None]:
    """Return the variables of the build that differ from ``environ``; None: unset."""
    changes: dict[str, str | None] = {
        name: None
        for name in environ
        if name in UNSET_VARIABLES or (name.startswith("HOROVOD_") and name not in USER_VARIABLES)
    }
    assert toolchain.mpi is not None
    first = dict.fromkeys([str(toolchain.mpi.mpicxx.parent), str(toolchain.python.parent)])
    if target.gpu == "nccl":  # Horovod queries the nvcc on PATH for its architectures
        first = {str(cuda_home(toolchain, workshop) / "bin"): None, **first}
    headers = [toolchain.headers]  # Horovod uses distutils, which was removed in Python 3.12
    if "tensorflow" in target.frameworks and toolchain.tensorflow:
        headers += toolchain.tensorflow.extra_includes()  # Horovod's build does not find them
    changes |= {
        # CMake must find this MPI, including mpicc.
        "PATH": os.pathsep.join([*first, environ.get("PATH", os.defpath)]),
        "PYTHONPATH": _before(
            [workshop.tools, *([workshop.start] if target.gpu == "none" else [])],
            environ.get("PYTHONPATH"),
        ),
        "TMPDIR": str(workshop.scratch),
        "CXX": str(workshop.compiler),
        "CPLUS_INCLUDE_PATH": _before(headers, environ.get("CPLUS_INCLUDE_PATH")),
        "HOROVOD_CMAKE": str(workshop.cmake),
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 rejects Horovod's version
        "MAKEFLAGS": f"-j{target.jobs}",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
    }
    for name in ("pytorch", "tensorflow"):
        verb = "WITH" if name in target.frameworks else "WITHOUT"
        changes[f"HOROVOD_{verb}_{name.upper()}"] = "1"
    if environ.get("HOROVOD_WITH_GLOO") != "1":  # only `horovodrun --gloo` needs Gloo
        changes["HOROVOD_WITHOUT_GLOO"] = "1"
    if toolchain.cpu_flags and "HOROVOD_BUILD_ARCH_FLAGS" not in environ:
        changes["HOROVOD_BUILD_ARCH_FLAGS"] = " ".join(toolchain.cpu_flags)
    changes |= cuda_environment(target, toolchain, workshop)
    return {k: v for k, v in changes.items() if v is not None or k in environ}


def _before(folders: Sequence[Path], rest: str | None) -> str:
    return os.pathsep.join([*map(str, folders), *([rest] if rest else [])])


def cuda_home(toolchain: Toolchain, workshop: Workshop) -> Path:
    """Return the root of the build's CUDA toolkit."""
    assert toolchain.cuda is not None
    return workshop.cuda if toolchain.cuda.is_package else toolchain.cuda.home


def cuda_environment(
    target: BuildTarget, toolchain: Toolchain, workshop: Workshop
) -> dict[str, str | None]:
    """Return the variables that set, or hide, CUDA and NCCL in Horovod's build."""
    changes: dict[str, str | None] = dict.fromkeys(CUDA_VARIABLES)
    if target.gpu == "none":
        # Horovod searches for a CUDA compiler nevertheless, and one that does not support the C++
        # compiler would abort the build. So its search paths are empty; an nvcc on PATH is found
        # anyway, hence the flag.
        return changes | {
            "CUDACXX": str(workshop.nothing / "nvcc"),
            "CUDAToolkit_ROOT": str(workshop.nothing),
            "NVCC_APPEND_FLAGS": "-allow-unsupported-compiler",
        }
    home = str(cuda_home(toolchain, workshop))
    changes |= {"HOROVOD_CUDA_HOME": home, "CUDA_HOME": home, "CUDAToolkit_ROOT": home}
    if target.cuda_arches:
        changes["HOROVOD_BUILD_CUDA_CC_LIST"] = ",".join(map(str, target.cuda_arches))
    if toolchain.nccl:
        changes |= {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_NCCL_INCLUDE": str(toolchain.nccl.include),
            "HOROVOD_NCCL_LIB": str(workshop.nccl),
            "HOROVOD_NCCL_LINK": "SHARED",
        }
    return changes


def relative_rpaths(toolchain: Toolchain) -> tuple[str, ...]:
    """Return the directories of libraries relative to the compiled module, if in the environment.

    With absolute paths only, a cached wheel would load the MPI of the environment in which it was
    built, which may have been removed. Only an NCCL of a framework outside has an absolute path.
    """
    if toolchain.mpi is None:
        return ()
    module = toolchain.site_packages / "horovod" / "torch"
    inside = [p for p in toolchain.mpi.libraries if p.is_relative_to(toolchain.prefix)]
    inside.append(toolchain.site_packages / "nvidia" / "nccl" / "lib")
    if toolchain.cuda:  # even if the system's is used: a node of the job may not have it
        package = "cuda_runtime" if toolchain.cuda.major == "12" else f"cu{toolchain.cuda.major}"
        inside.append(toolchain.site_packages / "nvidia" / package / "lib")
    outside = (str(toolchain.foreign_nccl),) if toolchain.foreign_nccl else ()
    return (*(f"$ORIGIN/{os.path.relpath(path, module)}" for path in inside), *outside)


def compiler_wrapper(compiler: Sequence[str], rpaths: Sequence[str]) -> str:
    """Return the shell script that wraps the C++ compiler.

    Horovod sets C++14 and C++17 and strips ``-std`` from CXXFLAGS, while PyTorch's headers need
    C++20; the last ``-std`` wins, so it is appended, and ``HEADERS`` with it. Not in calls by nvcc,
    which parses the preprocessed source by its own standard. ``xla_mpi_ops.cc`` includes headers
    that TensorFlow has moved; with the version of an old TensorFlow the file is compiled without
    them. ``-g0`` drops 120 MB of debugging symbols.
    """
    call = shlex.join(compiler)
    links = " ".join(f"-Wl,-rpath,{shlex.quote(path)}" for path in rpaths)
    return f"""#!/bin/sh
# Made by hvdtrain install-horovod.
standard='{HEADERS} {CXX_STANDARD} -g0' links=yes version=
for argument do
    case $argument in
        -c|-E|-S|-M|-MM) links= ;;
        -D__CUDACC__*|-D__NVCC__*|*.cudafe1.cpp) standard= ;;
        {NO_XLA_FILE}) version='{NO_XLA}' ;;
    esac
done
[ -z "$links" ] || set -- {links} "$@"
exec {call} "$@" $standard $version
"""


def tools_command(python: Path, workshop: Workshop) -> Command:
    """Return the command that installs the build tools into ``workshop.tools``, with hashes."""
    words = ("install", "--quiet", "--require-hashes", "--only-binary", ":all:")
    return _pip(python, *words, "--target", workshop.tools, "--requirement", TOOLS_FILE)


def download_command(
    python: Path, workshop: Workshop, environment: Mapping[str, str | None]
) -> Command:
    """Return the command that downloads the archive into ``workshop.scratch``, by its hash."""
    words = ("download", "--no-deps", "--no-build-isolation", "--no-binary", "horovod")
    source = ("--require-hashes", "--requirement", workshop.requirement)
    return _pip(python, *words, *source, "--dest", workshop.scratch, environment=environment)


def wheel_command(
    python: Path, workshop: Workshop, archive: Path, environment: Mapping[str, str | None]
) -> Command:
    """Return the command that compiles the wheel.

    Without isolation, because the frameworks must be importable; verbose, because progress and
    errors are read from the log.
    """
    words = ("wheel", "--verbose", "--no-deps", "--no-build-isolation")
    return _pip(python, *words, "--wheel-dir", workshop.wheels, archive, environment=environment)


def install_command(python: Path, wheel: Path, target: Path | None = None) -> Command:
    """Return the command that installs only the wheel, into the environment or ``target``."""
    words = ("install", "--quiet", "--no-deps", "--no-index", "--force-reinstall")
    return _pip(python, *words, *(("--target", target) if target else ()), wheel)


def _pip(
    python: Path, *words: str | Path, environment: Mapping[str, str | None] | None = None
) -> Command:
    pip = (python, "-m", "pip", "--disable-pip-version-check", "--no-input", *words)
    return Command(tuple(map(str, pip)), environment or {})
