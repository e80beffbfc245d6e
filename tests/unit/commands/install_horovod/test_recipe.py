"""The environment and the commands of a build, and its compiler wrapper."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.commands.install_horovod import recipe
from hvdtrain.commands.install_horovod.build import complete_toolkit
from hvdtrain.commands.install_horovod.recipe import BuildTarget, compiler_wrapper, relative_rpaths
from hvdtrain.commands.install_horovod.toolchain import BuildMpi, Cuda, Nccl, Toolchain
from hvdtrain.system.runtime.command import Command
from tests.unit.commands.install_horovod.conftest import BOTH, NCCL, SHOP, make_build, on_gpu


def test_build_environment_on_cpu(toolchain: Toolchain) -> None:
    environ = {"PATH": "/usr/bin", "PYTHONPATH": "/mine"}
    changes = recipe.build_environment(BOTH, toolchain, SHOP, environ)
    external = toolchain.site_packages / "tensorflow" / "include" / "external"
    assert changes == {
        "PATH": f"{toolchain.prefix}/bin:/usr/bin",
        "PYTHONPATH": "/cache/build/k/tools:/cache/build/k/start:/mine",
        "TMPDIR": "/cache/build/k/tmp",
        "CXX": "/cache/build/k/c++",
        "CPLUS_INCLUDE_PATH": "/usr/include/python3.11:"
        f"{external}/highwayhash:{external}/farmhash_archive/src",
        "HOROVOD_CMAKE": "/cache/build/k/tools/cmake/data/bin/cmake",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "MAKEFLAGS": "-j2",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITHOUT_GLOO": "1",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_BUILD_ARCH_FLAGS": "-mavx -mfma",
        "CUDACXX": "/cache/build/k/nothing/nvcc",
        "CUDAToolkit_ROOT": "/cache/build/k/nothing",
        "NVCC_APPEND_FLAGS": "-allow-unsupported-compiler",
    }


def test_the_systems_mpi_is_first_on_the_path(toolchain: Toolchain) -> None:
    mpi = BuildMpi(Path("/opt/mpi/bin/mpicxx"), "Open MPI 4.1.6", (Path("/opt/mpi/lib"),), None)
    changed = dataclasses.replace(toolchain, mpi=mpi)
    changes = recipe.build_environment(BOTH, changed, SHOP, {"PATH": "/usr/bin"})
    assert changes["PATH"] == f"/opt/mpi/bin:{toolchain.prefix}/bin:/usr/bin"


def test_one_framework_excludes_the_other(toolchain: Toolchain) -> None:
    changes = recipe.build_environment(BuildTarget(("pytorch",), "none", 1), toolchain, SHOP, {})
    assert changes["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert "HOROVOD_WITH_TENSORFLOW" not in changes
    assert changes["CPLUS_INCLUDE_PATH"] == "/usr/include/python3.11"


def test_gloo_is_built_on_request(toolchain: Toolchain) -> None:
    environ = {"HOROVOD_WITH_GLOO": "1", "HOROVOD_WITHOUT_GLOO": "1"}
    build = Command(("x",), recipe.build_environment(BOTH, toolchain, SHOP, environ))
    inside = build.environ(environ)
    assert inside["HOROVOD_WITH_GLOO"] == "1"
    assert "HOROVOD_WITHOUT_GLOO" not in inside


def test_settings_of_a_training_and_of_an_outer_make_are_unset(toolchain: Toolchain) -> None:
    environ = {
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_SKIP_COMPILE": "1",
        "HOROVOD_GPU_OPERATIONS": "MPI",
        "CCL_ROOT": "/opt/ccl",
        "MAKELEVEL": "1",
        "MAKEFLAGS": "w",
        "CUDA_HOME": "/opt/cuda",
        "HOROVOD_BUILD_ARCH_FLAGS": "-mavx2",
    }
    result = Command(("x",), recipe.build_environment(BOTH, toolchain, SHOP, environ))
    inside = result.environ(environ)
    for name in ("HOROVOD_TIMELINE", "HOROVOD_SKIP_COMPILE", "HOROVOD_GPU_OPERATIONS"):
        assert name not in inside
    for name in ("CCL_ROOT", "MAKELEVEL", "CUDA_HOME"):
        assert name not in inside
    assert inside["MAKEFLAGS"] == "-j2"
    assert inside["HOROVOD_BUILD_ARCH_FLAGS"] == "-mavx2"


def test_nccl_environment(toolchain: Toolchain) -> None:
    machine = on_gpu(toolchain)
    changes = recipe.build_environment(NCCL, machine, SHOP, {})
    assert changes["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert changes["HOROVOD_CUDA_HOME"] == changes["CUDA_HOME"] == "/opt/cuda"
    assert changes["HOROVOD_NCCL_INCLUDE"] == f"{machine.site_packages}/nvidia/nccl/include"
    assert changes["HOROVOD_NCCL_LIB"] == "/cache/build/k/nccl"
    assert changes["HOROVOD_NCCL_LINK"] == "SHARED"
    assert "CUDACXX" not in changes
    assert "HOROVOD_BUILD_CUDA_CC_LIST" not in changes
    two = dataclasses.replace(NCCL, cuda_arches=(80, 90))
    changes = recipe.build_environment(two, machine, SHOP, {})
    assert changes["HOROVOD_BUILD_CUDA_CC_LIST"] == "80,90"
    assert make_build(machine, target=two).facts["cuda"] == ["13.0", "/opt/cuda", 80, 90]


@pytest.mark.parametrize(("version", "package"), [("13.0", "cu13"), ("12.8", "cuda_runtime")])
def test_pytorchs_cuda_libraries_are_found_without_the_toolkit(
    toolchain: Toolchain, version: str, package: str
) -> None:
    machine = dataclasses.replace(on_gpu(toolchain), cuda=Cuda(Path("/opt/cuda"), version))
    assert relative_rpaths(machine)[-1] == f"$ORIGIN/../../nvidia/{package}/lib"


def test_a_toolkit_of_packages_gets_linker_names(toolchain: Toolchain, tmp_path: Path) -> None:
    home = toolchain.site_packages / "nvidia" / "cu13"
    for name in ("bin/nvcc", "bin/crt/link.stub", "lib/libcudart.so.13", "lib/libcudart_static.a"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(name)
    machine = dataclasses.replace(on_gpu(toolchain), cuda=Cuda(home, "13.0"))
    changes = recipe.build_environment(NCCL, machine, SHOP, {})
    assert changes["HOROVOD_CUDA_HOME"] == "/cache/build/k/cuda"
    assert str(changes["PATH"]).startswith("/cache/build/k/cuda/bin:")  # its nvcc is queried
    assert relative_rpaths(machine)[-1] == "$ORIGIN/../../nvidia/cu13/lib"
    assert make_build(machine, target=NCCL).facts["cuda"] == ["13.0", "package"]
    folder = tmp_path / "cuda"
    complete_toolkit(home, folder)
    assert (folder / "bin" / "nvcc").read_text() == "bin/nvcc"
    assert (folder / "bin" / "crt" / "link.stub").is_file()
    assert (folder / "bin" / ".." / "lib64" / "libcudart_static.a").is_file()  # nvcc's search path
    assert (folder / "lib" / "libcudart.so").read_text() == "lib/libcudart.so.13"
    assert {path.name for path in (folder / "lib64").iterdir()} == {
        *("libcudart.so", "libcudart.so.13", "libcudart_static.a")
    }


def test_without_gpu_operations_pytorch_reports_no_cuda(
    toolchain: Toolchain, tmp_path: Path
) -> None:
    changes = recipe.build_environment(BOTH, on_gpu(toolchain), SHOP, {})
    assert not [name for name in changes if name.startswith("HOROVOD_") and "CUDA" in name]
    folder = tmp_path / "torch" / "utils"
    folder.mkdir(parents=True)
    for module in (folder.parent / "__init__.py", folder / "__init__.py"):
        module.touch()
    (folder / "cpp_extension.py").write_text("CUDA_HOME = ROCM_HOME = '/usr/local/cuda'")
    query = "from torch.utils import cpp_extension as c; print(c.CUDA_HOME, c.ROCM_HOME)"

    def cuda_and_rocm() -> str:
        environ = {"PYTHONPATH": str(tmp_path)}
        result = subprocess.run([sys.executable, "-c", query], env=environ, capture_output=True)
        return result.stdout.decode().strip()

    assert cuda_and_rocm() == "/usr/local/cuda /usr/local/cuda"
    (tmp_path / "sitecustomize.py").write_text(recipe.NO_GPU)
    assert cuda_and_rocm() == "None None"


def test_the_archive_is_pinned_by_version_and_hash() -> None:
    assert recipe.REQUIREMENT == (
        "horovod==0.28.1 --hash=sha256:"
        "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0\n"
    )
    command = recipe.download_command(Path("/py"), SHOP, {})
    assert "--require-hashes" in command.argv
    assert "--no-deps" in command.argv


def test_only_the_wheel_is_installed() -> None:
    argv = recipe.install_command(Path("/py"), Path("/w.whl")).argv
    assert argv[:4] == ("/py", "-m", "pip", "--disable-pip-version-check")
    assert {"--no-deps", "--no-index", "--force-reinstall"} < set(argv)
    assert argv[-1] == "/w.whl"
    assert "--target" not in argv
    aside = recipe.install_command(Path("/py"), Path("/w.whl"), Path("/aside")).argv
    assert aside[-3:] == ("--target", "/aside", "/w.whl")


def wrapped(tmp_path: Path, *arguments: str, rpaths: tuple[str, ...] = ()) -> list[str]:
    """Run the wrapper with a compiler that prints its arguments; return them."""
    echo = tmp_path / "my compiler"
    echo.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    echo.chmod(0o755)
    script = tmp_path / "wrapper"
    script.write_text(compiler_wrapper([str(echo)], rpaths))
    script.chmod(0o755)
    result = subprocess.run(
        [script, *arguments], capture_output=True, text=True, check=True, timeout=20
    )
    return result.stdout.splitlines()


def test_the_wrapper_overrides_the_standard(tmp_path: Path) -> None:
    seen = wrapped(tmp_path, "-std=c++14", "-c", "a b.cc")
    assert seen[:3] == ["-std=c++14", "-c", "a b.cc"]
    assert seen[-2:] == ["-std=c++20", "-g0"]


def test_the_wrapper_includes_what_horovod_uses_without_including_it(tmp_path: Path) -> None:
    """As of GCC 13 the standard headers that Horovod includes do not."""
    source, script = tmp_path / "source.cc", tmp_path / "wrapper"
    source.write_text("std::string name(std::uint8_t);\n")
    script.write_text(compiler_wrapper(["c++"], ()))
    script.chmod(0o755)
    subprocess.run([script, "-c", source, "-o", tmp_path / "object.o"], check=True, timeout=60)


def test_the_wrapper_disables_xla_for_one_file(tmp_path: Path) -> None:
    off = ["-UTENSORFLOW_VERSION", "-DTENSORFLOW_VERSION=0"]
    assert wrapped(tmp_path, "-c", "/s/horovod/tensorflow/xla_mpi_ops.cc")[-2:] == off
    assert off[0] not in wrapped(tmp_path, "-c", "/s/horovod/tensorflow/mpi_ops.cc")


def test_the_wrapper_keeps_nvccs_standard(tmp_path: Path) -> None:
    seen = wrapped(tmp_path, "-std=c++11", "-E", "-D__CUDACC__", "k.cu")
    assert seen == ["-std=c++11", "-E", "-D__CUDACC__", "k.cu"]


def test_the_wrapper_links_relative_to_the_module(tmp_path: Path, toolchain: Toolchain) -> None:
    rpaths = relative_rpaths(toolchain)
    assert rpaths[0] == "$ORIGIN/../../../.."
    seen = wrapped(tmp_path, "-shared", "a.o", rpaths=rpaths)
    assert seen[0] == "-Wl,-rpath,$ORIGIN/../../../.."
    assert not [a for a in wrapped(tmp_path, "-c", "a.cc", rpaths=rpaths) if "rpath" in a]


def test_the_systems_mpi_is_not_linked_relatively(toolchain: Toolchain) -> None:
    mpi = dataclasses.replace(toolchain.mpi, libraries=(Path("/opt/mpi/lib"),))  # type: ignore[type-var]
    rpaths = relative_rpaths(dataclasses.replace(toolchain, mpi=mpi))
    assert rpaths == ("$ORIGIN/../../nvidia/nccl/lib",)


def test_an_nccl_outside_the_environment_is_linked_by_its_path(toolchain: Toolchain) -> None:
    folder = Path("/usr/lib/python3/dist-packages/nvidia/nccl")
    nccl = Nccl(folder / "include", folder / "lib" / "libnccl.so.2", "2.28.9")
    machine = dataclasses.replace(on_gpu(toolchain), nccl=nccl)
    assert relative_rpaths(machine)[-1] == str(folder / "lib")
    assert make_build(machine, target=NCCL).facts["nccl"] == ["2.28.9", str(folder / "lib")]
    system = Nccl(Path("/usr/include"), Path("/usr/lib/x86_64-linux-gnu/libnccl.so.2"), "2.28.9")
    machine = dataclasses.replace(machine, nccl=system)
    assert relative_rpaths(machine)[-1].startswith("$ORIGIN")
    assert make_build(machine, target=NCCL).facts["nccl"] == ["2.28.9", ""]
