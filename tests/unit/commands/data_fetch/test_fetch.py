"""Datasets over HTTP, from a local server with the faults of real ones."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hvdtrain import cli
from hvdtrain.commands.data_fetch import fetch as fetching
from hvdtrain.commands.data_fetch.catalogue import DATA_SETS, DataSet, Files, Remote, members
from hvdtrain.commands.data_fetch.fetch import Fetch
from hvdtrain.errors import HvdtrainError, UsageError
from tests.conftest import SHARED

NAMED = {data_set.name: data_set for data_set in DATA_SETS}


class Server(ThreadingHTTPServer):
    """Serves ``files``, with the faults that a test requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, int]] = []  # names and first bytes
        self.breaks_after: list[int] = []  # bytes, per response
        self.ranges = self.sends_length = True
        self.status = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        first = int(self.headers.get("Range", "bytes=0-")[6:].rstrip("-"))
        self.server.requests.append((name, first))
        if self.server.status or name not in self.server.files:
            self.send_error(self.server.status or 404)
            return
        content = self.server.files[name]
        if self.server.ranges:
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
            sent = content[first:]
        else:
            self.send_response(200)
            sent = content
        if self.server.sends_length:
            self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        if self.server.breaks_after:
            sent = sent[: self.server.breaks_after.pop(0)]
        self.wfile.write(sent)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(fetching, "LONGEST_PAUSE", 0.01)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def remote_of(name: str, content: bytes, holds: tuple[str, ...], *, known: bool = True) -> Remote:
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest() if known else ""
    return Remote(f"http://nowhere.invalid/{name}", len(content), holds, md5)


def served(
    server: Server, like: str, known: bool, **files: tuple[bytes, tuple[str, ...]]
) -> DataSet:
    """Return a dataset in the format of ``like``, with files on the server."""
    remotes = []
    for word, (content, holds) in files.items():
        name = word.replace("__", ".")
        server.files[name] = content
        remotes.append(remote_of(name, content, holds, known=known))
    return dataclasses.replace(NAMED[like], remotes=tuple(remotes))


