"""One process per host unpacks what another one reads; an error anywhere is one line."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from hvdtrain.commands.launch import environment_host
from hvdtrain.commands.launch.environment import pack
from hvdtrain.commands.launch.environment_host import Stream, _first
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
    usage = shutil.disk_usage(tmp_path)._replace(free=4095)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    error = stage(archive, tmp_path / "local")
    assert f"host {os.uname().nodename}: 4.2 KiB are needed in {tmp_path}/local" in error
    assert "4.0 KiB are free" in error
    assert nothing_left(tmp_path)


def test_a_disk_that_gets_full_is_one_line(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = pack(prefix, tmp_path / "cache")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "file")

    monkeypatch.setattr("hvdtrain.commands.launch.environment_copy._write", full)
    assert "file: No space left on device" in stage(archive, tmp_path / "local")
    assert nothing_left(tmp_path)


def test_a_disk_without_execution_is_one_line(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many sites mount /tmp so."""
    archive = pack(prefix, tmp_path / "cache")
    status = list(os.statvfs(tmp_path))
    status[8] |= os.ST_NOEXEC
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(status))
    assert "without execution (noexec)" in stage(archive, tmp_path / "local")
    assert nothing_left(tmp_path)


def test_a_host_without_flock_is_one_line(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = pack(prefix, tmp_path / "cache")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "flock is missing: install util-linux" in stage(archive, tmp_path / "local")


def test_a_local_directory_that_is_a_file_is_one_line(prefix: Path, tmp_path: Path) -> None:
    (tmp_path / "local").touch()
    error = stage(pack(prefix, tmp_path / "cache"), tmp_path / "local")
    assert "local" in error
    assert "File exists" in error or "Not a directory" in error


def test_an_archive_that_has_gone_is_one_line(prefix: Path, tmp_path: Path) -> None:
    archive = pack(prefix, tmp_path / "cache")
    archive.path.unlink()
    assert f"{archive.path}: No such file" in stage(archive, tmp_path / "local")
    assert nothing_left(tmp_path)


def test_the_errors_of_many_hosts_are_one() -> None:
    rows = [["a", ""], ["b", "full"], ["c", "full"], ["d", "full"]]
    assert _first(rows) == "host b: full (and 2 more hosts)"
    assert _first(rows[:2]) == "host b: full"
    assert _first(rows[:1]) == ""


def test_a_stream_is_read_in_any_portions_and_can_be_abandoned() -> None:
    stream, parts = Stream(), []
    writer = threading.Thread(target=lambda: [stream.put(p) for p in (b"abc", b"defgh", b"")])
    writer.start()
    while part := stream.read(2):
        parts.append(part)
    writer.join()
    assert parts == [b"ab", b"c", b"de", b"fg", b"h"]
    assert stream.read(1) == b""

    stream = Stream()
    reader = threading.Thread(target=stream.read, args=(10,))
    reader.start()
    stream.stop()
    reader.join(10)
    assert not reader.is_alive()
    for _ in range(2 * environment_host.AHEAD):
        stream.put(b"nobody reads it")


def test_a_slow_reader_does_not_stop_the_sending() -> None:
    stream, calls = Stream(), []
    for _ in range(environment_host.AHEAD):
        stream.put(b"x")

    def progress() -> None:
        calls.append(1)
        if len(calls) == 3:
            stream.stop()

    stream.put(b"y", progress)
    assert len(calls) == 3
