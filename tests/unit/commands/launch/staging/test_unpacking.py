"""One process per host unpacks what another one reads; an error anywhere is one line."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.collectives.base import SingleRank
from hvdtrain.commands.launch.staging import __main__ as unpacking
from hvdtrain.commands.launch.staging import packed
from hvdtrain.errors import UsageError
from hvdtrain.system.files import file_digest
from tests.environments import copied, make_environment


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """An environment of one module."""
    return make_environment(tmp_path / "conda")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The path of a copy on a local disk."""
    (tmp_path / "local").mkdir()
    return tmp_path / "local" / "copy" / "env"


def test_a_directory_that_does_not_suit_is_one_line(
    prefix: Path, tmp_path: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many sites mount /tmp without execution."""
    status = list(os.statvfs(tmp_path))
    status[8] |= os.ST_NOEXEC
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(status))
    with pytest.raises(UsageError, match=r"without execution \(noexec\)"):
        copied(prefix, tmp_path)
    usage = shutil.disk_usage(tmp_path)._replace(free=4096)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    needed = rf"11\.0 KiB are needed in {tmp_path}/local, 4\.0 KiB are free"
    with pytest.raises(UsageError, match=needed):
        copied(prefix, tmp_path)
    assert not copy.parent.exists()
    copy.parents[1].rmdir()
    copy.parents[1].touch()
    with pytest.raises(UsageError, match=f"{tmp_path}/local is not a directory: set TMPDIR"):
        copied(prefix, tmp_path)


def test_a_disk_that_gets_full_is_one_line(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process cannot write larger files than its limit, as on a full disk."""
    (prefix / "large").write_bytes(bytes(3 * 2**20))
    start = subprocess.Popen

    def limited(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        return start(*words, **options, preexec_fn=limit)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))

    monkeypatch.setattr(subprocess, "Popen", limited)
    with pytest.raises(UsageError, match=r"^tar"):
        copied(prefix, tmp_path)


def test_a_host_without_an_mpi_library_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hvdtrain.collectives.mpi4py", None)
    monkeypatch.setattr(sys, "argv", ["staging", str(tmp_path), "a.tar", "1", "abc"])
    with pytest.raises(UsageError, match=r"^mpi4py cannot load an MPI library"):
        unpacking.main()


def test_an_archive_that_this_host_does_not_see_is_one_line(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone\.tar: No such file"):
        unpacking.stage(SingleRank(), copy, tmp_path / "gone.tar", 1, "abc")


def test_an_error_ends_all_hosts(prefix: Path, tmp_path: Path, copy: Path, on_ranks: Any) -> None:
    """Here that of a directory which hosts share: it has one copy for all."""
    with packed(prefix, tmp_path / "cache") as archive:
        errors = on_ranks(2, lambda host: unpacking.stage(host, copy, *archive))
    remedy = "is shared by several hosts: set TMPDIR to a directory that each host has on a local"
    assert all(remedy in str(error) for error in errors)


@pytest.mark.parametrize("what", ["changed", "truncated"])
def test_what_arrives_changed_is_not_executed(
    what: str, prefix: Path, tmp_path: Path, copy: Path
) -> None:
    """MPI does not authenticate; the checksum is in the command line of each process."""
    with packed(prefix, tmp_path / "cache") as archive:
        file, *_ = archive
        content = file.read_bytes()
        changed = content.replace(b"HERE = __file__", b"HERE = 'evil!!'")
        assert changed != content
        file.write_bytes(changed if what == "changed" else content[:520])
        with pytest.raises(UsageError, match="arrived damaged"):
            unpacking.stage(SingleRank(), copy, *archive)


def test_nothing_is_written_outside_the_copy(tmp_path: Path, copy: Path) -> None:
    outside, archive = tmp_path / "outside", tmp_path / "hostile.tar"
    outside.mkdir()
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, str(outside)
    with tarfile.open(archive, "w") as tar:
        for member in (link, *map(tarfile.TarInfo, ("link/file", "../file", f"{outside}/file"))):
            tar.addfile(member)
    with pytest.raises(UsageError, match=r"^tar"):
        unpacking.stage(
            SingleRank(), copy, archive, archive.stat().st_size, file_digest(archive, "sha256")
        )
    assert list(outside.iterdir()) == []
    assert not (copy.parent / "file").exists()


def test_a_link_in_a_shared_directory_is_not_followed(
    prefix: Path, tmp_path: Path, copy: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    copy.parent.symlink_to(outside)
    with pytest.raises(UsageError, match="is shared by several hosts"):
        copied(prefix, tmp_path)
    assert list(outside.iterdir()) == []


def test_others_cannot_read_or_write_the_copy(prefix: Path, tmp_path: Path) -> None:
    assert copied(prefix, tmp_path).parent.stat().st_mode & 0o777 == 0o700
