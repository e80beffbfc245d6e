"""An environment is packed once, unpacked elsewhere, and works there without the original."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.commands.launch import environment
from hvdtrain.commands.launch.environment import (
    FOLDER,
    RECENT,
    UNUSED,
    Entry,
    editable_installs,
    environment_of,
    find_program,
    list_files,
    pack,
)
from hvdtrain.errors import UsageError
from tests.environments import PACKAGES, PYTHON, make_editable, make_environment, stage, staged


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """An environment of one module."""
    return make_environment(tmp_path / "conda")


def make_venv(tmp_path: Path) -> Path:
    """Create a virtual environment with a module, a script, an editable project, and links."""
    folder, project = tmp_path / "venv", tmp_path / "project"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = folder / PACKAGES
    (packages / "module.py").write_text("HERE = __file__\n")
    project.mkdir()
    (project / "edited.py").write_text("HERE = __file__\n")
    make_editable(folder, project)
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
    copy = staged(venv, tmp_path)
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


def test_editable_installs_are_named(tmp_path: Path) -> None:
    venv = make_venv(tmp_path)
    for number, damaged in enumerate((b"", b"\xff", b"[]", b'{"dir_info": {"editable": true}}')):
        record = venv / PACKAGES / f"damaged{number}-1.dist-info" / "direct_url.json"
        record.parent.mkdir()
        record.write_bytes(damaged)
    assert editable_installs(venv) == [str(tmp_path / "project")]


def test_files_keep_their_times_and_modes(prefix: Path, tmp_path: Path) -> None:
    """Bytecode counts if the time of the source is the one in it."""
    file = prefix / "bin" / "tool"
    file.touch()
    file.chmod(0o2775)
    os.utime(file, (1_000_000, 1_000_000))
    status = (staged(prefix, tmp_path) / "bin" / "tool").stat()
    assert (status.st_mtime, status.st_mode & 0o7777) == (1_000_000, 0o755)


def test_caches_and_other_environments_of_conda_are_links(prefix: Path) -> None:
    for name in ("envs/other/file", "lib/envs/file", "pkgs/file"):
        (prefix / name).parent.mkdir(parents=True)
        (prefix / name).touch()
    (prefix / "linked").symlink_to(prefix / "pkgs" / "file")
    entries = list_files(prefix)
    assert {entry.name for entry in entries if entry.status} == {
        "lib/envs/file",
        f"{PACKAGES}/module.py",
    }
    assert {entry.name: entry.target for entry in entries if not entry.status} == {
        "envs": str(prefix / "envs"),
        "pkgs": str(prefix / "pkgs"),
        "linked": "pkgs/file",
    }


def test_of_an_interpreter_its_standard_library_is_copied(tmp_path: Path) -> None:
    """All else in its directory, which may be large and of any name, is there by links."""
    base, prefix = tmp_path / os.fsdecode(b"caf\xe9"), tmp_path / "venv"
    copied = [f"bin/{PYTHON}", f"lib/{PYTHON}/os.py", f"lib/{PYTHON}/lib-dynload/_ssl.so"]
    linked = ["bin/tool", "lib/libssl.so.3", "include", f"lib/{PYTHON}/site-packages"]
    for name in (*copied, "bin/tool", "lib/libssl.so.3", f"include/{PYTHON}/Python.h"):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).touch()
    (base / "lib" / PYTHON / "site-packages").mkdir()
    (base / "bin" / "python3").symlink_to(PYTHON)
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "python").symlink_to(base / "bin" / "python3")
    version = PYTHON.removeprefix("python")
    config = f"home = {base}/bin\nversion = {version}.1\n"
    (prefix / "pyvenv.cfg").write_bytes(os.fsencode(config))
    entries = list_files(prefix)
    assert {entry.name for entry in entries if entry.status} == {
        "pyvenv.cfg",
        *(f".base/{name}" for name in copied),
    }
    assert {entry.name: entry.target for entry in entries if not entry.status} == {
        "bin/python": f"../.base/bin/{PYTHON}",
        ".base/bin/python3": PYTHON,
        **{f".base/{name}": str(base / name) for name in linked},
    }
    copy = staged(prefix, tmp_path)
    assert (copy / "pyvenv.cfg").read_text() == (
        f"home = {copy}/.base/bin\nversion = {version}.1\n"
    )


def test_an_unchanged_environment_is_packed_once(prefix: Path, tmp_path: Path) -> None:
    first = pack(prefix, tmp_path / "cache")
    before = first.path.stat()
    again = pack(prefix, tmp_path / "cache")
    assert again == first
    assert again.path.stat().st_ino == before.st_ino
    (prefix / PACKAGES / "module.py").write_text("CHANGED = True\n")
    changed = pack(prefix, tmp_path / "cache")
    assert changed.digest != first.digest


def test_a_file_replaced_by_one_of_the_same_size_and_time_is_a_change(
    prefix: Path, tmp_path: Path
) -> None:
    """The times of files in conda packages may be those of their sources."""
    first = pack(prefix, tmp_path / "cache")
    file = prefix / PACKAGES / "module.py"
    status = file.stat()
    other = file.with_name("other")
    other.write_text("HERE = 'other!'\n"[: status.st_size].ljust(status.st_size))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(file)
    assert file.stat().st_size == status.st_size
    assert pack(prefix, tmp_path / "cache").digest != first.digest


def test_archives_are_kept_while_another_job_may_read_them(prefix: Path, tmp_path: Path) -> None:
    first = pack(prefix, tmp_path / "cache").path
    other = pack(make_environment(tmp_path / "other"), tmp_path / "cache").path
    partial = first.with_name("killed.partial")
    partial.touch()

    def change(text: str, *old: Path, age: float) -> list[Path]:
        for path in old:
            os.utime(path, (time.time() - age - 1,) * 2)
        (prefix / PACKAGES / "module.py").write_text(text)
        new = pack(prefix, tmp_path / "cache").path
        return [path for path in new.parent.iterdir() if path != new and path.name != "lock"]

    assert set(change("A = 1\n", age=0)) == {first, other, partial}
    second = change("AB = 2\n", first, other, partial, age=RECENT)
    assert len(second) == 2  # that of A, used just now, and of an environment that is as it was
    assert other in second
    assert other not in change("ABC = 3\n", other, age=UNUSED)


@pytest.mark.parametrize("what", ["changed", "truncated"])
def test_what_arrives_changed_is_not_executed(what: str, prefix: Path, tmp_path: Path) -> None:
    """MPI does not authenticate; the checksum is in the command line of each process."""
    archive = pack(prefix, tmp_path / "cache")
    content = archive.path.read_bytes()
    changed = content.replace(b"HERE = __file__", b"HERE = 'evil!!'")
    assert changed != content
    archive.path.write_bytes(changed if what == "changed" else content[:520])
    assert "is damaged, or arrived damaged" in stage(archive, tmp_path / "local")
    assert list((tmp_path / "local").iterdir()) == []


def test_a_file_that_goes_while_it_is_packed_is_one_line(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs write bytecode to the environment: a traceback would follow by chance."""
    listed = environment.list_files
    file = prefix / PACKAGES / "module.py"

    def list_then(change: str) -> list[Entry]:
        entries = listed(prefix)
        file.unlink() if change == "gone" else file.write_text("")
        return entries

    for change, message in (("shorter", "has changed while"), ("gone", "No such file")):
        monkeypatch.setattr(environment, "list_files", lambda _, change=change: list_then(change))
        with pytest.raises(UsageError, match=f"module.py.*{message}"):
            pack(prefix, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / FOLDER).iterdir()] == ["lock"]


