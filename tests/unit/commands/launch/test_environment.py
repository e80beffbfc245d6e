"""An environment is packed once, unpacked elsewhere, and works there without the original."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.commands.launch import environment
from hvdtrain.commands.launch.environment import (
    OLD,
    SUFFIX,
    description,
    environment_of,
    find_program,
    pack,
    read_archive,
)
from hvdtrain.commands.launch.environment_copy import copy_folder
from hvdtrain.commands.launch.environment_files import EnvironmentFiles
from hvdtrain.errors import HvdtrainError, UsageError
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
    (project / "src" / "edited").mkdir(parents=True)
    (project / "src" / "edited" / "__init__.py").write_text("HERE = __file__\n")
    make_editable(folder, project, "edited.pth", f"{project / 'src'}\n")
    script = folder / "bin" / "script"
    script.write_text(
        f"#!{folder}/bin/python\n"
        "import json, os, ssl, sys, sysconfig, edited, module\n"
        "paths = [module.HERE, edited.HERE, os.__file__, sysconfig.get_path('include')]\n"
        "print(json.dumps([sys.prefix, *paths]))\n"
    )
    script.chmod(0o755)
    (tmp_path / "elsewhere.txt").write_text("content")
    (packages / "data.txt").symlink_to(tmp_path / "elsewhere.txt")
    (packages / "same.py").symlink_to(packages / "module.py")
    return folder


def test_the_copy_works_without_the_original(tmp_path: Path) -> None:
    venv = make_venv(tmp_path)
    of_system = "home = /usr" in (venv / "pyvenv.cfg").read_text()
    copy = staged(venv, tmp_path)
    for folder in (venv, tmp_path / "project"):
        shutil.rmtree(folder)
    (tmp_path / "elsewhere.txt").unlink()
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    output = subprocess.run(
        [str(copy / "bin" / "script")], env=clean, capture_output=True, text=True, check=True
    ).stdout
    prefix, module, edited, library, headers = map(Path, json.loads(output))
    assert prefix == copy
    assert module == copy / PACKAGES / "module.py"
    assert edited.is_relative_to(copy)
    assert (copy / PACKAGES / "data.txt").read_text() == "content"
    assert (copy / PACKAGES / "same.py").readlink() == Path("module.py")
    assert library.is_relative_to(copy) is not of_system
    assert of_system or (headers.is_relative_to(copy) and (headers / "Python.h").exists())


def test_an_unchanged_environment_is_packed_once(prefix: Path, tmp_path: Path) -> None:
    first = pack(prefix, tmp_path / "cache")
    before = first.path.stat()
    again = pack(prefix, tmp_path / "cache")
    assert again == first
    assert again.path.stat().st_ino == before.st_ino
    (prefix / PACKAGES / "module.py").write_text("CHANGED = True\n")
    changed = pack(prefix, tmp_path / "cache")
    assert changed.manifest.digest != first.manifest.digest


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
    assert pack(prefix, tmp_path / "cache").manifest.digest != first.manifest.digest


def test_archives_are_kept_while_another_job_may_read_them(prefix: Path, tmp_path: Path) -> None:
    first = pack(prefix, tmp_path / "cache")
    other = pack(make_environment(tmp_path / "other"), tmp_path / "cache")
    gone = make_environment(tmp_path / "gone")
    of_gone = pack(gone, tmp_path / "cache")
    shutil.rmtree(gone)
    partial = first.path.with_name(f".{first.path.name}.partial-1")
    partial.touch()

    def change(text: str) -> list[Path]:
        (prefix / PACKAGES / "module.py").write_text(text)
        new = pack(prefix, tmp_path / "cache").path
        return sorted(path for path in new.parent.glob(f"*{SUFFIX}") if path != new)

    assert first.path in change("A = 1\n")
    for path in (first.path, of_gone.path, other.path, partial):
        os.utime(path, (time.time() - OLD - 1,) * 2)
    second = [path for path in change("AB = 2\n") if path != other.path]
    assert len(second) == 1  # that of A, used just now
    assert other.path.exists()  # of an environment that is as it was
    for path in (first.path, of_gone.path):
        assert not path.exists()
        assert not description(path).exists()
    assert not partial.exists()


def test_a_damaged_archive_is_packed_anew_and_another_does_not_matter(
    prefix: Path, tmp_path: Path
) -> None:
    archive = pack(prefix, tmp_path / "cache")
    for path in (archive.path, archive.path.with_name(f"other{SUFFIX}")):
        path.touch()
        description(path).write_bytes(b"{")
        os.utime(path, (time.time() - OLD - 1,) * 2)
    with pytest.raises(UsageError, match="is damaged"):
        read_archive(archive.path)
    assert pack(prefix, tmp_path / "cache").manifest == archive.manifest
    assert not stage(read_archive(archive.path), tmp_path / "local")


def test_a_truncated_archive(prefix: Path, tmp_path: Path) -> None:
    archive = pack(prefix, tmp_path / "cache")
    content = archive.path.read_bytes()
    archive.path.write_bytes(content[: len(content) // 2])
    assert "damaged" in stage(archive, tmp_path / "local")
    assert not (tmp_path / "local").exists() or not list((tmp_path / "local").iterdir())


def test_what_arrives_changed_is_not_executed(prefix: Path, tmp_path: Path) -> None:
    """MPI does not authenticate; the checksum is in the command line of each process."""
    archive = pack(prefix, tmp_path / "cache")
    copy = copy_folder(archive.manifest.digest, tmp_path / "local")
    content = archive.path.read_bytes()
    changed = content.replace(b"HERE = __file__", b"HERE = 'evil!!'")
    assert changed != content
    archive.path.write_bytes(changed)
    assert "the archive is damaged, or arrived damaged" in stage(archive, tmp_path / "local")
    assert not copy.exists()
    archive.path.write_bytes(content)
    file = description(archive.path)
    script = b'"changes":[{"file":"module.py","old":"__file__","new":"hostile"}]'
    file.write_bytes(file.read_bytes().replace(b'"changes":[]', script))
    with pytest.raises(HvdtrainError, match="has changed, or arrived damaged"):
        stage(archive, tmp_path / "local")
    assert not copy.exists()


def test_a_file_that_goes_while_it_is_packed_is_one_line(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs write bytecode to the environment: a traceback would follow by chance."""
    listed = environment.list_files
    file = prefix / PACKAGES / "module.py"

    def list_then(change: str) -> EnvironmentFiles:
        contents = listed(prefix)
        file.unlink() if change == "gone" else file.write_text("")
        return contents

    for change, message in (("shorter", "has changed while"), ("gone", "No such file.*run it")):
        monkeypatch.setattr(environment, "list_files", lambda _, change=change: list_then(change))
        with pytest.raises(UsageError, match=f"module.py.*{message}"):
            pack(prefix, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob(f"*{SUFFIX}"))


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
