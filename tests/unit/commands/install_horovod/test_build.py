"""A build, its key, its failures, its log, and the proof of the wheel; no compiler is run."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.commands.install_horovod import build
from hvdtrain.commands.install_horovod.build import (
    decisive_line,
    proof_command,
    prove,
    read_progress,
    read_proof,
    remedy_for,
)
from hvdtrain.commands.install_horovod.plan import InstallOptions, make_plan
from hvdtrain.commands.install_horovod.recipe import BuildTarget
from hvdtrain.commands.install_horovod.toolchain import Cuda, Toolchain
from hvdtrain.commands.install_horovod.verb import Session
from hvdtrain.commands.install_horovod.wheel_cache import WheelCache
from hvdtrain.errors import HvdtrainError
from hvdtrain.system.runtime.command import Command
from tests.unit.commands.install_horovod.conftest import BOTH, NCCL, make_build, on_gpu


def key_of(toolchain: Toolchain, target: BuildTarget = BOTH, **environ: str) -> str:
    return make_build(toolchain, target=target, **environ).key


def test_the_key_depends_on_every_build_fact(toolchain: Toolchain) -> None:
    assert toolchain.torch and toolchain.tensorflow and toolchain.mpi and toolchain.compiler
    change = dataclasses.replace
    machines = [
        toolchain,
        change(toolchain, python_tag="cpython-312-x86_64-linux-gnu"),
        change(toolchain, torch=change(toolchain.torch, version="2.12.0+cpu")),
        change(toolchain, torch=change(toolchain.torch, identity="cuda=None commit=def")),
        change(toolchain, tensorflow=change(toolchain.tensorflow, version="2.20.0")),
        change(toolchain, tensorflow=change(toolchain.tensorflow, cuda="12.5.1")),
        change(toolchain, mpi=change(toolchain.mpi, identity="Open MPI 5.0.10")),
        change(toolchain, mpi=change(toolchain.mpi, libraries=(Path("/opt/lib"),))),
        change(toolchain, compiler=change(toolchain.compiler, identity="g++ 13.1.0")),
        change(toolchain, cpu_flags=()),
        on_gpu(toolchain),
    ]
    keys = [key_of(machine) for machine in machines]
    keys += [
        key_of(on_gpu(toolchain), NCCL),
        key_of(toolchain, BuildTarget(("pytorch",), "none", 2)),
    ]
    keys += [key_of(toolchain, CXXFLAGS="-O1"), key_of(toolchain, HOROVOD_WITH_GLOO="1")]
    assert len(set(keys)) == len(keys)


def test_equal_binaries_have_equal_keys(toolchain: Toolchain) -> None:
    moved = dataclasses.replace(
        toolchain,
        prefix=Path("/elsewhere"),
        python=Path("/elsewhere/bin/python"),
        mpi=dataclasses.replace(toolchain.mpi, libraries=(Path("/elsewhere/lib"),)),  # type: ignore[type-var]
    )
    assert key_of(moved) == key_of(toolchain)
    assert key_of(toolchain, HOROVOD_CYCLE_TIME="0.1", LANG="C") == key_of(toolchain)
    assert key_of(toolchain, BuildTarget(BOTH.frameworks, "none", 9)) == key_of(toolchain)
    # CUDA is not used by the binary
    cuda = dataclasses.replace(toolchain, cuda=Cuda(Path("/opt/cuda"), "12.0"))
    assert key_of(cuda) == key_of(toolchain)


def test_a_cached_archive_is_not_downloaded(toolchain: Toolchain, tmp_path: Path) -> None:
    job = make_build(toolchain, tmp_path)
    assert [name for name, _ in job.steps(False)] == ["build tools", "download", "compile"]
    assert [name for name, _ in job.steps(True)] == ["build tools", "compile"]


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
    line = lines[expected or 0] if not isinstance(expected, str) else expected
    assert decisive_line(lines) == line


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("x: No space left on device", "HVDTRAIN_CACHE"),
        ("g++: fatal error: Killed signal terminated program cc1plus", "--jobs 1"),
        ("a.h:1:2: fatal error: Python.h: No such file", "python3-dev"),
        ("CMake Error: Could NOT find MPI (missing: MPI_CXX_FOUND)", "mpicxx"),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_70'", "--cuda-arch"),
        ("ERROR: No matching distribution toolchain for horovod", "login node"),
        ("CMake Error at x (message): The C++ compiler is not able to compile", "see the log"),
        ("something new", "see the log"),
    ],
)
def test_remedy(line: str, word: str) -> None:
    assert word in remedy_for(line)


def test_progress() -> None:
    line = "  [ 53%] Building CXX object horovod/torch/x.o"
    assert read_progress(line) == ("compile", 0.53)
    assert read_progress("  Running CMake in build/temp:") == ("configure", None)
    assert read_progress("  a.cc:1: warning") is None


def test_a_failed_build_reports_cause_remedy_and_log_and_is_removed(
    toolchain: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_build(toolchain, tmp_path / "cache")
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
    assert job.cache.find(job.key) is None


def test_an_interrupted_build_is_removed(
    toolchain: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_build(toolchain, tmp_path / "cache")

    def interrupted(self: build.Build, has_archive: bool) -> list[tuple[str, Command]]:
        raise KeyboardInterrupt

    monkeypatch.setattr(build.Build, "steps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        job.run(tmp_path / "log")
    assert not job.workshop.root.exists()


@pytest.mark.parametrize(
    ("code", "need"), [(errno.ENOSPC, "with 2 GB free"), (errno.EACCES, "that is writable")]
)
def test_free_space_is_advised_only_if_it_helps(
    code: int, need: str, toolchain: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: build.Build, log_file: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(build.Build, "run", fails)
    plan = make_plan(toolchain, InstallOptions())
    message = rf"^{tmp_path}: .*; set HVDTRAIN_CACHE to a directory {need}$"
    with pytest.raises(HvdtrainError, match=message):
        Session(toolchain, plan, WheelCache(tmp_path), {}).install()


def test_an_unwritable_cache_is_reported(toolchain: Toolchain, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    plan = make_plan(toolchain, InstallOptions())
    with pytest.raises(HvdtrainError, match=f"^{tmp_path}/file.*HVDTRAIN_CACHE"):
        Session(toolchain, plan, WheelCache(tmp_path / "file"), {}).install()


def test_proof_command(toolchain: Toolchain) -> None:
    assert toolchain.mpi
    environ = {"HOROVOD_TIMELINE": "x", "PATH": "/bin"}
    command = proof_command("pytorch", toolchain.mpi, Path("/py"), Path("/aside"), "none", environ)
    assert command.argv[:4] == (str(toolchain.mpi.mpirun), "-n", "2", "--oversubscribe")
    assert command.argv[4:6] == ("/py", "-P")
    assert command.argv[-3:] == ("pytorch", "2", "/aside")
    assert command.env == {
        "HOROVOD_TIMELINE": None,
        "CUDA_VISIBLE_DEVICES": "",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    mpich = dataclasses.replace(toolchain.mpi, identity="MPICH 4.2")
    command = proof_command("pytorch", mpich, Path("/py"), Path("/aside"), "nccl", {})
    assert "--oversubscribe" not in command.argv
    assert command.env == {}


def test_read_proof() -> None:
    answer = {"ok": True, "size": 2, "max_error": 0.0, "device": "cpu"}
    assert read_proof(f"a warning\n{{broken\n{json.dumps(answer)}\n") == answer
    assert read_proof("nothing") == {}


@pytest.mark.parametrize(
    "script",
    [
        "exit 3",  # the ranks fail
        "true",  # they end without a result
        """echo '{"ok": false, "size": 1, "max_error": 0.0}'""",  # two separate trainings
    ],
)
def test_a_failed_proof_is_an_error_with_its_log(script: str, tmp_path: Path) -> None:
    with pytest.raises(HvdtrainError, match=r"proof for pytorch failed.*log: "):
        prove([("pytorch", Command(("sh", "-c", script)))], tmp_path / "log")
    assert "$ sh -c" in (tmp_path / "log").read_text()


def test_a_successful_proof_returns_the_result(tmp_path: Path) -> None:
    command = Command(("echo", '{"ok": true, "size": 2, "max_error": 0.0, "device": "cpu"}'))
    answers = prove([("pytorch", command)], tmp_path / "log")
    assert answers["pytorch"]["size"] == 2


def fake_horovod(site: Path, text: str, wheel_sha: str = "abc") -> None:
    """Create the files of an installed Horovod, as pip does."""
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


def test_an_installed_wheel_is_identified_by_its_hash(tmp_path: Path) -> None:
    assert build.find_installed(tmp_path) is None
    assert build.wheel_hash(None) is None
    fake_horovod(tmp_path, "lib", "abc")
    distribution = build.find_installed(tmp_path)
    assert build.wheel_hash(distribution) == "abc"
    assert build.is_complete(distribution)
    (tmp_path / "horovod" / "lib.so").write_text("cut")
    assert build.is_complete(build.find_installed(tmp_path))
    (tmp_path / "horovod" / "lib.so").write_text("x")
    assert not build.is_complete(build.find_installed(tmp_path))


def test_pip_removes_the_repair_of_torchvision_with_horovod(tmp_path: Path) -> None:
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
    for _ in range(2):  # idempotent
        build.mend_torchvision(site)
    assert build.is_complete(build.find_installed(site))
    assert len((info / "RECORD").read_text().splitlines()) == 5
    query = (
        "import sys; print([n for n in sys.modules if n.split('_')[0] in ('hvdtrain', 'torch')])"
    )
    result = subprocess.run([python, "-c", query], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("['hvdtrain_torchvision']\n", "")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "uninstall", "-yq", "horovod"]
    subprocess.run(pip, check=True, timeout=60)
    assert {path.name for path in site.iterdir()} - {"__pycache__"} == {"other.py"}
    result = subprocess.run([python, "-c", query], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")
