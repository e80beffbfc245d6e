"""The MPI library of a process and the GPUs of a machine, without MPI and without a framework."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hvdtrain.system.machine import gpus, mpi_library
from hvdtrain.system.machine.mpi_library import MpiLibrary, mapped, matching_mpirun, mpi_identity

ROW = "7f0000000000-7f0000001000 r-xp 00000000 fe:00 1234                       {}"


LIBRARIES = (
    "libmpi.so.40 libmpi.so.40.30.4 libmpi.so.12 libmpich.so.12 libmpi_cray.so.12 libmpi_abi.so.1 "
    "libmpi_gnu_91.so.12.0.0"
)
# For Fortran, C++ or GPU transport, or no library of MPI.
OTHERS = (
    "libmpi_mpifh.so.40 libmpi_usempif08.so.40 libmpi_cxx.so.40 libmpicxx.so.12 libmpifort.so.12 "
    "libmpi_gtl_cuda.so.0 mpi_lib_v2.cpython-311-x86_64-linux-gnu.so libmpirtlib.so"
)


@pytest.mark.parametrize("name", f"{LIBRARIES} {OTHERS}".split())
def test_mpi_libraries_are_recognized_by_name(name: str) -> None:
    path = f"/opt/my mpi/lib/{name}"
    assert mapped(ROW.format(path)) == ((path,) if name in LIBRARIES.split() else ())


def test_libraries_are_listed_once_in_order() -> None:
    rows = [ROW.format(path) for path in ("/b/libmpi.so.40", "/a/libmpi.so.12", "/b/libmpi.so.40")]
    rows += ["7ffd0000-7ffd1000 rw-p 00000000 00:00 0                          [stack]", ""]
    rows += ["7f0000002000-7f0000003000 rw-p 00000000 00:00 0"]
    assert mapped("\n".join(rows)) == ("/a/libmpi.so.12", "/b/libmpi.so.40")


def test_no_mpi_library_is_loaded() -> None:
    assert mpi_library.loaded() == ()  # unit tests use no MPI
    assert mpi_library.identity("/nonexistent/libmpi.so") == "unknown MPI"
    assert mpi_library.identity("libc.so.6") == "unknown MPI"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Open MPI v5.0.11, package: Open MPI user@localhost, ident: 5.0.11", "Open MPI 5.0.11"),
        ("MPICH Version:      5.0.2\nMPICH Release date: x", "MPICH 5.0.2"),
        ("Intel(R) MPI Library 2021.11 for Linux* OS", "Intel MPI 2021.11"),
        ("MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)", "Cray MPICH 8.1.28.29"),
        ("MVAPICH2 Version      :\t2.3.7", "MVAPICH 2.3.7"),
        ("mpicxx: Open MPI 5.0.11 (Language: C++)", "Open MPI 5.0.11"),
        ("mpicxx for MPICH version 4.0.2", "MPICH 4.0.2"),
        ("mpigxx for the Intel(R) MPI Library 2021.12 for Linux*", "Intel MPI 2021.12"),
        ("something else", "unknown MPI"),
    ],
)
def test_identity_from_the_version_text(text: str, expected: str) -> None:
    assert mpi_identity(text) == expected


@pytest.mark.parametrize("folder", ["lib", "lib64", "lib/x86_64-linux-gnu", "lib/gcc/openmpi/lib"])
def test_the_launcher_of_a_library(tmp_path: Path, folder: str) -> None:
    library = MpiLibrary(str(tmp_path / folder / "libmpi.so.40"), "Open MPI 5")
    assert matching_mpirun(library) in ("", "/usr/bin/mpirun", "/bin/mpirun")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpirun").touch()
    assert matching_mpirun(library) == str(tmp_path / "bin" / "mpirun")


# A stub of NVIDIA's driver (cuda.h) with two GPUs.
DRIVER = """
#include <string.h>
typedef struct { char bytes[16]; } CUuuid;
int cuInit(unsigned flags) { return flags ? 1 : STATUS; }
int cuDriverGetVersion(int *version) { *version = 13020; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 10 + ordinal; return 0; }
int cuDeviceGetName(char *to, int length, int device) { strncpy(to, "Test GPU", length); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 80ul << 30; return 0; }
int cuDeviceGetAttribute(int *to, int which, int device) {
  *to = which == 75 ? 9 : device - 10;
  return 0;
}
int UUID(CUuuid *uuid, int device) { memset(uuid->bytes, device, 16); return 0; }
"""


def build_driver(folder: Path, *flags: str) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: apt-get install gcc")
    (folder / "driver.c").write_text(DRIVER)
    library = folder / "libcuda.so"
    line = [compiler, "-shared", "-fPIC", *flags, str(folder / "driver.c"), "-o", str(library)]
    subprocess.run(line, check=True, timeout=60)
    return str(library)


@pytest.mark.parametrize("function", ["cuDeviceGetUuid_v2", "cuDeviceGetUuid"])
def test_the_gpus_of_a_driver(tmp_path: Path, function: str) -> None:
    driver = gpus.find_driver(build_driver(tmp_path, "-DSTATUS=0", f"-DUUID={function}"))
    assert driver is not None
    assert driver.cuda == "13.2"
    assert [gpu.uuid for gpu in driver.gpus] == [
        "GPU-0a0a0a0a-0a0a-0a0a-0a0a-0a0a0a0a0a0a",
        "GPU-0b0b0b0b-0b0b-0b0b-0b0b-0b0b0b0b0b0b",
    ]
    assert {(gpu.name, gpu.memory) for gpu in driver.gpus} == {("Test GPU", 80 << 30)}
    assert [gpu.capability for gpu in driver.gpus] == [90, 91]


def test_a_driver_without_a_usable_gpu(tmp_path: Path) -> None:
    library = build_driver(tmp_path, "-DSTATUS=100", "-DUUID=cuDeviceGetUuid")
    assert gpus.find_driver(library) is None
    assert gpus.find_driver("libnonexistent.so.1") is None


def test_gpus_without_a_driver_are_identified_by_selection_and_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus, "find_driver", lambda: None)
    chosen = gpus.identities(2, {"CUDA_VISIBLE_DEVICES": "2,3"})
    assert chosen == ["CUDA_VISIBLE_DEVICES=2,3, number 0", "CUDA_VISIBLE_DEVICES=2,3, number 1"]
    assert gpus.identities(1, {}) == ["all GPUs, number 0"]
