"""Shared by all tests: running real commands, and locating the datasets."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvdtrain.errors import HvdtrainError, UsageError

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
BIN = Path(sys.executable).parent
LONG = os.environ.get("HVDTRAIN_LONG") == "1"
"""Run all cases with all models; otherwise those that two slow cores run in half an hour."""
on_demand = pytest.mark.skipif(not LONG, reason="HVDTRAIN_LONG=1 runs it")

# Unset, as for users: with it, tests would not detect output lost when a process exits at once.
os.environ.pop("PYTHONUNBUFFERED", None)
# Processes started in the background by a shell ignore Ctrl-C, and so would those of the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Prefixes of variables set by a test runner or an outer mpirun, removed for tests.
_FOREIGN = ("OMPI_", "PMIX_", "PRTE_", "HOROVOD_", "OMP_", "SLURM_", "PBS_", "PYTHONDONTWRITE")


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of a run: root and oversubscription allowed, plus ``extra``."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    kept["PATH"] = f"{BIN}{os.pathsep}{kept.get('PATH', '')}"
    kept["OMPI_ALLOW_RUN_AS_ROOT"] = kept["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    # Without a suitable network card Open MPI 5 unloads it and sleeps 1 s in each MPI_Init.
    kept["OMPI_MCA_btl"] = "^ofi"
    kept["PYTHONPATH"] = str(ROOT)
    return {**kept, **extra}


def unmeasured() -> dict[str, str]:
    """Return the environment of a run without coverage.

    Coverage fails if a signal raises an exception in its code (its lock stays locked), or if two
    threads end the process at once (both save, and it crashes).
    """
    return {k: v for k, v in environment().items() if not k.startswith("COVERAGE_")}


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> list[str]:
        """Return the lines of hvdtrain on standard error."""
        return [line for line in self.err.splitlines() if line.startswith("hvdtrain:")]


def end_session(leader: int) -> None:
    """Kill all processes of a session: mpirun starts each rank in a new process group."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)


def begin(
    command: list[str], extra: Mapping[str, str] | None = None, **more: Any
) -> subprocess.Popen[str]:
    """Start ``command`` without waiting; standard output and error are one stream."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(**(extra or {})),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **more,
    )


def ended(process: subprocess.Popen[str], code: int, *, seconds: float = 120) -> str:
    """Wait for the end of ``process``, which must have this exit code; return its output."""
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == code, output
    return output


def run(
    command: list[str],
    *,
    cwd: Path = ROOT,
    timeout: float = 240,
    code: int | None = None,
    **extra: str,
) -> Outcome:
    """Run ``command`` in a new session; after the timeout kill the session and fail.

    With ``code`` also fail, and show the output, if that is not the exit code.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(**extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end_session(process.pid)
        out, err = process.communicate()
        pytest.fail(f"{' '.join(command)} hung for {timeout} s\n{out[-2000:]}\n{err[-2000:]}")
    finally:
        end_session(process.pid)
    outcome = Outcome(process.returncode, out, err)
    assert code in (None, outcome.code), f"exit code {outcome.code}\n{out[-3000:]}\n{err[-3000:]}"
    return outcome


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system of this ``size`` (of ``mount``) at a folder, or skip the test."""
    folder.mkdir(exist_ok=True)
    done = run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)])
    if done.code:
        pytest.skip(f"no file system can be mounted here: {done.err.strip()}")
    try:
        yield folder
    finally:
        assert run(["umount", "--lazy", str(folder)]).code == 0


def executable(path: Path, text: str) -> Path:
    """Write a program; return its path."""
    path.write_bytes(os.fsencode(text))
    path.chmod(0o755)
    return path


def until(
    happened: Callable[[], object],
    process: subprocess.Popen[str] | None = None,
    *,
    seconds: float = 120,
    detail: Callable[[], object] = lambda: "it did not happen",
) -> None:
    """Wait until something happens, while ``process`` runs; fail after so many ``seconds``."""
    end = time.monotonic() + seconds
    while not happened():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, detail()
        time.sleep(0.05)


def ranks(number: int, *arguments: str, **how: Any) -> Outcome:
    """``run`` ``python *arguments`` on ``number`` ranks under the mpirun of this environment."""
    mpirun = [str(BIN / "mpirun"), "--oversubscribe", "-n", str(number), sys.executable]
    return run([*mpirun, *arguments], **how)


Ranks = Callable[..., Outcome]


def error_of(
    function: Callable[..., object],
    *arguments: Any,
    kind: type[HvdtrainError] = UsageError,
    **more: Any,
) -> str:
    """Return the error of ``kind`` that ``function`` raises, which is one line."""
    with pytest.raises(kind) as caught:
        function(*arguments, **more)
    (line,) = str(caught.value).splitlines()
    return line


def flipped(data: bytes, offset: int, mask: int = 1) -> bytes:
    """Return ``data`` with other bits, those of ``mask``, in a byte."""
    return data[:offset] + bytes([data[offset] ^ mask]) + data[offset + 1 :]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run unit tests first, as they are fastest."""
    items.sort(key=lambda item: "unit" not in item.path.parts)


@pytest.fixture(scope="session", autouse=True)
def _resident_processes() -> Iterator[None]:
    """End resident processes of the tests at the end of the session."""
    yield
    if resident := sys.modules.get("tests.parallel.resident"):
        resident.end_all()


@pytest.fixture(scope="session")
def mnist() -> Path:
    """Return the directory of MNIST."""
    return _shared("mnist")


@pytest.fixture(scope="session")
def imagenette() -> Path:
    """Return the directory of 520 JPEGs."""
    return _shared("imagenette-mini")


def _shared(name: str) -> Path:
    directory = SHARED / "data" / name
    if not directory.is_dir():
        pytest.skip(f"../shared/data/{name} is not beside this clone")
    return directory


@pytest.fixture(scope="session")
def mpich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the root of an MPI other than Horovod's: MPICH, from its wheel."""
    folder = tmp_path_factory.mktemp("mpich")
    line = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder)]
    done = subprocess.run([*line, "mpich"], capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"MPICH's wheel cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    with zipfile.ZipFile(next(folder.glob("mpich-*.whl"))) as wheel:
        wheel.extractall(folder)
    root = next(folder.glob("mpich-*.data")) / "data"
    for program in (root / "bin").iterdir():
        program.chmod(0o755)
    return root
