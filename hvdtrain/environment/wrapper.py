"""The script that stands in for the C++ compiler while Horovod is built."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from hvdtrain.environment.toolchain import Toolchain

CXX_STANDARD = "-std=c++20"
NO_XLA_FILE = "*/horovod/tensorflow/xla_mpi_ops.cc"
NO_XLA = "-UTENSORFLOW_VERSION -DTENSORFLOW_VERSION=0"


def relative_rpaths(toolchain: Toolchain) -> tuple[str, ...]:
    """Return where the libraries lie as seen from the compiled module, if in the environment.

    With absolute paths alone a cached wheel would load the MPI of the environment that it was
    built in, which may be another or gone.
    """
    if toolchain.mpi is None:
        return ()
    module = toolchain.site_packages / "horovod" / "torch"
    inside = [p for p in toolchain.mpi.libraries if p.is_relative_to(toolchain.prefix)]
    inside.append(toolchain.site_packages / "nvidia" / "nccl" / "lib")
    return tuple(f"$ORIGIN/{os.path.relpath(path, module)}" for path in inside)


def compiler_wrapper(compiler: Sequence[str], rpaths: Sequence[str]) -> str:
    """Return the shell script that stands in for the C++ compiler.

    Horovod fixes C++14 and C++17 and strips ``-std`` from CXXFLAGS, while PyTorch's headers need
    C++20; the last ``-std`` wins, so it is appended. Not where nvcc calls: it parses what the
    compiler preprocesses by its own idea of the language. ``xla_mpi_ops.cc`` includes headers that
    TensorFlow has moved; as for an ancient TensorFlow the file compiles to nothing. ``-g0`` drops
    120 MB of debugging symbols.
    """
    call = shlex.join(compiler)
    links = " ".join(f"-Wl,-rpath,{shlex.quote(path)}" for path in rpaths)
    return f"""#!/bin/sh
# Made by hvdtrain install-horovod.
standard='{CXX_STANDARD} -g0' links=yes version=
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
