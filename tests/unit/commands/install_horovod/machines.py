"""Machines and builds that the tests share."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hvdtrain.commands.install_horovod import build
from hvdtrain.commands.install_horovod.recipe import (
    Target,
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

BOTH = Target(("pytorch", "tensorflow"), "none", 2)


NCCL = Target(("pytorch",), "nccl", 2)


SHOP = Workshop(Path("/cache/build/k"))


def on_gpu(found: Toolchain) -> Toolchain:
    """The same machine with a CUDA build of PyTorch, a toolkit, and NCCL."""
    torch = frameworks.Torch("2.13.0", "13.0", "cuda=13.0 commit=abc", found.site_packages)
    include = found.site_packages / "nvidia" / "nccl" / "include"
    nccl = Nccl(include, include.parent / "lib" / "libnccl.so.2", "2.28.3")
    cuda = Cuda(Path("/opt/cuda"), "13.0")
    return dataclasses.replace(found, torch=torch, cuda=cuda, nccl=nccl)


def make_build(found: Toolchain, root: Path) -> build.Build:
    return build.Build(BOTH, found, WheelCache(root), "k", {}, {"PATH": "/usr/bin"})
