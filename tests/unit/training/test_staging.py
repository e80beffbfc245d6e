"""The copy of packed data on a host: whole, verified, and made once."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hvdtrain.commands.pack.packing import Packing
from hvdtrain.commands.pack.source import PackOptions
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.files import lock
from hvdtrain.system.folder import Folder
from hvdtrain.training.staging import Copy
from hvdtrain.workloads.data.image_folder import load
from hvdtrain.workloads.data.packed import INDEX
from tests.conftest import error_of, flipped, unmeasured


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Packed data of twelve shards."""
    for split in ("train", "val"):
        for number in range(12):
            path = tmp_path / "folder" / split / "ab"[number % 2] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes([number]) * 9000)
    Packing(tmp_path / "folder", tmp_path / "data", PackOptions(2**15, workers=1)).run()
    return tmp_path / "data"


def staged(data: Path, directory: Path) -> Copy:
    copy = Copy(data, directory)
    copy.thread.start()
    copy.thread.join()
    copy.raise_error()
    return copy


def refusal(data: Path, directory: Path) -> str:
    message = error_of(staged, data, directory, kind=HvdtrainError)
    assert not list(directory.glob(f"*/{INDEX}"))
    return message


def test_it_is_the_data_and_made_once(data: Path, tmp_path: Path) -> None:
    first = staged(data, tmp_path / "disk" / "deep")
    assert first.done == first.copied == first.size
    assert first.folder.parent == tmp_path / "disk" / "deep"
    names = {path.name for path in data.iterdir() if path.is_file()}
    assert {path.name for path in first.folder.iterdir()} == {*names, "lock"}
    for name in names:
        assert (first.folder / name).read_bytes() == (data / name).read_bytes()
    again = staged(data, tmp_path / "disk" / "deep")
    assert (again.folder, again.copied, again.done) == (first.folder, 0, first.size)


def test_other_data_of_the_same_name_go_elsewhere(data: Path, tmp_path: Path) -> None:
    first = staged(data, tmp_path / "disk")
    changed = tmp_path / "other" / data.name
    (tmp_path / "folder" / "train" / "a" / "0.jpg").write_bytes(b"new")
    Packing(tmp_path / "folder", changed, PackOptions(2**15, workers=1)).run()
    assert staged(changed, tmp_path / "disk").folder != first.folder


def test_only_damaged_shards_are_copied_again(data: Path, tmp_path: Path) -> None:
    first = staged(data, tmp_path / "disk")
    shards = sorted(first.folder.glob("*.tar"))
    shards[0].write_bytes(flipped(shards[0].read_bytes(), 3000))
    shards[1].unlink()
    shards[2].write_bytes(b"")
    again = staged(data, tmp_path / "disk")
    wanted = sum((data / path.name).stat().st_size for path in shards[:3])
    assert again.copied == wanted
    assert shards[0].read_bytes() == (data / shards[0].name).read_bytes()
    load(again.folder)


KILLED = """
import hashlib, os, signal, sys
from pathlib import Path
from hvdtrain.training import staging
fetch, done = staging.Copy._fetch, 0
def then(self, shard):
    global done
    done += 1
    if done == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    fetch(self, shard)
staging.Copy._fetch, staging.AT_ONCE = then, 1
copy = staging.Copy(Path(sys.argv[1]), Path(sys.argv[2]))
copy.thread.start()
copy.thread.join()
"""


def test_killed_in_the_middle_and_again(data: Path, tmp_path: Path) -> None:
    line = [sys.executable, "-c", KILLED, str(data), str(tmp_path / "disk")]
    assert subprocess.run(line, env=unmeasured(), timeout=60).returncode == -9
    (folder,) = (tmp_path / "disk").iterdir()
    assert not (folder / INDEX).exists()
    there = {path.name for path in folder.glob("*.tar")}
    assert len(there) == 4
    copy = staged(data, tmp_path / "disk")
    assert copy.copied == copy.size - sum((data / name).stat().st_size for name in there)
    for original, copied in zip(load(data), load(copy.folder), strict=True):
        assert original is not None
        assert copied is not None
        assert original.digest == copied.digest


def test_another_session_does_not_keep_it_from_ending(data: Path, tmp_path: Path) -> None:
    copy = Copy(data, tmp_path / "disk")
    copy.folder.mkdir(parents=True)
    with lock(Folder.named(copy.folder), "copies data to this folder"):
        copy.thread.start()
        stopping = threading.Thread(target=copy.stop, daemon=True)
        stopping.start()
        stopping.join(20)
        assert not stopping.is_alive()
        assert copy.thread.is_alive()  # it waits for the lock
    copy.thread.join(20)
    assert not copy.thread.is_alive()
    assert not list(copy.folder.glob("*.tar*"))


def test_a_link_in_a_shared_directory_is_not_followed(data: Path, tmp_path: Path) -> None:
    copy = Copy(data, tmp_path / "shared")
    (tmp_path / "elsewhere").mkdir()
    copy.folder.parent.mkdir()
    copy.folder.symlink_to(tmp_path / "elsewhere")
    assert f"{copy.folder} is not a directory of yours" in refusal(data, tmp_path / "shared")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_obstacles_are_reported(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="no such directory"):
        Copy(tmp_path / "absent", tmp_path / "disk")
    with pytest.raises(UsageError, match=rf"run `hvdtrain pack {tmp_path}/folder OUT`"):
        Copy(tmp_path / "folder", tmp_path / "disk")
    assert f"--stage {data / INDEX / 'x'}: " in refusal(data, data / INDEX / "x")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: type("Free", (), {"free": 5000})())
        assert "4.9 KiB are free: " in refusal(data, tmp_path / "full")
    shard = data / "val-000001.tar"
    content = flipped(shard.read_bytes(), 2000)
    shard.write_bytes(content)
    assert f"{shard} is damaged (its SHA-256" in refusal(data, tmp_path / "disk")
    shard.write_bytes(content[:512])
    with pytest.raises(UsageError, match="has 512 bytes"):
        Copy(data, tmp_path / "disk")
