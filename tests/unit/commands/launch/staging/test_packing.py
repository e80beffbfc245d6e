"""An environment is packed, works elsewhere without the original, and ranks start from there."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.commands.launch import staging
from hvdtrain.commands.launch.argv import Launch
from hvdtrain.commands.launch.hosts import Host, RankLayout
from hvdtrain.commands.launch.launcher_choice import MpiLauncher
from hvdtrain.commands.launch.staging import (
    HOLD,
    StagedEnvironment,
    members,
    packed,
    staged,
)
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.runtime.command import Command, CommandResult
from hvdtrain.system.runtime.scratch import LOCK, _is_unlocked, clear_leftovers
from hvdtrain.system.runtime.spawn import StopSignals
from tests.conftest import until
from tests.environments import PACKAGES, PYTHON, copied, make_environment


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """An environment of one module."""
    return make_environment(tmp_path / "conda")


def listed(prefix: Path) -> tuple[set[str], dict[str, str]]:
    """Return the files of an archive, and its links with their targets."""
    found = [member for member, _ in members(prefix)]
    links = {member.name: member.linkname for member in found if member.issym()}
    return {member.name for member in found if member.isreg()}, links


def refusal(prefix: Path, cache: Path) -> str:
    """Return why an environment cannot be packed, after which there is no archive."""
    with pytest.raises(UsageError) as caught, packed(prefix, cache):
        pass
    assert not cache.is_dir() or not list(cache.iterdir())
    return str(caught.value)


def make_venv(tmp_path: Path) -> Path:
    """Create a virtual environment with a module, a script, an editable project, and links."""
    folder, project = tmp_path / "venv", tmp_path / "project"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = folder / PACKAGES
    (packages / "module.py").write_text("HERE = __file__\n")
    project.mkdir()
    (project / "edited.py").write_text("HERE = __file__\n")
    (packages / "project.pth").write_text(f"{project}\n")  # an editable install
    (folder / "bin" / "script").write_text(
        "import json, os, ssl, sys, sysconfig, edited, module\n"
        "paths = [module.HERE, edited.HERE, os.__file__, sysconfig.get_path('include')]\n"
        "print(json.dumps([sys.prefix, *paths]))\n"
    )
    (tmp_path / "elsewhere.txt").write_text("content")
    (packages / "data.txt").symlink_to(tmp_path / "elsewhere.txt")
    (packages / "same.py").symlink_to(packages / "module.py")
    (packages / "folder").symlink_to(project)
    return folder


def test_the_copy_works_without_the_original(tmp_path: Path) -> None:
    venv = make_venv(tmp_path)
    of_system = "home = /usr" in (venv / "pyvenv.cfg").read_text()
    copy = copied(venv, tmp_path)
    shutil.rmtree(venv)
    (tmp_path / "elsewhere.txt").unlink()
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    line = [str(copy / "bin" / "python"), str(copy / "bin" / "script")]
    output = subprocess.run(line, env=clean, capture_output=True, text=True, check=True).stdout
    prefix, module, edited, library, headers = map(Path, json.loads(output))
    assert prefix == copy
    assert module == copy / PACKAGES / "module.py"
    assert edited == tmp_path / "project" / "edited.py"
    assert (copy / PACKAGES / "data.txt").read_text() == "content"
    assert not (copy / PACKAGES / "data.txt").is_symlink()
    assert (copy / PACKAGES / "same.py").readlink() == Path("module.py")
    assert (copy / PACKAGES / "folder").readlink() == tmp_path / "project"
    assert library.is_relative_to(copy) is not of_system
    assert (headers / "Python.h").exists()  # Triton compiles with it


def test_files_keep_their_times_and_modes(prefix: Path, tmp_path: Path) -> None:
    """Bytecode counts if the time of the source is the one in it."""
    file = prefix / "bin" / "tool"
    file.touch()
    file.chmod(0o2775)
    os.utime(file, (1_000_000, 1_000_000))
    status = (copied(prefix, tmp_path) / "bin" / "tool").stat()
    assert (status.st_mtime, status.st_mode & 0o7777) == (1_000_000, 0o755)


def test_caches_and_other_environments_of_conda_are_links(prefix: Path) -> None:
    for name in ("envs/other/file", "lib/envs/file", "pkgs/file"):
        (prefix / name).parent.mkdir(parents=True)
        (prefix / name).touch()
    (prefix / "linked").symlink_to(prefix / "pkgs" / "file")
    files, links = listed(prefix)
    assert files == {"lib/envs/file", f"{PACKAGES}/module.py"}
    own = {name: str(prefix / name) for name in ("envs", "pkgs")}
    assert links == {**own, "linked": "pkgs/file"}


def test_of_an_interpreter_its_standard_library_is_copied(tmp_path: Path) -> None:
    """All else in its directory, which may be large and of any name, is there by links."""
    base, prefix = tmp_path / os.fsdecode(b"caf\xe9"), tmp_path / "venv"
    whole = [f"bin/{PYTHON}", f"lib/{PYTHON}/os.py", f"lib/{PYTHON}/lib-dynload/_ssl.so"]
    linked = ["bin/tool", "lib/libssl.so.3", "include", f"lib/{PYTHON}/site-packages"]
    for name in (*whole, "bin/tool", "lib/libssl.so.3", f"include/{PYTHON}/Python.h"):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).touch()
    (base / "lib" / PYTHON / "site-packages").mkdir()
    (base / "bin" / "python3").symlink_to(PYTHON)
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "python").symlink_to(base / "bin" / "python3")
    version = PYTHON.removeprefix("python")
    config = f"home = {base}/bin\nversion = {version}.1\n"
    (prefix / "pyvenv.cfg").write_bytes(os.fsencode(config))
    files, links = listed(prefix)
    assert files == {"pyvenv.cfg", *(f".base/{name}" for name in whole)}
    assert links == {
        "bin/python": f"../.base/bin/{PYTHON}",
        ".base/bin/python3": PYTHON,
        **{f".base/{name}": str(base / name) for name in linked},
    }
    copy = copied(prefix, tmp_path)
    moved = f"home = {copy}/.base/bin\nversion = {version}.1\n"
    assert (copy / "pyvenv.cfg").read_text() == moved


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("next.py", None, ": No such file"),
        ("next.py", b"", " has changed while it was packed"),
        ("large.bin", bytes(100), " has changed while it was packed"),
        ("large.bin", bytes(3 * 2**20), " has changed while it was packed"),
    ],
)
def test_a_file_that_changes_while_files_are_packed_is_one_line(
    name: str,
    content: bytes | None,
    message: str,
    prefix: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Jobs write bytecode to the environment. A shorter file cannot complete the archive."""
    for file, length in (("large.bin", 2**21), ("next.py", 10)):
        (prefix / PACKAGES / file).write_bytes(bytes(length))
    add = tarfile.TarFile.addfile

    def change_then(tar: tarfile.TarFile, member: tarfile.TarInfo, file: Any = None) -> None:
        if member.name.endswith("large.bin"):
            changed = prefix / PACKAGES / name
            changed.unlink() if content is None else changed.write_bytes(content)
        add(tar, member, file)

    monkeypatch.setattr(tarfile.TarFile, "addfile", change_then)
    assert f"{name}{message}" in refusal(prefix, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_one_line(prefix: Path, tmp_path: Path) -> None:
    """A process cannot write larger files than its limit, as on a full disk."""
    (prefix / "large").write_bytes(bytes(3 * 2**20))
    _, limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limit))
    try:
        error = refusal(prefix, tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    assert error == f"--stage-env: {tmp_path}/cache (HVDTRAIN_CACHE): File too large"
    (tmp_path / "file").touch()
    assert refusal(prefix, tmp_path / "file") == f"--stage-env: {tmp_path}/file: File exists"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The variables of a user with an active environment."""
    prefix = make_environment(tmp_path / "conda")
    (prefix / "bin" / PYTHON).touch(0o755)
    return {
        "HVDTRAIN_CACHE": str(tmp_path / "cache"),
        "TMPDIR": str(tmp_path / "local"),
        "PATH": f"/opt/cuda/bin:{prefix}/bin:/usr/bin",
        "CONDA_PREFIX": str(prefix),
        "PYTHONPATH": f"{prefix}/extra:{prefix}2:/home/me/project",
        "LD_LIBRARY_PATH": f"/opt/lib:{prefix}/lib",
        "HVDTRAIN_OUT": f"{prefix}/results",
    }


def job(environ: dict[str, str], *words: str) -> Launch:
    """Return a job of two ranks on two hosts."""
    mpi = MpiLauncher("openmpi5", "/usr/bin/mpirun", "5.0.11")
    layout = RankLayout(2, (Host("a", 1), Host("b", 1)))
    return Launch(mpi, words or (PYTHON, "train.py"), layout, environ=environ)


def test_ranks_start_from_the_copy(environ: dict[str, str], tmp_path: Path) -> None:
    environment = StagedEnvironment(job(environ))
    copy = environment.folder
    assert copy.parents[1] == tmp_path / "local"
    command = environment.launch.command
    words = (*HOLD, f"{copy.parent}/lock", f"{copy}/bin/{PYTHON}", "train.py")
    assert command.argv[-len(words) :] == words
    prefix = environ["CONDA_PREFIX"]
    assert command.env["PATH"] == f"/opt/cuda/bin:{copy}/bin:/usr/bin"
    assert command.env["CONDA_PREFIX"] == str(copy)
    assert command.env["PYTHONPATH"] == f"{copy}/extra:{prefix}2:/home/me/project"
    assert command.env["LD_LIBRARY_PATH"] == f"/opt/lib:{copy}/lib"
    assert "HVDTRAIN_OUT" not in command.env  # the results must not go with the copy
    assert "CONDA_PREFIX" in command.argv  # of -x


def test_a_program_by_a_relative_path_is_that_of_the_copy(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = StagedEnvironment(job(environ, f"conda/bin/{PYTHON}", "train.py"))
    assert environment.launch.words[-2:] == (f"{environment.folder}/bin/{PYTHON}", "train.py")


@pytest.mark.parametrize(
    ("first", "python"),
    [
        ("{prefix}/bin/python", True),
        ("/bin/sh\n'''exec' {prefix}/bin/python", True),
        ("/bin/sh\n# starts python", False),
        ("/opt/python-envs/x/bin/bash", False),
    ],
)
def test_a_script_in_python_runs_with_the_interpreter_of_the_copy(
    first: str, python: bool, environ: dict[str, str]
) -> None:
    prefix = environ["CONDA_PREFIX"]
    script = Path(prefix, "bin", "train")
    script.write_text(f"#!{first.format(prefix=prefix)}\npython train.py\n")
    script.chmod(0o755)
    environment = StagedEnvironment(job(environ, "train", "--epochs=2"))
    binaries = environment.folder / "bin"
    started = (f"{binaries}/python",) if python else ()
    words = (*started, f"{binaries}/train", "--epochs=2")
    assert environment.launch.words[len(HOLD) + 1 :] == words


class Runs:
    """Replaces the runs of mpirun: exit codes and outputs; notes the programs."""

    def __init__(self) -> None:
        self.results, self.programs = [(0, ""), (0, "")], list[str]()

    def __call__(self, command: Command, timeout: float | None = None) -> CommandResult:
        self.programs.append(
            "rm" if any(word.startswith("rm ") for word in command.argv) else "stage"
        )
        code, output = self.results.pop(0)
        if code < 0:
            os.kill(os.getpid(), -code)
        return CommandResult(command, code, output)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """The runs of mpirun, which succeed unless a test changes ``results``."""
    monkeypatch.setattr(staging, "run", runs := Runs())
    return runs


@contextlib.contextmanager
def started(environ: dict[str, str]) -> Iterator[Launch]:
    """Stage the environment of a job, and return the job."""
    with StopSignals() as signals, staged(job(environ), signals) as launch:
        yield launch


@pytest.mark.parametrize("removed", [0, 1])
def test_one_process_per_host_makes_and_removes_the_copies(
    removed: int, environ: dict[str, str], runs: Runs, tmp_path: Path
) -> None:
    """An error of the job is passed on, whether or not they can be removed then."""
    runs.results[1] = (removed, "")
    with pytest.raises(HvdtrainError, match="a host was lost"), started(environ) as launch:
        assert runs.programs == ["stage"]
        assert launch.words[:3] == HOLD
        assert list((tmp_path / "cache").iterdir()) == []  # the archive is no longer needed
        raise HvdtrainError("a host was lost")
    assert runs.programs == ["stage", "rm"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("error: rank 1 on b: 1 GB are needed", "host b: 1 GB are needed"),
        ("rank 1 on b: error: mpi4py cannot load", "host b: mpi4py cannot load"),
        ("error: /cache/x.tar: No such file", "/cache/x.tar: No such file"),
    ],
)
def test_an_error_on_a_host_is_one_line(
    line: str, reason: str, environ: dict[str, str], runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.results[0] = (1, f"a notice\nhvdtrain: {line}\nmpirun: a box\n")
    with pytest.raises(HvdtrainError, match=f"^--stage-env: {reason}$"), started(environ):
        pass
    assert capsys.readouterr().err == ""
    assert runs.programs == ["stage", "rm"]


def test_the_output_of_a_failed_mpirun_is_shown_whole(
    environ: dict[str, str],
    runs: Runs,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It cannot reach a host, for example, and fails again when the copies are removed."""
    output = "ssh: connect to host b: refused\n" + "a line of a box\n" * 40
    runs.results = [(1, output), (1, output)]
    end = r"^--stage-env: mpirun ended with code 1; its output is above$"
    with pytest.raises(HvdtrainError, match=end), started(environ):
        pass
    assert output in capsys.readouterr().err
    assert "may be left on a host" in caplog.text


def test_a_signal_ends_the_staging(environ: dict[str, str], runs: Runs) -> None:
    runs.results[0] = (-signal.SIGTERM, "")
    with StopSignals() as signals:
        with pytest.raises(KeyboardInterrupt), staged(job(environ), signals):
            pytest.fail("the ranks were started")
        assert signals.received == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)  # is recorded again
        assert signals.received == [signal.SIGTERM, signal.SIGTERM]
    assert runs.programs == ["stage", "rm"]


def test_a_program_of_no_environment_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="is in no virtual environment and no conda environment"):
        StagedEnvironment(job(environ, "/bin/sh"))


def test_a_copy_is_kept_while_a_rank_runs_and_removed_at_the_next_start(
    prefix: Path, tmp_path: Path
) -> None:
    """That is what happens to the copy of a job that is killed."""
    copy = copied(prefix, tmp_path)
    folder = copy.parent.rename(tmp_path / "local" / "hvdtrain-01234567")
    clear_leftovers(folder.parent, tmp_path)
    assert folder.exists()  # it is new: the ranks may be about to start
    with subprocess.Popen([*HOLD, str(folder / LOCK), "sleep", "60"]) as rank:
        try:
            until(lambda: not _is_unlocked(folder / LOCK))
            clear_leftovers(folder.parent, tmp_path, new=0)
            assert folder.exists()
        finally:
            rank.kill()
    clear_leftovers(folder.parent, tmp_path, new=0)
    assert not folder.exists()
    assert subprocess.run([*HOLD, str(folder / LOCK), "touch", f"{tmp_path}/started"]).returncode
    assert not (tmp_path / "started").exists()
