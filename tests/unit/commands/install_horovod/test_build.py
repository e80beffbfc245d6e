"""A build, its failures, its log, and the proof of the wheel; no compiler is run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hvdtrain.commands.install_horovod import build, wheel_cache
from hvdtrain.commands.install_horovod.build import (
    decisive_line,
    proof_command,
    prove,
    read_progress,
    read_proof,
    remedy_for,
)
from hvdtrain.commands.install_horovod.toolchain import Toolchain
from hvdtrain.errors import HvdtrainError
from hvdtrain.system.runtime.command import Command
from tests.unit.commands.install_horovod.conftest import make_build


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
    assert wheel_cache.WheelCache(tmp_path / "cache").find("k") is None


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
