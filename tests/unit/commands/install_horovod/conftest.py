"""A toolchain with which Horovod can be built."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.system.machine import frameworks
from hvdtrain.system.machine.toolchain import Compiler, Mpi, Toolchain


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
        mpi=Mpi(env / "bin" / "mpicxx", "Open MPI 5.0.11", (env / "lib",), env / "bin" / "mpirun"),
        torch=frameworks.Torch("2.13.0+cpu", None, "cuda=None commit=abc", site / "torch"),
        tensorflow=frameworks.TensorFlow("2.21.0", None, site / "tensorflow"),
        cuda=None,
        nccl=None,
        cpu_flags=("-mavx", "-mfma"),
    )
