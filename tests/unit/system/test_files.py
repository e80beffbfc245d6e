"""Output files named by the user keep their type and are replaced only by complete files."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from hvdtrain.config.options import Options
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.steps.checkpoint_files import Checkpoint
from hvdtrain.steps.summary import Summary
from hvdtrain.system.files import (
    MAX_READ,
    Output,
    cache_root,
    check_folder,
    check_writable,
    read_regular,
    replacing,
)
from hvdtrain.system.folder import Folder
from hvdtrain.system.output import plots
from hvdtrain.training.progress import Progress
from tests.saves import save


def write(path: Path, data: bytes) -> None:
    """Write ``data`` as the verbs write a page."""
    with replacing(path, "--out") as file:
        file.write(data)


def device(path: Path, minor: int) -> Path:
    """Create a device like /dev/null (minor 3) or /dev/full (7)."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
    except PermissionError:
        pytest.skip("making a device needs root")
    return path


def test_a_file_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "out"
    write(path, b"old")
    path.chmod(0o640)
    before = path.stat().st_ino
    write(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_ino != before
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("mask", [0o027, 0o077, 0o002])
def test_new_files_have_the_mode_of_the_umask(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write(tmp_path / "out", b"new")
        arrays = {"weight": np.zeros(2)}
        save(tmp_path / "saved", Checkpoint(arrays, arrays, {"step": 1, "metrics": None}), keep=1)
        assert Folder.named(tmp_path).own("own")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(files) == 4 and len(folders) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~mask}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o777 & ~mask}


def test_a_folder_that_another_user_may_have_made_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, folder = tmp_path / "link", Folder.named(tmp_path / "new")
    for _ in range(2):
        assert folder.own("ours").path == tmp_path / "new" / "ours"
    for target in (tmp_path / "new", tmp_path / "nowhere"):
        link.symlink_to(target)
        with pytest.raises(UsageError, match="link is not a directory of yours"):
            Folder.named(tmp_path).own("link")
        link.unlink()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file is not a directory of yours"):
        Folder.named(tmp_path).own("file")
    assert not (tmp_path / "nowhere").exists()
    if os.geteuid() == 0:
        os.chown(tmp_path / "new" / "ours", 65534, 65534)
        with pytest.raises(UsageError, match="ours is not a directory of yours"):
            folder.own("ours")
    denied = Mock(side_effect=PermissionError)  # it is of mode 0700
    monkeypatch.setattr(Folder, "enter", denied)
    with pytest.raises(UsageError, match="ours is not a directory of yours"):
        folder.own("ours")


