"""An environment is packed and unpacked elsewhere, and works there without the original."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.collectives.base import SingleRank
from hvdtrain.commands.launch import environment_host
from hvdtrain.commands.launch.environment import (
    Archive,
    description,
    environment_of,
    pack,
    read_archive,
)
from hvdtrain.commands.launch.environment_host import (
    Host,
    Stream,
    copy_folder,
    lock_file,
    remove,
    unpack,
)
from hvdtrain.errors import HvdtrainError, UsageError
from tests.conftest import until

PACKAGES = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A virtual environment with a module, a script, an editable project, and links."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages, project = folder / PACKAGES, tmp_path / "project"
    (packages / "module.py").write_text("HERE = __file__\n")
    (project / "src" / "edited").mkdir(parents=True)
    (project / "src" / "edited" / "__init__.py").write_text("HERE = __file__\n")
    (packages / "edited-1.dist-info").mkdir()
    url = {"dir_info": {"editable": True}, "url": f"file://{project}"}
    (packages / "edited-1.dist-info" / "direct_url.json").write_text(json.dumps(url))
    (packages / "edited.pth").write_text(f"{project / 'src'}\n")
    script = folder / "bin" / "script"
    script.write_text(
        f"#!{folder}/bin/python\n"
        "import json, os, sys, edited, module\n"
        "print(json.dumps([sys.prefix, module.HERE, edited.HERE, os.__file__]))\n"
    )
    script.chmod(0o755)
    (tmp_path / "elsewhere.txt").write_text("content")
    (packages / "data.txt").symlink_to(tmp_path / "elsewhere.txt")
    (packages / "same.py").symlink_to(packages / "module.py")
    return folder


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A conda environment of one module, without an interpreter."""
    folder = tmp_path / "conda"
    (folder / "conda-meta").mkdir(parents=True)
    (folder / PACKAGES).mkdir(parents=True)
    (folder / PACKAGES / "module.py").write_text("HERE = __file__\n")
    return folder


def stage(archive: Archive, folder: Path) -> str:
    """Make a copy; return why that failed."""
    return environment_host.stage(SingleRank(), archive.path, folder / "local", archive.seal)


def staged(venv: Path, folder: Path) -> Path:
    """Pack and unpack; return the copy."""
    archive = pack(venv, folder / "cache")
    assert not stage(archive, folder)
    return copy_folder(archive.manifest.digest, folder / "local")


def test_the_copy_works_without_the_original(venv: Path, tmp_path: Path) -> None:
    copy = staged(venv, tmp_path)
    for folder in (venv, tmp_path / "project"):
        shutil.rmtree(folder)
    (tmp_path / "elsewhere.txt").unlink()
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    output = subprocess.run(
        [str(copy / "bin" / "script")], env=clean, capture_output=True, text=True, check=True
    ).stdout
    prefix, module, edited, _ = map(Path, json.loads(output))
    assert prefix == copy
    assert module == copy / PACKAGES / "module.py"
    assert edited.is_relative_to(copy)
    assert (copy / PACKAGES / "data.txt").read_text() == "content"
    assert (copy / PACKAGES / "same.py").readlink() == Path("module.py")


def test_the_interpreter_is_copied_unless_it_is_the_systems(venv: Path, tmp_path: Path) -> None:
    copy = staged(venv, tmp_path)
    home = (venv / "pyvenv.cfg").read_text()
    of_system = "home = /usr" in home
    assert (copy / ".base").exists() is not of_system
    if not of_system:
        line = "import os, sys; print(os.__file__)"
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        output = subprocess.run(
            [str(copy / "bin" / "python"), "-c", line], env=clean, capture_output=True, text=True
        ).stdout
        assert Path(output.strip()).is_relative_to(copy)


def test_an_unchanged_environment_is_packed_once(prefix: Path, tmp_path: Path) -> None:
    first = pack(prefix, tmp_path / "cache")
    before = first.path.stat()
    again = pack(prefix, tmp_path / "cache")
    assert again == first
    assert again.path.stat().st_mtime_ns == before.st_mtime_ns
    (prefix / PACKAGES / "module.py").write_text("CHANGED = True\n")
    changed = pack(prefix, tmp_path / "cache")
    assert changed.manifest.digest != first.manifest.digest
    assert not first.path.exists()  # the environment as it was


def test_a_copy_is_reused_and_removed_when_nobody_uses_it(prefix: Path, tmp_path: Path) -> None:
    copy = staged(prefix, tmp_path)
    (copy / "mark").touch()
    assert staged(prefix, tmp_path) == copy
    assert (copy / "mark").exists()
    file = lock_file(copy)
    holder = subprocess.Popen(["flock", "--shared", "--no-fork", str(file), "sleep", "60"])
    try:
        until(lambda: _is_locked(file))
        remove(copy)
        assert (copy / "mark").exists()
    finally:
        holder.kill()
        holder.wait()
    remove(copy)
    assert list((tmp_path / "local").iterdir()) == []


