"""Say how Horovod 0.28.1 is built on today's frameworks: pure functions from facts to commands.

The source archive is the released one, unedited; everything that it needs to be told is told by
the environment of the build. What each variable is for stands beside it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.system.machine.toolchain import Toolchain
from hvdtrain.system.runtime.command import Command

HOROVOD_VERSION = "0.28.1"
HOROVOD_ARCHIVE = f"horovod-{HOROVOD_VERSION}.tar.gz"
HOROVOD_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
# Put into a directory that is thrown away after the build, so that the environment keeps its own.
# The hashes of their files, which `make requirements` writes, are for all platforms and Pythons.
TOOLS_FILE = Path(__file__).with_name("build-tools.txt")
BUILD_TOOLS = tuple(re.findall(r"^\S+==\S+", TOOLS_FILE.read_text(), re.MULTILINE))
RECIPE = 2  # raise it when a change here changes the binary

# The variables of Horovod's build that a user may set. Any other HOROVOD_ variable is a setting of
# a training (or would undo what this recipe does) and is kept away from the build.
USER_VARIABLES = (
    "HOROVOD_BUILD_ARCH_FLAGS",
    "HOROVOD_WITHOUT_GLOO",
    "HOROVOD_WITHOUT_NVTX",
    "HOROVOD_WITH_NVTX",
)
FLAG_VARIABLES = ("CPPFLAGS", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDAFLAGS", "NVCC_APPEND_FLAGS")
# CMAKE_GENERATOR: Horovod's setup.py speaks to make only. MAKELEVEL, MFLAGS: under `make setup`
# they would tie our make to the outer one. CCL_*: set by a oneAPI module, they make Horovod link
# against oneCCL, and nobody asked for that.
KEPT_AWAY = ("CMAKE_GENERATOR", "MAKELEVEL", "MFLAGS", "CCL_ROOT", "CCL_CONFIGURATION")
CUDA_VARIABLES = ("CUDA_HOME", "CUDA_PATH", "CUDACXX", "CUDAToolkit_ROOT")

# What the compiler wrapper appends.
CXX_STANDARD = "-std=c++20"
NO_XLA_FILE = "*/horovod/tensorflow/xla_mpi_ops.cc"
NO_XLA = "-UTENSORFLOW_VERSION -DTENSORFLOW_VERSION=0"
DEVICE_FILE = "*/horovod/common/gloo/gloo_context.cc"
# Included before that file. For its process sets, the one of all ranks among them, Horovod forgets
# the interface, and Gloo takes the address that the host's own name leads to, often 127.0.1.1.
DEVICE_HEADER = """\
#include <cstdlib>
#include "gloo/transport/tcp/device.h"
namespace gloo { namespace transport { namespace tcp {
inline auto CreateDeviceOf(attr which) {
  const char* interface = std::getenv("HOROVOD_GLOO_IFACE");
  if (which.iface.empty() && interface != nullptr) which.iface = interface;
  return CreateDevice(which);
}
} } }
#define CreateDevice CreateDeviceOf
"""


# Horovod asks PyTorch, in `python -c` with this beside it, whether there is CUDA or ROCm, and then
# compiles for it, operations or none. PyTorch takes any toolkit, also one of another version, or a
# /usr/local/cuda without a compiler.
NO_GPU = """\
import contextlib
import sys
if sys.orig_argv[1:2] == ["-c"] and "torch" in sys.orig_argv[2]:
    with contextlib.suppress(Exception):
        from torch.utils import cpp_extension
        cpp_extension.CUDA_HOME = cpp_extension.ROCM_HOME = None
"""


@dataclass(frozen=True)
class Target:
    """What is to be built."""

    frameworks: tuple[str, ...]  # ``pytorch``, ``tensorflow`` or both
    gpu: str  # ``none`` or ``nccl``
    jobs: int  # compilers that run at the same time
    cuda_arches: tuple[int, ...] = ()  # compute capabilities; empty: all that nvcc knows


class Workshop:
    """The directories of one build, all under one root that is thrown away."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tools = root / "tools"  # where the build tools are installed
        self.cmake = self.tools / "cmake" / "data" / "bin" / "cmake"
        self.compiler = root / "c++"  # the wrapper around the C++ compiler
        self.header = root / "device.h"  # DEVICE_HEADER
        self.start = root / "start"  # holds NO_GPU, which each Python of the build runs first
        self.cuda = root / "cuda"  # stands for a toolkit of PyPI's packages
        self.nccl = root / "nccl"  # holds libnccl.so, the name that a linker looks for
        self.nothing = root / "nothing"  # empty: where CUDA is looked for when it must not be found
        self.scratch = root / "tmp"
        self.requirement = root / "horovod.txt"  # names the archive by its hash
        self.wheels = root / "wheels"  # where the built wheel lands