def test_cache_root() -> None:
    assert cache_root({"HVDTRAIN_CACHE": "/c", "XDG_CACHE_HOME": "/x"}) == Path("/c")
    assert cache_root({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/hvdtrain")
    assert cache_root({"HOME": "/h"}) == Path("/h/.cache/hvdtrain")


def test_a_file_system_that_changes_the_owner_of_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1 + tmp_path.stat().st_uid)  # as seen by the user
    for _ in range(2):
        Folder.named(tmp_path).own("new")
    assert not list((tmp_path / "new").iterdir())


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    write(path, b"old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"half of the new")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed(tmp_path: Path, there: bool) -> None:
    target, link = tmp_path / "real" / "target", tmp_path / "link"
    target.parent.mkdir()
    if there:
        target.write_bytes(b"old")
    link.symlink_to(Path("real") / "target")
    check_writable(link, "--out")
    write(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert [path.name for path in target.parent.iterdir()] == ["target"]
    output = Output(link)
    output.append(b", more")
    output.close()
    assert target.read_bytes() == b"new, more"


def test_broken_and_circular_links_are_reported(tmp_path: Path) -> None:
    nowhere, itself = tmp_path / "nowhere", tmp_path / "itself"
    nowhere.symlink_to(tmp_path / "absent" / "file")
    itself.symlink_to(itself)
    for path in (nowhere, itself):
        for action in (lambda path: check_writable(path, "--out"), lambda path: write(path, b"")):
            with pytest.raises(UsageError, match=f"--out {path}"):
                action(path)


def test_a_device_stays_a_device(tmp_path: Path) -> None:
    null = device(tmp_path / "null", 3)
    check_writable(null, "--summary")
    write(null, b"gone")
    Output(null).append(b"gone")
    Progress(Options(quiet=True, summary=null)).end("", [], Summary(train_loss=1.0))
    assert stat.S_ISCHR(null.stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["null"]


def test_a_full_device_is_reported(tmp_path: Path) -> None:
    full = device(tmp_path / "full", 7)
    with pytest.raises(HvdtrainError, match=f"--out {full} cannot be written: No space left"):
        write(full, b"too much")
    with pytest.raises(HvdtrainError, match=f"--metrics {full} cannot be written: No space left"):
        Progress(Options(quiet=True, metrics=full)).epoch({"epoch": 0, "loss": 1.0})


def test_a_pipe_with_a_reader_is_written_to(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    check_writable(pipe, "--summary")  # must not open it, or the reader would see end of file
    show = None
    while show is None:
        try:
            show = Progress(Options(quiet=True, summary=pipe))
        except UsageError:  # the reader has not opened it yet
            continue
    show.end("", [], Summary(train_loss=0.5))
    reader.join(timeout=20)
    assert json.loads(read[0])["train_loss"] == 0.5
    assert pipe.is_fifo()


def test_a_pipe_without_a_reader_is_reported_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for option in ("summary", "metrics"):
        with pytest.raises(UsageError, match=f"--{option} {pipe}.*no reader"):
            Progress(Options(quiet=True, **{option: pipe}))
    with pytest.raises(UsageError, match="no reader"):
        write(pipe, b"")
    with pytest.raises(OSError, match="not a regular file"):
        read_regular(pipe)


def test_standard_output_by_its_name_keeps_its_content(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from hvdtrain.system.files import replacing\n"
        "print('before', flush=True)\n"
        "with replacing(Path('/dev/stdout')) as file: file.write(b'within\\n')\n"
        "print('after')"
    )
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True, timeout=60)
    assert (tmp_path / "out").read_text() == "before\nwithin\nafter\n"


def test_a_plot_follows_links(tmp_path: Path) -> None:
    import matplotlib.pyplot as plt

    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "plot.pdf").symlink_to(elsewhere)
    plots.style()
    plots.save(plt.figure(), tmp_path / "plot")
    assert (tmp_path / "plot.pdf").is_symlink()
    assert elsewhere.read_bytes().startswith(b"%PDF-")


def test_an_output_file_is_checked_in_advance(tmp_path: Path) -> None:
    check_writable(None, "--summary")
    check_writable(tmp_path / "new" / "folder" / "s.json", "--summary")
    assert (tmp_path / "new" / "folder").is_dir()
    assert not (tmp_path / "new" / "folder" / "s.json").exists()
    with pytest.raises(UsageError, match="--summary"):
        check_writable(tmp_path, "--summary")  # a directory
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="--summary"):
        check_writable(tmp_path / "file" / "s.json", "--summary")


def test_an_output_folder_is_checked_in_advance(tmp_path: Path) -> None:
    check_folder(tmp_path / "new" / "folder", "--profile-dir")
    assert not list(tmp_path.iterdir())
    # Root may enter every directory: another error of the file system.
    with pytest.raises(UsageError, match="--profile-dir: File name too long"):
        check_folder(tmp_path / ("x" * 300) / "folder", "--profile-dir")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_reported(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="--summary"):
        check_writable(tmp_path / "s.json", "--summary")


def test_a_file_with_more_bytes_than_memory_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    path.touch()
    os.truncate(path, MAX_READ + 1)
    with pytest.raises(OSError, match="more than 268,435,456 bytes"):
        read_regular(path)
