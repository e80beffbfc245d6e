"""Jobs on one host share copies: none is incomplete, none is removed while it is used."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.commands.launch.environment_copy import (
    DAY,
    HOLD,
    MARK,
    START,
    LocalCopy,
    reservation,
)
from hvdtrain.errors import UsageError
from tests.conftest import until


def copy_of(directory: Path, job: str = "job", digest: str = "abc") -> LocalCopy:
    """Return the copy of a job."""
    return LocalCopy(digest, directory, job)


def fill(copy: LocalCopy) -> None:
    """Write the file of a copy."""
    assert copy.part
    (copy.part / "file").write_text("content")


def make(directory: Path, job: str = "job", digest: str = "abc") -> LocalCopy:
    """Make a copy, or share it; return it."""
    copy = copy_of(directory, job, digest)
    if copy.reserve():
        fill(copy)
        copy.publish()
    return copy


def names(copy: LocalCopy) -> set[str]:
    """Return the entries of the folder with the copies."""
    return {path.name for path in copy.folder.parent.iterdir()}


def test_a_copy_is_shared_and_nothing_is_left_at_the_end(tmp_path: Path) -> None:
    first, second = make(tmp_path, "one"), copy_of(tmp_path, "two")
    assert not second.reserve()
    first.release()
    assert (second.folder / "file").read_text() == "content"
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_copy_is_kept_while_a_rank_runs_from_it(tmp_path: Path) -> None:
    copy = make(tmp_path)
    reserved = reservation(copy.folder, "job")
    with subprocess.Popen([*HOLD, str(copy.folder), str(reserved), "sleep", "60"]) as rank:
        try:
            until(lambda: not reserved.exists())
            copy.release()
            assert (copy.folder / "file").exists()
            assert not copy_of(tmp_path, "two").reserve()
        finally:
            rank.kill()
    copy_of(tmp_path, "two").release()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_without_a_copy_does_not_start(tmp_path: Path) -> None:
    line = [*HOLD, str(tmp_path / "gone"), str(tmp_path / "gone.job-1"), "touch", "started"]
    assert subprocess.run(line, cwd=tmp_path, stderr=subprocess.DEVNULL).returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_ends_leaves_the_copy_of_one_that_is_about_to_start_its_ranks(
    tmp_path: Path,
) -> None:
    """Between the staging and the start of its ranks a job holds no lock."""
    starting = make(tmp_path, "starting")
    make(tmp_path, "other", "def").release()
    ending = make(tmp_path, "ending")
    ending.release()
    assert (starting.folder / "file").exists()
    starting.release()
    assert list(tmp_path.iterdir()) == []


def test_a_reservation_is_renewed_when_all_hosts_have_their_copy(tmp_path: Path) -> None:
    """Until then it may have expired: other hosts may unpack for long."""
    starting = make(tmp_path, "starting")
    os.utime(reservation(starting.folder, "starting"), (time.time() - START - 1,) * 2)
    starting.keep()
    make(tmp_path, "ending").release()
    assert (starting.folder / "file").exists()


def test_two_jobs_at_once_wait_for_nothing(tmp_path: Path) -> None:
    """On two hosts each could have what the other one waits for."""
    first, second = copy_of(tmp_path, "one"), copy_of(tmp_path, "two")
    assert first.reserve()
    assert second.reserve()
    for copy in (second, first):
        fill(copy)
        copy.publish()
    assert (first.folder / "file").read_text() == "content"
    assert names(first) == {"abc", "abc.job-one", "abc.job-two"}
    first.release()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_job_killed_while_it_makes_a_copy_leaves_none(tmp_path: Path) -> None:
    """The next job removes the part, not that of a job that still works on it."""
    killed = copy_of(tmp_path, "killed")
    assert killed.reserve()
    fill(killed)
    working = copy_of(tmp_path, "working")
    assert working.reserve()
    killed._unlock()  # as the kernel does it
    assert not killed.folder.exists()
    other = make(tmp_path, "other")
    assert (other.folder / "file").read_text() == "content"
    assert killed.part
    assert not killed.part.exists()
    assert working.part
    assert working.part.exists()


def test_a_job_killed_while_it_removes_a_copy_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = make(tmp_path)

    def killed(folder: Path, **_: Any) -> None:
        (folder / "file").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            copy.release()
    assert not copy.folder.exists()
    assert copy_of(tmp_path, "next").reserve()


def test_a_copy_of_a_killed_job_is_used_by_the_next_one_and_removed_by_others(
    tmp_path: Path,
) -> None:
    copy = make(tmp_path, "killed")
    assert not copy_of(tmp_path, "again").reserve()
    for path in copy.folder.parent.glob("*.job-*"):
        os.utime(path, (time.time() - START - 1,) * 2)
    other = make(tmp_path, "other", "def")
    assert names(other) == {"def", "def.job-other"}


@pytest.mark.parametrize("why", ["another boot", "a day", "no mark"])
def test_a_copy_that_may_lack_files_is_not_used(why: str, tmp_path: Path) -> None:
    """A crash loses the content of files, and a service that cleans /tmp removes old ones."""
    copy = make(tmp_path)
    mark = copy.folder / MARK
    if why == "another boot":
        mark.write_text("another")
    elif why == "a day":
        os.utime(mark, (time.time() - DAY - 1,) * 2)
    else:
        mark.unlink()
    assert copy_of(tmp_path, "next").reserve()


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    """Nobody would remove it."""
    copy = copy_of(tmp_path / "missing")
    with pytest.raises(UsageError, match="missing is not a directory: set TMPDIR to"):
        copy.reserve()
    copy.release()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS has none for directories."""

    def refuse(*_: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UsageError, match=r"cannot be locked \(Bad file descriptor\): set TMPDIR"):
        copy_of(tmp_path).reserve()
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_another_user_may_have_made_is_not_followed(tmp_path: Path) -> None:
    copy = copy_of(tmp_path / "shared")
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "shared").mkdir()
    copy.folder.parent.symlink_to(outside)
    with pytest.raises(UsageError, match="is not a directory of yours"):
        copy.reserve()
    assert list(outside.iterdir()) == []


def test_others_cannot_read_or_write_the_copies(tmp_path: Path) -> None:
    root = copy_of(tmp_path).folder.parent
    root.mkdir(mode=0o755)
    make(tmp_path)
    assert root.stat().st_mode & 0o077 == 0