def _is_locked(path: Path) -> bool:
    return subprocess.run(["flock", "--exclusive", "--nonblock", str(path), "true"]).returncode == 1


def test_a_link_to_a_folder_elsewhere_is_refused(prefix: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (prefix / "models").symlink_to(tmp_path / "models")
    with pytest.raises(UsageError, match=r"is a link to the directory .*models, which is not part"):
        pack(prefix, tmp_path / "cache")


def test_an_editable_install_without_packages_is_refused(venv: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "project" / "src" / "edited")
    with pytest.raises(UsageError, match="is installed in editable mode, and its packages are not"):
        pack(venv, tmp_path / "cache")


def test_a_program_of_no_environment(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is in no virtual environment and no conda environment"):
        environment_of(["sh"], {"PATH": "/bin:/usr/bin"})


def test_a_full_disk_is_one_line(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = pack(prefix, tmp_path / "cache")
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    error = stage(archive, tmp_path)
    assert "are needed in" in error
    assert "10 B are free" in error
    assert not copy_folder(archive.manifest.digest, tmp_path / "local").exists()


def test_a_damaged_archive(prefix: Path, tmp_path: Path) -> None:
    archive = pack(prefix, tmp_path / "cache")
    content = archive.path.read_bytes()
    archive.path.write_bytes(content[: len(content) // 2])
    error = stage(archive, tmp_path)
    assert str(copy_folder(archive.manifest.digest, tmp_path / "local")) in error
    assert not copy_folder(archive.manifest.digest, tmp_path / "local").exists()
    description(archive.path).write_bytes(b"")
    with pytest.raises(UsageError, match="is damaged"):
        read_archive(archive.path)


def test_what_arrives_changed_is_not_executed(prefix: Path, tmp_path: Path) -> None:
    """MPI does not authenticate; the checksum is in the command line of each process."""
    archive = pack(prefix, tmp_path / "cache")
    content = archive.path.read_bytes()
    changed = content.replace(b"HERE = __file__", b"HERE = 'hostile'")
    assert changed != content
    archive.path.write_bytes(changed)
    assert "the archive arrived damaged" in stage(archive, tmp_path)
    assert not copy_folder(archive.manifest.digest, tmp_path / "local").exists()
    archive.path.write_bytes(content)
    file = description(archive.path)
    script = b'"changes":[{"file":"module.py","old":"__file__","new":"hostile"}]'
    file.write_bytes(file.read_bytes().replace(b'"changes":[]', script))
    with pytest.raises(HvdtrainError, match="has changed, or arrived damaged"):
        stage(archive, tmp_path)
    assert not copy_folder(archive.manifest.digest, tmp_path / "local").exists()


def test_conda_files_are_adapted(tmp_path: Path) -> None:
    """Text, and binary strings, which end with a zero byte and keep their length."""
    prefix, old = tmp_path / "conda", str(tmp_path / "conda")
    (prefix / "conda-meta").mkdir(parents=True)
    (prefix / "lib").mkdir()
    (prefix / "lib" / "text.sh").write_text(f"PREFIX={old}\n")
    binary = b"\x7fELF" + old.encode() + b"/lib\0tail" + old.encode() + b"\0end"
    (prefix / "lib" / "library.so").write_bytes(binary)
    paths = [
        {"_path": "lib/text.sh", "prefix_placeholder": "/opt/x", "file_mode": "text"},
        {"_path": "lib/library.so", "prefix_placeholder": "/opt/x", "file_mode": "binary"},
    ]
    content = {"paths_data": {"paths": paths}}
    (prefix / "conda-meta" / "package.json").write_text(json.dumps(content))
    archive = pack(prefix, tmp_path / "cache")
    copy = tmp_path / "c"
    stream = Stream()
    stream.put(archive.path.read_bytes())
    stream.put(b"")
    unpack(stream, copy, archive.manifest.changes)
    assert (copy / "lib" / "text.sh").read_text() == f"PREFIX={copy}\n"
    adapted = (copy / "lib" / "library.so").read_bytes()
    assert len(adapted) == len(binary)
    strings = adapted.removeprefix(b"\x7fELF").split(b"\0")
    assert [text for text in strings if text] == [
        f"{copy}/lib".encode(),
        b"tail" + str(copy).encode(),
        b"end",
    ]


def test_host_reports_what_it_cannot_write(prefix: Path, tmp_path: Path) -> None:
    archive = pack(prefix, tmp_path / "cache")
    (tmp_path / "file").touch()
    host = Host(archive.manifest, tmp_path / "file")
    assert not host.begin()
    assert "File exists" in host.error or "Not a directory" in host.error
    host.end()