@pytest.mark.parametrize("size", [100, 3 * 2**20])
def test_a_file_that_changes_while_it_is_copied_is_one_line(
    size: int, prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may also become shorter, so that the archive cannot be completed."""
    file = prefix / PACKAGES / "large.bin"
    file.write_bytes(bytes(2 * 2**20))
    add = tarfile.TarFile.addfile

    def change_then(tar: tarfile.TarFile, member: tarfile.TarInfo, content: Any = None) -> None:
        if member.name.endswith(file.name):
            file.write_bytes(b"1" * size)
        add(tar, member, content)

    monkeypatch.setattr(tarfile.TarFile, "addfile", change_then)
    with pytest.raises(UsageError, match=r"large\.bin has changed while it was packed"):
        pack(prefix, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / FOLDER).iterdir()] == ["lock"]


def test_a_cache_that_cannot_be_written_is_one_line(prefix: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(UsageError, match=r"--stage-env: .*cache.*(File exists|Not a directory)"):
        pack(prefix, tmp_path / "cache")


def test_an_archive_in_a_cache_that_cannot_be_written_is_used(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At some sites compute nodes cannot write to the home directory."""
    archive = pack(prefix, tmp_path / "cache")

    def read_only(path: Path, *_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(environment, "lock", read_only)
    monkeypatch.setattr(os, "utime", read_only)
    assert pack(prefix, tmp_path / "cache") == archive
    (prefix / PACKAGES / "module.py").write_text("CHANGED = True\n")
    with pytest.raises(UsageError, match="Read-only file system"):
        pack(prefix, tmp_path / "cache")


def test_the_environment_of_a_program(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prefix / "bin" / PYTHON).touch(0o755)
    monkeypatch.chdir(tmp_path)
    for word in (PYTHON, str(prefix / "bin" / PYTHON), f"conda/bin/{PYTHON}"):
        program = find_program([word], {"PATH": f"{prefix}/bin:/bin"})
        assert program == prefix / "bin" / PYTHON
        assert environment_of(program) == prefix
    with pytest.raises(UsageError, match="is in no virtual environment and no conda environment"):
        environment_of(find_program(["sh"], {"PATH": "/bin:/usr/bin"}))
