"""What a build of Horovod depends on, and the name under which it is cached."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from hvdtrain.environment.recipe import (
    BUILD_TOOLS,
    FLAG_VARIABLES,
    HOROVOD_SHA256,
    RECIPE,
    USER_VARIABLES,
    Target,
    uses_cuda,
)
from hvdtrain.environment.toolchain import Toolchain


def identity(target: Target, toolchain: Toolchain, environ: Mapping[str, str]) -> dict[str, object]:
    """Return everything that the binary depends on, as plain values."""
    mpi, compiler = toolchain.mpi, toolchain.compiler
    torch = toolchain.torch if "pytorch" in target.frameworks else None
    tensorflow = toolchain.tensorflow if "tensorflow" in target.frameworks else None
    cuda = toolchain.cuda if uses_cuda(target, toolchain) else None
    nccl = toolchain.nccl if target.gpu == "nccl" else None
    return {
        "recipe": RECIPE,
        "archive": HOROVOD_SHA256,
        "tools": BUILD_TOOLS,
        "python": toolchain.python_tag,
        "frameworks": sorted(target.frameworks),
        "gpu": target.gpu,
        "torch": f"{torch.version} {torch.identity}" if torch else None,
        "tensorflow": f"{tensorflow.version} cuda={tensorflow.cuda}" if tensorflow else None,
        "mpi": mpi.identity if mpi else None,
        # Inside the environment the place is found relatively, outside it is part of the binary.
        "mpi_place": _mpi_place(toolchain),
        "compiler": compiler.identity if compiler else None,
        "cuda": cuda.version if cuda else None,
        "nccl": nccl.version if nccl else None,
        "cpu": toolchain.cpu_flags,
        "flags": {n: environ[n] for n in (*FLAG_VARIABLES, *USER_VARIABLES) if n in environ},
    }


def _mpi_place(toolchain: Toolchain) -> list[str]:
    """Return the directories of MPI's libraries, relative where they are in the environment."""
    prefix = toolchain.prefix
    paths = toolchain.mpi.libraries if toolchain.mpi else ()
    return [str(p.relative_to(prefix) if p.is_relative_to(prefix) else p) for p in paths]


def cache_key(facts: Mapping[str, object]) -> str:
    """Return the name under which a binary with these facts is cached."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]