def requirement_text() -> str:
    """Return the requirement that pip checks the archive's hash against."""
    return f"horovod=={HOROVOD_VERSION} --hash=sha256:{HOROVOD_SHA256}\n"


def build_environment(
    target: Target, toolchain: Toolchain, workshop: Workshop, environ: Mapping[str, str]
) -> dict[str, str | None]:
    """Return the variables of the build that differ from ``environ``; None takes one away."""
    changes: dict[str, str | None] = {
        name: None
        for name in environ
        if name in KEPT_AWAY or (name.startswith("HOROVOD_") and name not in USER_VARIABLES)
    }
    assert toolchain.mpi is not None
    first = dict.fromkeys([str(toolchain.mpi.mpicxx.parent), str(toolchain.python.parent)])
    if target.gpu == "nccl":  # Horovod asks the nvcc on PATH what it compiles for
        first = {str(cuda_home(toolchain, workshop) / "bin"): None, **first}
    changes |= {
        # The MPI that was found is the one that CMake finds; mpicc must be found as well.
        "PATH": os.pathsep.join([*first, environ.get("PATH", os.defpath)]),
        "PYTHONPATH": _before(
            [workshop.tools, *([workshop.start] if target.gpu == "none" else [])],
            environ.get("PYTHONPATH"),
        ),
        "TMPDIR": str(workshop.scratch),
        "CXX": str(workshop.compiler),
        "CPLUS_INCLUDE_PATH": _before(
            _include_paths(target, toolchain), environ.get("CPLUS_INCLUDE_PATH")
        ),
        "HOROVOD_CMAKE": str(workshop.cmake),
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses what Horovod and Gloo ask for
        "MAKEFLAGS": f"-j{target.jobs}",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
    }
    for name in ("pytorch", "tensorflow"):
        verb = "WITH" if name in target.frameworks else "WITHOUT"
        changes[f"HOROVOD_{verb}_{name.upper()}"] = "1"
    if toolchain.cpu_flags and "HOROVOD_BUILD_ARCH_FLAGS" not in environ:
        changes["HOROVOD_BUILD_ARCH_FLAGS"] = " ".join(toolchain.cpu_flags)
    changes |= cuda_environment(target, toolchain, workshop)
    return {k: v for k, v in changes.items() if v is not None or k in environ}


def _before(folders: Sequence[Path], rest: str | None) -> str:
    return os.pathsep.join([*map(str, folders), *([rest] if rest else [])])


def _include_paths(target: Target, toolchain: Toolchain) -> list[Path]:
    """Return header directories that Horovod's build does not find by itself."""
    paths = [toolchain.headers]  # it asks distutils, which Python 3.12 no longer has
    if "tensorflow" in target.frameworks and toolchain.tensorflow:
        paths += toolchain.tensorflow.extra_includes()
    return paths


def cuda_home(toolchain: Toolchain, workshop: Workshop) -> Path:
    """Return the root of the toolkit that is compiled with."""
    assert toolchain.cuda is not None
    return workshop.cuda if toolchain.cuda.is_package else toolchain.cuda.home


