"""One process per host unpacks what another one reads; an error anywhere is one line."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from hvdtrain.collectives.base import Communicator, SingleRank
from hvdtrain.commands.launch import environment_host
from hvdtrain.commands.launch.environment import ERROR, pack
from hvdtrain.commands.launch.environment_copy import LocalCopy
from hvdtrain.commands.launch.environment_host import on_all_hosts
from hvdtrain.errors import EXIT_FAILURE, HvdtrainError
from tests.environments import make_environment, stage, staged


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """An environment of one module."""
    return make_environment(tmp_path / "conda")


def nothing_left(tmp_path: Path) -> bool:
    """Return whether there is nothing in the local directory."""
    return not (tmp_path / "local").exists() or not list((tmp_path / "local").iterdir())


def test_a_copy_is_reused(prefix: Path, tmp_path: Path) -> None:
    copy = staged(prefix, tmp_path, "one")
    (copy / "new").touch()
    assert staged(prefix, tmp_path, "two") == copy
    assert (copy / "new").exists()


def test_a_full_disk_is_one_line(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = pack(prefix, tmp_path / "cache")
    usage = shutil.disk_usage(tmp_path)._replace(free=4096)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    error = stage(archive, tmp_path / "local")
    assert f"host {os.uname().nodename}: 11.0 KiB are needed in {tmp_path}/local" in error
    assert "4.0 KiB are free" in error
    assert nothing_left(tmp_path), [*(tmp_path / "local").rglob("*")]


def test_a_disk_that_gets_full_is_one_line(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process cannot write larger files than its limit, as on a full disk."""
    (prefix / "large").write_bytes(bytes(3 * 2**20))
    archive = pack(prefix, tmp_path / "cache")
    start = subprocess.Popen

    def limited(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        return start(*words, **options, preexec_fn=limit)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))

    monkeypatch.setattr(subprocess, "Popen", limited)
    error = stage(archive, tmp_path / "local")
    assert error.startswith(f"host {os.uname().nodename}: tar")
    assert nothing_left(tmp_path), [*(tmp_path / "local").rglob("*")]


def test_a_disk_without_execution_is_one_line(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many sites mount /tmp so."""
    archive = pack(prefix, tmp_path / "cache")
    status = list(os.statvfs(tmp_path))
    status[8] |= os.ST_NOEXEC
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(status))
    assert "without execution (noexec)" in stage(archive, tmp_path / "local")
    assert nothing_left(tmp_path), [*(tmp_path / "local").rglob("*")]


def test_a_host_without_flock_is_one_line(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = pack(prefix, tmp_path / "cache")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "flock is missing: install util-linux and tar" in stage(archive, tmp_path / "local")


def test_a_host_without_an_mpi_library_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "hvdtrain.collectives.mpi4py", None)
    assert environment_host.main(["stage", "a-b-c.tar", str(tmp_path), "job", "1"]) == EXIT_FAILURE
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{ERROR}host {os.uname().nodename}: mpi4py cannot load an MPI library")


def test_a_local_directory_that_is_a_file_is_one_line(prefix: Path, tmp_path: Path) -> None:
    (tmp_path / "local").touch()
    error = stage(pack(prefix, tmp_path / "cache"), tmp_path / "local")
    assert f"{tmp_path}/local is not a directory: set TMPDIR" in error


def test_an_archive_that_has_gone_is_one_line(prefix: Path, tmp_path: Path) -> None:
    archive = pack(prefix, tmp_path / "cache")
    archive.path.unlink()
    assert f"{archive.path}: No such file" in stage(archive, tmp_path / "local")
    assert nothing_left(tmp_path), [*(tmp_path / "local").rglob("*")]


def test_no_host_ends_while_another_one_removes_its_copy(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_ranks: Any
) -> None:
    """When the first process ends, mpirun kills the others."""
    archive = pack(prefix, tmp_path / "cache")
    archive.path.unlink()
    release, events = LocalCopy.release, list[str]()

    def slow_on_second(copy: LocalCopy) -> None:
        if copy.folder.is_relative_to(tmp_path / "disk1"):
            time.sleep(0.2)
        release(copy)
        events.append("removed")

    def stage_on(host: Communicator) -> None:
        directory = tmp_path / f"disk{host.rank}"
        directory.mkdir()
        with pytest.raises(HvdtrainError, match="No such file"):
            environment_host.stage(host, archive, directory, "job")
        events.append("ended")

    monkeypatch.setattr(LocalCopy, "release", slow_on_second)
    assert on_ranks(2, stage_on) == [None, None]
    assert events == ["removed", "removed", "ended", "ended"]


def test_a_directory_that_hosts_share_is_refused(
    prefix: Path, tmp_path: Path, on_ranks: Any
) -> None:
    """There the end of a job on one host could remove what ranks on another one run from."""
    archive = pack(prefix, tmp_path / "cache")
    local = tmp_path / "local"
    local.mkdir()
    errors = on_ranks(2, lambda host: environment_host.stage(host, archive, local, "job"))
    remedy = "is shared by several hosts: set TMPDIR to a directory that each host has on a local"
    assert all(remedy in str(error) for error in errors)
    assert nothing_left(tmp_path), [*(tmp_path / "local").rglob("*")]


class OtherJob(SingleRank):
    """While hosts wait for one another, another job removes a copy."""

    def __init__(self, copy: Path) -> None:
        self.copy = copy

    @override
    def gather_json(self, value: Any, kind: Any = Any) -> list[Any]:
        shutil.rmtree(self.copy, ignore_errors=True)
        return super().gather_json(value, kind)


def test_a_copy_that_was_removed_while_others_were_made_is_one_line(
    prefix: Path, tmp_path: Path
) -> None:
    """A reservation expires; nobody notices, as this host makes none."""
    copy = staged(prefix, tmp_path, "killed")
    archive = pack(prefix, tmp_path / "cache")
    with pytest.raises(HvdtrainError, match=f"{copy} was removed by another job: start the job"):
        environment_host.stage(OtherJob(copy), archive, tmp_path / "local", "job")


class ManyHosts(SingleRank):
    """Four processes, of which others have failed."""

    @override
    def gather_json(self, value: Any, kind: Any = Any) -> list[Any]:
        return [value, ["b", "full"], ["c", "full"], ["d", "full"]]


def test_the_errors_of_many_hosts_are_one() -> None:
    with pytest.raises(HvdtrainError, match=r"^host b: full \(and 2 more hosts\)$"):
        on_all_hosts(ManyHosts(), lambda: None)
    with pytest.raises(HvdtrainError, match=r": No such file or directory \(and 3 more hosts\)$"):
        on_all_hosts(ManyHosts(), Path("/missing").stat)
