"""Jobs on one host share copies: none is incomplete, none is removed while it is used."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.commands.launch import environment_copy
from hvdtrain.commands.launch.environment import Manifest, Member
from hvdtrain.commands.launch.environment_copy import (
    DAY,
    MARK,
    START,
    LocalCopy,
    reservation,
    unpack,
)
from hvdtrain.commands.launch.environment_files import Change
from hvdtrain.commands.launch.stage_environment import HOLD
from hvdtrain.errors import UsageError
from tests.conftest import until


def copy_of(directory: Path, job: str = "job", digest: str = "abc") -> LocalCopy:
    """Return the copy of a job."""
    return LocalCopy(digest, directory, job)


def make(directory: Path, job: str = "job", digest: str = "abc") -> LocalCopy:
    """Make a copy, or share it; return it."""
    copy = copy_of(directory, job, digest)
    if copy.reserve():
        (copy.part / "file").write_text("content")
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


def test_two_jobs_at_once_wait_for_nothing(tmp_path: Path) -> None:
    """On two hosts each could have what the other one waits for."""
    first, second = copy_of(tmp_path, "one"), copy_of(tmp_path, "two")
    assert first.reserve()
    assert second.reserve()
    for copy in (second, first):
        (copy.part / "file").write_text("content")
        copy.publish()
    assert (first.folder / "file").read_text() == "content"
    assert names(first) == {"abc", "abc.job-one", "abc.job-two", "lock"}
    first.release()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_job_killed_while_it_makes_a_copy_leaves_none(tmp_path: Path) -> None:
    """The next job removes the part, not that of a job that still works on it."""
    killed = copy_of(tmp_path, "killed")
    assert killed.reserve()
    (killed.part / "file").write_text("half")
    working = copy_of(tmp_path, "working")
    assert working.reserve()
    killed._garbage.release(killed.part)  # as the kernel does it
    assert not killed.folder.exists()
    other = make(tmp_path, "other")
    assert (other.folder / "file").read_text() == "content"
    assert not killed.part.exists()
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
    assert names(other) == {"def", "def.job-other", "lock"}


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


@pytest.mark.parametrize("target", ["folder", "lock"])
def test_a_link_that_another_user_may_have_made_is_not_followed(
    target: str, tmp_path: Path
) -> None:
    copy = copy_of(tmp_path / "shared")
    outside = tmp_path / "outside"
    outside.mkdir()
    if target == "folder":
        (tmp_path / "shared").mkdir()
        copy.folder.parent.symlink_to(outside)
        with pytest.raises(UsageError, match="is not a directory of yours"):
            copy.reserve()
    else:
        copy.folder.parent.mkdir(parents=True)
        (copy.folder.parent / "lock").symlink_to(outside / "file")
        with pytest.raises(OSError, match="symbolic link"):
            copy.reserve()
    assert list(outside.iterdir()) == []


def test_others_cannot_read_or_write_the_copies(tmp_path: Path) -> None:
    copy = make(tmp_path)
    assert copy.folder.parent.stat().st_mode & 0o077 == 0


def test_a_held_lock_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_copy, "PATIENCE", 0.2)
    copy = make(tmp_path)
    with (
        environment_copy._locked(copy.folder.parent),
        pytest.raises(UsageError, match="lock is held by another process"),
    ):
        copy_of(tmp_path, "two").reserve()


def unpacked(
    part: Path,
    files: dict[str, bytes],
    *changes: Change,
    links: dict[str, str] | None = None,
    content: bytes | None = None,
) -> None:
    """Unpack files with a content, or with another one."""
    members = tuple(Member(name, len(data), 0o644, 1_000_000) for name, data in files.items())
    manifest = Manifest("abc", "/env", members, links or {}, 0, 0, "", changes=changes)
    part.mkdir()
    stream = io.BytesIO(b"".join(files.values()) if content is None else content)
    unpack(stream.read, manifest, part, Path("/tmp/copy"))


@pytest.mark.parametrize("name", ["../file", "/tmp/hvdtrain-test-file", "folder/../../file"])
def test_no_member_is_written_outside(name: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="is not in it"):
        unpacked(tmp_path / "part", {name: b""})
    with pytest.raises(OSError, match="is not in it"):
        unpacked(tmp_path / "links", {}, links={name: "/etc"})
    with pytest.raises(OSError, match="is not in it"):
        unpacked(tmp_path / "changes", {}, Change(name, "/etc"))
    assert {path.name for path in tmp_path.iterdir()} == {"part", "links", "changes"}
    assert not Path("/tmp/hvdtrain-test-file").exists()


def test_no_member_is_written_through_a_link(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File exists"):
        unpacked(tmp_path / "part", {"folder/file": b""}, links={"folder": ".."})
    assert [path.name for path in tmp_path.iterdir()] == ["part"]


@pytest.mark.parametrize(("content", "why"), [(b"abc", "ends early"), (b"abcdefgh", "too long")])
def test_an_archive_of_another_length_is_damaged(content: bytes, why: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=why):
        unpacked(tmp_path / "part", {"one": b"ab", "two": b"cde"}, content=content)


def test_files_keep_their_times_and_modes(tmp_path: Path) -> None:
    """Bytecode counts if the time of the source is the one in it."""
    unpacked(tmp_path / "part", {"a/b/one": b"ab", "two": b""}, links={"c/three": "../two"})
    status = (tmp_path / "part/a/b/one").stat()
    assert (status.st_mtime, status.st_mode & 0o777) == (1_000_000, 0o644)
    assert (tmp_path / "part/c/three").read_bytes() == b""


def adapted(part: Path, content: bytes, *changes: Change) -> bytes:
    """Return the content of a file of a copy after its changes."""
    unpacked(part, {"file": content}, *changes)
    return (part / "file").read_bytes()


def test_only_whole_names_are_replaced(tmp_path: Path) -> None:
    content = b"/home/me/env/bin:/home/me/env2:/home/me/env-data:/home/me/env\n"
    assert adapted(tmp_path / "part", content, Change("file", "/home/me/env")) == (
        b"/tmp/copy/bin:/home/me/env2:/home/me/env-data:/tmp/copy\n"
    )


def test_strings_of_binaries_keep_their_length(tmp_path: Path) -> None:
    """They end with a zero byte; where conda has filled them up, they can become longer."""
    short = Change("file", "/a/long/path/of/env", binary=True)
    content = b"\x7fELF/a/long/path/of/env/lib\0tail/a/long/path/of/env:/a/long/path/of/env\0end"
    strings = adapted(tmp_path / "part", content, short)
    assert len(strings) == len(content)
    assert [text for text in strings.split(b"\0") if text] == [
        *(b"\x7fELF/tmp/copy/lib", b"tail/tmp/copy:/tmp/copy", b"end")
    ]


def test_strings_of_binaries_grow_into_what_conda_has_filled_up(tmp_path: Path) -> None:
    content = b"/env/lib\0\0\0\0\0\0next\0"
    with pytest.raises(OSError, match="there is no space for the path /tmp/copy"):
        adapted(tmp_path / "part", content, Change("file", "/env", binary=True))
    shutil.rmtree(tmp_path / "part")
    grown = adapted(tmp_path / "part", content, Change("file", "/env", binary=True, spare=5))
    assert grown == b"/tmp/copy/lib\0next\0"
    shutil.rmtree(tmp_path / "part")
    with pytest.raises(OSError, match="there is no space"):
        adapted(tmp_path / "part", content, Change("file", "/env", binary=True, spare=4))


def test_bytecode_of_an_adapted_module_is_dropped(tmp_path: Path) -> None:
    """Of a module of the same time and size it would be used, with the old paths."""
    part, text = tmp_path / "part", b"P = '/env/path'\n"
    files = {"finder.py": text, "__pycache__/finder.cpython-311.pyc": text}
    unpacked(part, files, Change("finder.py", "/env/path"))
    assert (part / "finder.py").read_bytes() == b"P = '/tmp/copy'\n"
    assert list((part / "__pycache__").iterdir()) == []