def cuda_environment(
    target: Target, toolchain: Toolchain, workshop: Workshop
) -> dict[str, str | None]:
    """Return the variables that lead Horovod's build to CUDA and NCCL, or away from them."""
    changes: dict[str, str | None] = dict.fromkeys(CUDA_VARIABLES)
    if target.gpu == "none":
        # Horovod looks for a CUDA compiler even so, and one that does not fit the C++ compiler
        # would stop a build that does not need it. So it is led away; a nvcc on PATH it finds all
        # the same, and that one is told not to mind.
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
    """Return where the libraries lie as seen from the compiled module, if in the environment.

    With absolute paths alone a cached wheel would load the MPI of the environment that it was
    built in, which may be another or gone. Only the NCCL of a framework outside is named so.
    """
    if toolchain.mpi is None:
        return ()
    module = toolchain.site_packages / "horovod" / "torch"
    inside = [p for p in toolchain.mpi.libraries if p.is_relative_to(toolchain.prefix)]
    inside.append(toolchain.site_packages / "nvidia" / "nccl" / "lib")
    if toolchain.cuda:  # also where the system's compiles: a node of the job may not have that
        package = "cuda_runtime" if toolchain.cuda.major == "12" else f"cu{toolchain.cuda.major}"
        inside.append(toolchain.site_packages / "nvidia" / package / "lib")
    outside = (str(toolchain.foreign_nccl),) if toolchain.foreign_nccl else ()
    return (*(f"$ORIGIN/{os.path.relpath(path, module)}" for path in inside), *outside)


def compiler_wrapper(compiler: Sequence[str], rpaths: Sequence[str], header: Path) -> str:
    """Return the shell script that stands in for the C++ compiler.

    Horovod fixes C++14 and C++17 and strips ``-std`` from CXXFLAGS, while PyTorch's headers need
    C++20; the last ``-std`` wins, so it is appended. Not where nvcc calls: it parses what the
    compiler preprocesses by its own idea of the language. ``xla_mpi_ops.cc`` includes headers that
    TensorFlow has moved; as for an ancient TensorFlow the file compiles to nothing.
    ``gloo_context.cc`` gets ``header``. ``-g0`` drops 120 MB of debugging symbols.
    """
    call = shlex.join(compiler)
    links = " ".join(f"-Wl,-rpath,{shlex.quote(path)}" for path in rpaths)
    return f"""#!/bin/sh
# Made by hvdtrain install-horovod.
standard='{CXX_STANDARD} -g0' links=yes version= header=
for argument do
    case $argument in
        -c|-E|-S|-M|-MM) links= ;;
        -D__CUDACC__*|-D__NVCC__*|*.cudafe1.cpp) standard= ;;
        {NO_XLA_FILE}) version='{NO_XLA}' ;;
        {DEVICE_FILE}) header=yes ;;
    esac
done
[ -z "$links" ] || set -- {links} "$@"
[ -z "$header" ] || set -- -include {shlex.quote(str(header))} "$@"
exec {call} "$@" $standard $version
"""


def tools_command(python: Path, workshop: Workshop) -> Command:
    """Return the command that puts the build tools into their own directory; pip checks hashes."""
    argv = (
        *_pip(python), "install", "--quiet", "--target", str(workshop.tools), "--require-hashes",
        "--only-binary", ":all:", "--requirement", str(TOOLS_FILE),
    )  # fmt: skip
    return Command(argv)


def download_command(
    python: Path, workshop: Workshop, directory: Path, environment: Mapping[str, str | None]
) -> Command:
    """Return the command that fetches the archive; pip stops where the hash differs."""
    argv = (
        *_pip(python), "download", "--no-deps", "--no-build-isolation", "--no-binary", "horovod",
        "--require-hashes", "--dest", str(directory), "--requirement", str(workshop.requirement),
    )  # fmt: skip
    return Command(argv, environment)


def wheel_command(
    python: Path, workshop: Workshop, archive: Path, environment: Mapping[str, str | None]
) -> Command:
    """Return the command that compiles the wheel.

    Without isolation, because the frameworks must be importable; verbose, because the log is what
    tells how far it is and why it failed.
    """
    argv = (
        *_pip(python), "wheel", "--verbose", "--no-deps", "--no-build-isolation",
        "--wheel-dir", str(workshop.wheels), str(archive),
    )  # fmt: skip
    return Command(argv, environment)


def install_command(python: Path, wheel: Path, target: Path | None = None) -> Command:
    """Return the command that installs the wheel alone, into the environment or ``target``."""
    argv = (*_pip(python), "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall")
    into = ("--target", str(target)) if target else ()
    return Command((*argv, *into, str(wheel)))


def _pip(python: Path) -> tuple[str, ...]:
    return (str(python), "-m", "pip", "--disable-pip-version-check", "--no-input")