def zipped(contents: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return file.getvalue()


def tarred(contents: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def files_below(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".data-fetch" not in path.parts
    }


NOISE = np.random.default_rng(0).bytes(100_000)


def test_an_interrupted_download_is_continued(server: Server, tmp_path: Path) -> None:
    data_set = served(server, "mnist", True, a__gz=(NOISE, ("a.gz",)))
    server.breaks_after = [30_000, 0, 0, 50_000]
    Fetch(data_set, tmp_path, server.url).run()
    assert files_below(tmp_path) == {"a.gz": NOISE}
    firsts = [0, 30_000, 30_000, 30_000, 80_000]
    assert server.requests == [("a.gz", first) for first in firsts]
    assert not Fetch(data_set, tmp_path, server.url).missing()


def test_an_interrupted_download_is_continued_by_the_next_run(
    server: Server, tmp_path: Path
) -> None:
    data_set = served(server, "mnist", True, a__gz=(NOISE, ("a.gz",)))
    server.breaks_after = [30_000, *[0] * fetching.TRIES]
    with pytest.raises(
        HvdtrainError, match=r"a\.gz cannot be downloaded \(the connection was closed"
    ):
        Fetch(data_set, tmp_path, server.url).run()
    assert len(server.requests) == 1 + fetching.TRIES
    assert files_below(tmp_path) == {}
    Fetch(data_set, tmp_path, server.url).run()
    assert files_below(tmp_path) == {"a.gz": NOISE}
    assert server.requests[-1] == ("a.gz", 30_000)


def test_a_server_without_ranges_is_supported(server: Server, tmp_path: Path) -> None:
    data_set = served(server, "mnist", True, a__gz=(NOISE, ("a.gz",)))
    server.ranges, server.breaks_after = False, [60_000]
    Fetch(data_set, tmp_path, server.url).run()
    assert files_below(tmp_path) == {"a.gz": NOISE}


def test_a_file_with_another_checksum_is_rejected(server: Server, tmp_path: Path) -> None:
    data_set = served(server, "mnist", True, a__gz=(NOISE, ("a.gz",)))
    server.files["a.gz"] = NOISE[::-1]
    with pytest.raises(HvdtrainError, match="MD5"):
        Fetch(data_set, tmp_path, server.url).run()
    server.files["a.gz"] = NOISE
    Fetch(data_set, tmp_path, server.url).run()
    assert files_below(tmp_path) == {"a.gz": NOISE}


def test_a_file_of_another_size_is_rejected(server: Server, tmp_path: Path) -> None:
    data_set = served(server, "mnist", True, a__gz=(NOISE, ("a.gz",)))
    server.files["a.gz"] = NOISE + b"."
    for server.ranges in (True, False):
        with pytest.raises(
            HvdtrainError, match=r"expected 100,000 bytes, but the server reports .*100001"
        ):
            Fetch(data_set, tmp_path, server.url).run()
    assert files_below(tmp_path) == {}


@pytest.mark.parametrize("status", [403, 404])
def test_an_http_error_is_not_retried(server: Server, status: int, tmp_path: Path) -> None:
    data_set = served(server, "mnist", True, a__gz=(NOISE, ("a.gz",)))
    server.status = status
    with pytest.raises(HvdtrainError, match=f"HTTP error {status}"):
        Fetch(data_set, tmp_path, server.url).run()
    assert len(server.requests) == 1


def test_a_missing_network_is_not_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(HvdtrainError, match=r"cannot be downloaded \(.*https_proxy"):
        Fetch(NAMED["mnist"], tmp_path, "http://127.0.0.1:9").run()  # the port "discard"


def test_an_image_folder_is_unpacked_from_a_tar(server: Server, tmp_path: Path) -> None:
    content = tarred(
        {
            "imagenette2/val/n01/1.JPEG": b"val",
            "imagenette2/train/n01/2.JPEG": b"train",
            "imagenette2/noisy.csv": b"",
        }
    )
    data_set = served(server, "imagenette", True, i__tgz=(content, ("train", "val")))
    Fetch(data_set, tmp_path, server.url).run()
    assert files_below(tmp_path) == {"train/n01/2.JPEG": b"train", "val/n01/1.JPEG": b"val"}
    assert [path.name for path in (tmp_path / ".data-fetch" / "imagenette").iterdir()] == [
        "i.tgz.json"
    ]


def test_coco_is_unpacked_from_zips(server: Server, tmp_path: Path) -> None:
    notes = ("annotations/instances_val2017.json", "annotations/captions_val2017.json")
    data_set = served(
        server,
        "coco",
        False,
        a__zip=(zipped(dict.fromkeys(notes, b"{}")), ("annotations",)),
        v__zip=(zipped({"val2017/": b"", "val2017/000000000007.jpg": b"jpeg"}), ("val2017",)),
    )
    Fetch(data_set, tmp_path, server.url).run()
    assert list(files_below(tmp_path)) == [notes[0], "val2017/000000000007.jpg"]


def test_a_damaged_zip_is_downloaded_again(server: Server, tmp_path: Path) -> None:
    right = zipped({"val2017/7.jpg": NOISE})
    data_set = served(server, "coco", False, v__zip=(right, ("val2017",)))
    wrong = bytearray(right)
    wrong[len(right) // 2] ^= 1
    server.files["v.zip"] = bytes(wrong)
    with pytest.raises(HvdtrainError, match="cannot be unpacked"):
        Fetch(data_set, tmp_path, server.url).run()
    assert files_below(tmp_path) == {}
    server.files["v.zip"] = right
    Fetch(data_set, tmp_path, server.url).run()
    assert files_below(tmp_path) == {"val2017/7.jpg": NOISE}


def test_cifar10_becomes_an_image_folder(server: Server, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 3, 32, 32), np.uint8)
    records = [bytes([label]) + image.tobytes() for label, image in enumerate(pixels[:10])]
    more = [bytes([9]) + image.tobytes() for image in pixels[10:]]
    content = tarred(
        {
            "cifar-10-batches-bin/data_batch_2.bin": b"".join(records),
            "cifar-10-batches-bin/test_batch.bin": b"".join(more),
            "cifar-10-batches-bin/readme.html": b"",
        }
    )
    data_set = served(server, "cifar10", True, c__gz=(content, ("train", "val")))
    Fetch(data_set, tmp_path, server.url).run()
    assert len(files_below(tmp_path)) == 12
    with Image.open(tmp_path / "train" / "cat" / "2-00003.png") as image:
        assert (np.asarray(image) == pixels[3].transpose(1, 2, 0)).all()
    with Image.open(tmp_path / "val" / "truck" / "0-00001.png") as image:
        assert (np.asarray(image) == pixels[11].transpose(1, 2, 0)).all()


@pytest.mark.parametrize("name", ["train/../../../../evil", "/EVIL"])
def test_members_outside_the_folder_are_rejected(server: Server, name: str, tmp_path: Path) -> None:
    name = name.replace("/EVIL", f"{tmp_path}/evil")
    content = tarred({"train/n/1.jpg": b"", name: b""})
    data_set = served(server, "imagenette", True, i__tgz=(content, ("train",)))
    bare = dataclasses.replace(data_set, files=members)
    with pytest.raises(HvdtrainError, match="evil is outside"):
        Fetch(bare, tmp_path / "in", server.url).run()
    assert not (tmp_path / "evil").exists()


def test_existing_files_are_not_overwritten(server: Server, tmp_path: Path) -> None:
    data_set = served(server, "mnist", True, a__gz=(NOISE, ("a.gz",)))
    (tmp_path / "a.gz").write_text("mine")
    with pytest.raises(UsageError, match=r"a\.gz exists and would be overwritten"):
        Fetch(data_set, tmp_path, server.url).run()
    assert (tmp_path / "a.gz").read_text() == "mine"
    assert not server.requests


def test_too_little_space_or_no_directory_is_rejected(tmp_path: Path) -> None:
    huge = dataclasses.replace(NAMED["coco"].remotes[0], size=2**60)
    with pytest.raises(UsageError, match=r"needs up to .* GiB, and .* GiB are free"):
        Fetch(dataclasses.replace(NAMED["coco"], remotes=(huge,)), tmp_path / "new").run()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="not a writable directory"):
        Fetch(NAMED["mnist"], tmp_path / "file").run()


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_an_installation_that_was_killed_is_completed(
    server: Server, moved: int, tmp_path: Path
) -> None:
    """After SIGKILL, the next run moves the unpacked files, without a download."""
    content = tarred({"i/train/n/1.jpg": b"1", "i/val/n/2.jpg": b"2"})
    data_set = served(server, "imagenette", True, i__tgz=(content, ("train", "val")))
    unpacked = tmp_path / ".data-fetch" / "imagenette" / "i.tgz.unpacked"
    for index, (name, text) in enumerate({"train": "1", "val": "2"}.items()):
        folder = (tmp_path if index < moved else unpacked) / name / "n"
        folder.mkdir(parents=True)
        (folder / f"{text}.jpg").write_text(text)
    unpacked.mkdir(parents=True, exist_ok=True)
    Fetch(data_set, tmp_path, server.url).run()
    assert files_below(tmp_path) == {"train/n/1.jpg": b"1", "val/n/2.jpg": b"2"}
    assert not server.requests
    assert not unpacked.exists()


def test_a_killed_download_is_continued(server: Server, tmp_path: Path) -> None:
    """After SIGKILL of another process, the next one continues, and acquires the lock."""
    data_set = served(server, "mnist", True, a__gz=(NOISE, ("a.gz",)))
    server.breaks_after = [40_000, 0]
    program = f"""
import os, signal
from pathlib import Path
from hvdtrain.commands.data_fetch import fetch  # whose pause between two tries ends the process
from hvdtrain.commands.data_fetch.catalogue import DataSet, Remote, unchanged
fetch.time.sleep = lambda seconds: os.kill(os.getpid(), signal.SIGKILL)
remote = {data_set.remotes[0]!r}
data_set = DataSet("mnist", "", "", (remote,), unchanged)
fetch.Fetch(data_set, Path({str(tmp_path)!r}), {server.url!r}).run()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], env=os.environ, capture_output=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    Fetch(data_set, tmp_path, server.url).run()
    assert server.requests[-1] == ("a.gz", 40_000)
    assert files_below(tmp_path) == {"a.gz": NOISE}


def test_parallel_runs_download_once(server: Server, tmp_path: Path) -> None:
    data_set = served(server, "mnist", True, a__gz=(NOISE, ("a.gz",)))
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(Fetch(data_set, tmp_path, server.url).run) for _ in range(2)]
    assert [run.result() for run in runs] == [None, None]
    assert files_below(tmp_path) == {"a.gz": NOISE}
    assert server.requests == [("a.gz", 0)]


def test_datasets_do_not_overwrite_each_others_files(server: Server, tmp_path: Path) -> None:
    first = served(server, "mnist", True, a__gz=(NOISE, ("a.gz",)))
    Fetch(first, tmp_path, server.url).run()
    second = served(server, "fashion-mnist", True, a__gz=(NOISE[::-1], ("a.gz",)))
    with pytest.raises(UsageError, match=r"a\.gz exists and would be overwritten"):
        Fetch(second, tmp_path, server.url).run()
    assert files_below(tmp_path) == {"a.gz": NOISE}


def test_files_created_meanwhile_are_not_overwritten(server: Server, tmp_path: Path) -> None:
    def files(path: Path) -> Files:
        (tmp_path / "a.gz").write_text("mine")
        yield path.name, io.BytesIO(b"theirs")

    data_set = served(server, "mnist", True, a__gz=(NOISE, ("a.gz",)))
    with pytest.raises(UsageError, match="would be overwritten"):
        Fetch(dataclasses.replace(data_set, files=files), tmp_path, server.url).run()
    assert files_below(tmp_path) == {"a.gz": b"mine"}


def test_removed_files_are_downloaded_again(server: Server, tmp_path: Path) -> None:
    data_set = served(server, "mnist", True, a__gz=(NOISE, ("a.gz",)), b__gz=(b"b", ("b.gz",)))
    Fetch(data_set, tmp_path, server.url).run()
    (tmp_path / "a.gz").unlink()
    assert not Fetch(data_set, tmp_path, server.url).is_done
    Fetch(data_set, tmp_path, server.url).run()
    assert files_below(tmp_path) == {"a.gz": NOISE, "b.gz": b"b"}
    assert [name for name, _ in server.requests] == ["a.gz", "b.gz", "a.gz"]


def test_files_of_a_killed_run_are_removed(server: Server, tmp_path: Path) -> None:
    """Runs killed while unpacking, and before removing temporary files."""
    data_set = served(server, "mnist", True, a__gz=(NOISE, ("a.gz",)))
    fetch = Fetch(data_set, tmp_path, server.url)
    work = tmp_path / ".data-fetch" / "mnist"
    (work / "a.gz.unpacking").mkdir(parents=True)
    (work / "a.gz.unpacking" / "a.gz").write_bytes(NOISE[:1000])
    (work / "a.gz").write_bytes(NOISE)
    assert fetch.room() == 110_000
    fetch.run()
    assert not server.requests
    (work / "a.gz").write_bytes(NOISE)
    assert not fetch.is_done
    fetch.run()
    assert fetch.is_done
    assert fetch.room() == 0


def test_a_busy_server_is_retried(server: Server, tmp_path: Path) -> None:
    data_set = served(server, "mnist", True, a__gz=(NOISE, ("a.gz",)))
    server.status = 503
    with pytest.raises(HvdtrainError, match=r"cannot be downloaded \(503 Service Unavailable"):
        Fetch(data_set, tmp_path, server.url).run()
    assert len(server.requests) == fetching.TRIES


def test_a_response_of_unknown_size_is_rejected(server: Server, tmp_path: Path) -> None:
    data_set = served(server, "mnist", True, a__gz=(NOISE, ("a.gz",)))
    server.sends_length = server.ranges = False
    with pytest.raises(HvdtrainError, match="an unknown size"):
        Fetch(data_set, tmp_path, server.url).run()
    server.sends_length = True
    Fetch(data_set, tmp_path, server.url).run()
    assert files_below(tmp_path) == {"a.gz": NOISE}


def test_a_zip_with_an_unknown_method_is_rejected(server: Server, tmp_path: Path) -> None:
    content = bytearray(zipped({"val2017/000000000007.jpg": b"jpeg"}))
    content[content.index(b"PK\1\2") + 10] = 77  # the compression method, in the directory
    data_set = served(server, "coco", False, v__zip=(bytes(content), ("val2017",)))
    with pytest.raises(HvdtrainError, match="cannot be unpacked"):
        Fetch(data_set, tmp_path, server.url).run()
    assert [path.name for path in (tmp_path / ".data-fetch" / "coco").iterdir()] == [
        "v.zip.unpacking"
    ]


def test_the_command_downloads_mnist(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real files have the sizes and checksums of the catalogue."""
    real = SHARED / "data" / "mnist"
    if not real.is_dir():
        pytest.skip(f"{real} does not exist")
    server.files = {path.name: path.read_bytes() for path in real.glob("*.gz")}
    words = ["data-fetch", "mnist", "--to", str(tmp_path / "m"), "--mirror", f"{server.url}/mnist/"]
    assert cli.main([*words, "--dry-run", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [file["bytes"] for file in data["files"]] == [9_912_422, 28_881, 1_648_877, 4_542]
    assert not (tmp_path / "m").exists()
    assert cli.main(words) == 0
    trains = f"train on it: hvdtrain launch -n 2 -- python -m hvdtrain.mnist --data {tmp_path}/m"
    assert capsys.readouterr().out == f"mnist is in {tmp_path}/m\n{trains}\n"
    assert files_below(tmp_path / "m") == server.files
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"mnist is in {tmp_path}/m already\n{trains}\n"
    assert len(server.requests) == 4


def test_a_mirror_must_be_an_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data-fetch", "mnist", "--to", str(tmp_path), "--mirror", "/srv/mnist"]
    assert cli.main(words) == 2
    assert "--mirror /srv/mnist: must be an address" in capsys.readouterr().err


def test_a_directory_name_that_is_too_long_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--dry-run"]):
        assert cli.main(["data-fetch", "mnist", "--to", "x" * 300, *words]) == 2
        assert "File name too long" in capsys.readouterr().err
