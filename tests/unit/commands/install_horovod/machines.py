"""Toolchains and builds shared by the tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hvdtrain.commands.install_horovod import build
from hvdtrain.commands.install_horovod.recipe import (
    BuildTarget,
    Workshop,
)
from hvdtrain.commands.install_horovod.wheel_cache import (
    WheelCache,
)
from hvdtrain.system.machine import frameworks
from hvdtrain.system.machine.toolchain import (
    Cuda,
    Nccl,
    Toolchain,
)

BOTH = BuildTarget(("pytorch", "tensorflow"), "none", 2)


NCCL = BuildTarget(("pytorch",), "nccl", 2)


SHOP = Workshop(Path("/cache/build/k"))


def on_gpu(toolchain: Toolchain) -> Toolchain:
    """Return the toolchain with a CUDA build of PyTorch, a CUDA toolkit, and NCCL."""
    torch = frameworks.Torch("2.13.0", "13.0", "cuda=13.0 commit=abc", toolchain.site_packages)
    include = toolchain.site_packages / "nvidia" / "nccl" / "include"
    nccl = Nccl(include, include.parent / "lib" / "libnccl.so.2", "2.28.3")
    cuda = Cuda(Path("/opt/cuda"), "13.0")
    return dataclasses.replace(toolchain, torch=torch, cuda=cuda, nccl=nccl)


def make_build(toolchain: Toolchain, root: Path) -> build.Build:
    return build.Build(BOTH, toolchain, WheelCache(root), "k", {}, {"PATH": "/usr/bin"})
