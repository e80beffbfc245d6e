"""Inspection of the requirements of a Horovod build."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.commands.install_horovod import toolchain
from hvdtrain.commands.install_horovod.toolchain import Cuda, Nccl, find_cuda, find_nccl
from hvdtrain.system.machine.frameworks import Torch


def test_mpi_libraries() -> None:
    show = "g++ -I/m/include -L/m/lib -Wl,-rpath -Wl,/m/lib -lmpi"
    assert toolchain.mpi_libraries(show) == (Path("/m/lib"),)


def fake_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nprintf '%s\\n' '{text}'\n")
    path.chmod(0o755)
    return path


def test_mpi_on_path_comes_before_mpi_of_the_environment(tmp_path: Path) -> None:
    ours = fake_program(tmp_path / "env" / "mpicxx", "mpicxx: Open MPI 5.0.11 -L/ours")
    theirs = fake_program(tmp_path / "module" / "mpicxx", "mpicxx: Open MPI 4.1.6 -L/theirs")
    fake_program(tmp_path / "module" / "mpirun", "")
    mpi = toolchain.find_mpi({"PATH": str(theirs.parent)}, ours.parent)
    assert mpi and mpi.mpicxx == theirs and mpi.identity == "Open MPI 4.1.6"
    assert mpi.mpirun == theirs.parent / "mpirun"
    mpi = toolchain.find_mpi({"PATH": "/nowhere"}, ours.parent)
    assert mpi and mpi.mpicxx == ours and mpi.mpirun is None
    assert toolchain.find_mpi({"PATH": "/nowhere"}, tmp_path) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0", 12),
        ("g++ (GCC) 8.5.0 20210514 (Red Hat 8.5.0-4)", 8),
        ("clang version 17.0.6", 17),
        ("strange", 0),
    ],
)
def test_major_version(text: str, expected: int) -> None:
    assert toolchain.major_version(text) == expected


def test_cxx_names_the_compiler(tmp_path: Path) -> None:
    mine = fake_program(tmp_path / "gcc-15", "gcc-15 (GCC) 15.1.0")
    compiler = toolchain.find_compiler({"CXX": f"{mine} -m64", "PATH": "/nowhere"})
    assert compiler and compiler.argv == (str(mine), "-m64") and compiler.major == 15
    assert toolchain.find_compiler({"PATH": "/nowhere"}) is None


def test_cpu_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags\t\t: fpu avx avx2 f16c\n")
    monkeypatch.setattr(toolchain.platform, "machine", lambda: "x86_64")
    assert toolchain.find_cpu_flags(info) == ("-mf16c", "-mavx")
    monkeypatch.setattr(toolchain.platform, "machine", lambda: "aarch64")
    assert toolchain.find_cpu_flags(info) == ()


def toolkit(home: Path, release: str) -> None:
    output = f"Cuda compilation tools, release {release}, V{release}.88\ncompute_80\ncompute_75"
    fake_program(home / "bin" / "nvcc", output)
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime.h").touch()


def test_the_toolkit_of_the_wanted_version(tmp_path: Path) -> None:
    system, site, user = tmp_path / "cuda", tmp_path / "site-packages", tmp_path / "user"
    nowhere = {"PATH": "/nowhere"}
    assert find_cuda(nowhere, site, "13.0", system) is None
    system.mkdir()
    fake_program(system / "bin" / "nvcc", "release 12.9")
    assert find_cuda(nowhere, site, "13.0", system) is None  # no headers
    (system / "bin" / "nvcc").unlink()
    (system / "bin").rmdir()
    toolkit(system, "12.9")
    assert find_cuda(nowhere, site, "13.0", system) == Cuda(system, "12.9", (75, 80))
    package = site / "nvidia" / "cu13"
    toolkit(package, "13.1")
    assert find_cuda(nowhere, site, "13.0", system) == Cuda(package, "13.1", (75, 80))
    assert find_cuda(nowhere, site, "", system) == Cuda(system, "12.9", (75, 80))
    toolkit(user, "12.8")
    cuda = find_cuda({**nowhere, "CUDA_HOME": str(user)}, site, "13.0", system)
    assert cuda == Cuda(user, "12.8", (75, 80))  # the user's choice takes precedence


def nccl_package(site: Path) -> Path:
    package = site / "nvidia" / "nccl"
    (package / "include").mkdir(parents=True)
    (package / "lib").mkdir()
    header = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 28\n#define NCCL_PATCH 3\n"
    (package / "include" / "nccl.h").write_text(header)
    (package / "lib" / "libnccl.so.2").touch()
    return package


def test_nccl_of_torch_is_found_by_its_versioned_name(tmp_path: Path) -> None:
    package = nccl_package(tmp_path)
    nccl = find_nccl({}, None, tmp_path)
    assert nccl == Nccl(package / "include", package / "lib" / "libnccl.so.2", "2.28.3")


def test_nccl_of_a_torch_of_the_systems_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``python -m venv --system-site-packages``: torch's packages are not in our site-packages."""
    package = nccl_package(tmp_path)
    torch = Torch("2.11.0", "13.0", "", tmp_path / "torch")
    monkeypatch.setattr(toolchain, "find_torch", lambda: torch)
    nccl = toolchain.find({"PATH": "/nowhere"}).nccl
    assert nccl == Nccl(package / "include", package / "lib" / "libnccl.so.2", "2.28.3")
