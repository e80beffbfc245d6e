"""A toolchain with which Horovod can be built, and its changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hvdtrain.commands.install_horovod.build import Build
from hvdtrain.commands.install_horovod.recipe import BuildTarget, Workshop
from hvdtrain.commands.install_horovod.toolchain import BuildMpi, Compiler, Cuda, Nccl, Toolchain
from hvdtrain.commands.install_horovod.wheel_cache import WheelCache
from hvdtrain.system.machine import frameworks

BOTH = BuildTarget(("pytorch", "tensorflow"), "none", 2)
NCCL = BuildTarget(("pytorch",), "nccl", 2)
SHOP = Workshop(Path("/cache/build/k"))


@pytest.fixture
def toolchain(tmp_path: Path) -> Toolchain:
    """Return a complete toolchain without GPUs, with Open MPI in the environment."""
    env = tmp_path / "env"
    site = env / "lib" / "python3.11" / "site-packages"
    for part in ("highwayhash", "farmhash_archive/src"):
        (site / "tensorflow" / "include" / "external" / part).mkdir(parents=True)
    return Toolchain(
        python=env / "bin" / "python",
        python_tag="cpython-311-x86_64-linux-gnu",
        prefix=env,
        site_packages=site,
        headers=Path("/usr/include/python3.11"),
        has_headers=True,
        has_pip=True,
        make=Path("/usr/bin/make"),
        compiler=Compiler(("/usr/bin/g++",), "g++ (Debian 12.2.0-14) 12.2.0", 12),
        mpi=BuildMpi(
            env / "bin" / "mpicxx", "Open MPI 5.0.11", (env / "lib",), env / "bin" / "mpirun"
        ),
        torch=frameworks.Torch("2.13.0+cpu", None, "cuda=None commit=abc", site / "torch"),
        tensorflow=frameworks.TensorFlow("2.21.0", None, site / "tensorflow"),
        cuda=None,
        nccl=None,
        cpu_flags=("-mavx", "-mfma"),
    )


def on_gpu(toolchain: Toolchain) -> Toolchain:
    """Return the toolchain with a CUDA build of PyTorch, a CUDA toolkit, and NCCL."""
    torch = frameworks.Torch("2.13.0", "13.0", "cuda=13.0 commit=abc", toolchain.site_packages)
    include = toolchain.site_packages / "nvidia" / "nccl" / "include"
    nccl = Nccl(include, include.parent / "lib" / "libnccl.so.2", "2.28.3")
    cuda = Cuda(Path("/opt/cuda"), "13.0")
    return dataclasses.replace(toolchain, torch=torch, cuda=cuda, nccl=nccl)


def make_build(
    toolchain: Toolchain, root: Path = Path("cache"), target: BuildTarget = BOTH, **environ: str
) -> Build:
    return Build(target, toolchain, WheelCache(root), {"PATH": "/usr/bin", **environ})
