"""Datasets over HTTP, from a local server with the faults of real ones."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import re
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from PIL import Image

from hvdtrain import cli
from hvdtrain.commands.data_fetch import fetch as fetching
from hvdtrain.commands.data_fetch.catalogue import DATA_SETS, DataSet, Files, Remote, members
from hvdtrain.commands.data_fetch.fetch import Fetch
from hvdtrain.errors import HvdtrainError, UsageError
from tests.conftest import SHARED, flipped

NOISE = np.random.default_rng(0).bytes(100_000)
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
    monkeypatch.setattr(fetching, "MAX_PAUSE", 0.01)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def served(server: Server, like: str, *files: tuple[str, bytes, tuple[str, ...]]) -> DataSet:
    """Return a dataset in the format of ``like``; its files are (name, content, holds)."""
    remotes = []
    for name, content, holds in files:
        server.files[name] = content
        md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
        remotes.append(Remote(f"http://nowhere.invalid/{name}", len(content), holds, md5))
    return dataclasses.replace(NAMED[like], remotes=tuple(remotes))


@pytest.fixture
def one_file(server: Server, tmp_path: Path) -> Callable[[], Fetch]:
    """Return a function that returns a new fetch of one file of 100,000 bytes."""
    data_set = served(server, "mnist", ("a.gz", NOISE, ("a.gz",)))
    return functools.partial(Fetch, data_set, tmp_path, server.url)


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


def test_every_download_has_a_checksum() -> None:
    sums = [remote.md5 for data_set in DATA_SETS for remote in data_set.remotes]
    assert len(set(sums)) == len(sums) == 13
    assert all(re.fullmatch("[0-9a-f]{32}", md5) for md5 in sums)


@pytest.mark.parametrize(
    ("ranges", "breaks_after", "firsts"),
    [
        (True, [30_000, 0, 0, 50_000], [0, 30_000, 30_000, 30_000, 80_000]),
        (False, [60_000], [0, 60_000]),
    ],
)
def test_an_interrupted_download_is_continued(
    ranges: bool,
    breaks_after: list[int],
    firsts: list[int],
    server: Server,
    one_file: Callable[[], Fetch],
    tmp_path: Path,
) -> None:
    server.ranges, server.breaks_after = ranges, list(breaks_after)
    one_file().run()
    assert files_below(tmp_path) == {"a.gz": NOISE}
    assert server.requests == [("a.gz", first) for first in firsts]
    assert not one_file().missing()


LONGER = {"files": {"a.gz": NOISE + b"."}}


@pytest.mark.parametrize(
    ("faults", "message", "requests"),
    [
        ({"breaks_after": [30_000, *[0] * fetching.TRIES]}, "the connection was closed", None),
        ({"status": 503}, r"cannot be downloaded \(503 Service Unavailable", fetching.TRIES),
        ({"status": 403}, "HTTP error 403", 1),
        ({"status": 404}, "HTTP error 404", 1),
        ({"files": {"a.gz": NOISE[::-1]}}, "MD5", 1),
        (LONGER, "expected 100,000 bytes, but the server reports .*100001", 1),
        ({**LONGER, "ranges": False}, "expected 100,000 bytes, .*reports 100001", 1),
        ({"sends_length": False, "ranges": False}, "an unknown size", 1),
    ],
)
def test_a_fault_of_the_server_is_reported_and_the_next_run_continues(
    faults: dict[str, Any],
    message: str,
    requests: int | None,
    server: Server,
    one_file: Callable[[], Fetch],
    tmp_path: Path,
) -> None:
    intact = {name: getattr(server, name) for name in faults}
    vars(server).update(faults)
    with pytest.raises(HvdtrainError, match=message):
        one_file().run()
    assert len(server.requests) == (requests or 1 + fetching.TRIES)
    assert files_below(tmp_path) == {}
    vars(server).update(intact)
    one_file().run()
    assert files_below(tmp_path) == {"a.gz": NOISE}
    assert server.requests[-1] == ("a.gz", 0 if requests else 30_000)


def test_a_missing_network_is_not_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(HvdtrainError, match=r"cannot be downloaded \(.*https_proxy"):
        Fetch(NAMED["mnist"], tmp_path, "http://127.0.0.1:9").run()  # the port "discard"


IMAGES = {"train/n01/2.JPEG": b"train", "val/n01/1.JPEG": b"val"}
TAR = tarred({f"imagenette2/{name}": text for name, text in {**IMAGES, "noisy.csv": b""}.items()})
WORK = ".data-fetch/imagenette/i.tgz"
UNPACKED = {f"{WORK}.unpacked/{name}": text for name, text in IMAGES.items()}


@pytest.mark.parametrize(
    ("left", "first"),
    [
        ({}, 0),
        ({f"{WORK}.part": TAR[:100]}, 100),
        ({f"{WORK}.part": TAR + b"."}, 0),
        ({WORK: TAR}, None),
        ({WORK: TAR, f"{WORK}.unpacking/train/n01/2.JPEG": b"tr"}, None),
        (UNPACKED, None),
        ({WORK: TAR, **dict([*UNPACKED.items()][1:]), "train/n01/2.JPEG": b"train"}, None),
        ({f"{WORK}.unpacked/other": b"", **IMAGES}, None),
    ],
    ids=["nothing", "part", "too much", "all", "unpacking", "unpacked", "half moved", "moved"],
)
def test_a_run_killed_at_any_stage_is_continued(
    left: dict[str, bytes], first: int | None, server: Server, tmp_path: Path
) -> None:
    data_set = served(server, "imagenette", ("i.tgz", TAR, ("train", "val")))
    for name, content in left.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    Fetch(data_set, tmp_path, server.url).run()
    assert files_below(tmp_path) == IMAGES
    assert server.requests == ([] if first is None else [("i.tgz", first)])
    assert [path.name for path in (tmp_path / WORK).parent.iterdir()] == ["i.tgz.json"]


def test_the_space_needed_is_what_is_missing(one_file: Callable[[], Fetch], tmp_path: Path) -> None:
    fetch, archive = one_file(), tmp_path / ".data-fetch" / "mnist" / "a.gz"
    assert fetch.room() == 210_000
    archive.parent.mkdir(parents=True)
    archive.write_bytes(NOISE)
    assert fetch.room() == 110_000
    fetch.run()
    archive.write_bytes(NOISE)  # as if killed before it was removed
    assert not fetch.is_done
    fetch.run()
    assert fetch.is_done
    assert fetch.room() == 0


def test_coco_is_unpacked_from_zips(server: Server, tmp_path: Path) -> None:
    notes = ("annotations/instances_val2017.json", "annotations/captions_val2017.json")
    images = {"val2017/": b"", "val2017/000000000007.jpg": b"jpeg"}
    data_set = served(
        server,
        "coco",
        ("a.zip", zipped(dict.fromkeys(notes, b"{}")), ("annotations",)),
        ("v.zip", zipped(images), ("val2017",)),
    )
    Fetch(data_set, tmp_path, server.url).run()
    assert list(files_below(tmp_path)) == [notes[0], "val2017/000000000007.jpg"]


ZIP = zipped({"val2017/000000000007.jpg": NOISE})
METHOD = ZIP.index(b"PK\1\2") + 10  # the compression method, in the directory


@pytest.mark.parametrize("position", [len(ZIP) // 2, METHOD], ids=["content", "method"])
def test_a_damaged_zip_is_downloaded_again(position: int, server: Server, tmp_path: Path) -> None:
    data_set = served(server, "coco", ("v.zip", flipped(ZIP, position, 77), ("val2017",)))
    with pytest.raises(HvdtrainError, match="cannot be unpacked"):
        Fetch(data_set, tmp_path, server.url).run()
    assert files_below(tmp_path) == {}
    assert not (tmp_path / ".data-fetch" / "coco" / "v.zip").exists()
    data_set = served(server, "coco", ("v.zip", ZIP, ("val2017",)))
    Fetch(data_set, tmp_path, server.url).run()
    assert files_below(tmp_path) == {"val2017/000000000007.jpg": NOISE}


def test_cifar10_becomes_an_image_folder(server: Server, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 3, 32, 32), np.uint8)
    records = [bytes([label]) + image.tobytes() for label, image in enumerate(pixels[:10])]
    more = [bytes([9]) + image.tobytes() for image in pixels[10:]]
    contents = {"data_batch_2.bin": records, "test_batch.bin": more, "readme.html": []}
    tar = tarred({f"cifar-10-batches-bin/{name}": b"".join(c) for name, c in contents.items()})
    data_set = served(server, "cifar10", ("c.gz", tar, ("train", "val")))
    Fetch(data_set, tmp_path, server.url).run()
    assert len(files_below(tmp_path)) == 12
    for name, image in (
        ("train/cat/2-00003.png", pixels[3]),
        ("val/truck/0-00001.png", pixels[11]),
    ):
        with Image.open(tmp_path / name) as stored:
            assert (np.asarray(stored) == image.transpose(1, 2, 0)).all()


@pytest.mark.parametrize("name", ["train/../../../../evil", "/EVIL"])
def test_members_outside_the_folder_are_rejected(server: Server, name: str, tmp_path: Path) -> None:
    name = name.replace("/EVIL", f"{tmp_path}/evil")
    content = tarred({"train/n/1.jpg": b"", name: b""})
    data_set = served(server, "imagenette", ("i.tgz", content, ("train",)))
    bare = dataclasses.replace(data_set, files=members)
    with pytest.raises(HvdtrainError, match="evil is outside"):
        Fetch(bare, tmp_path / "in", server.url).run()
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("owner", ["user", "other dataset", "meanwhile"])
def test_existing_files_are_not_overwritten(owner: str, server: Server, tmp_path: Path) -> None:
    def files(_: IO[bytes]) -> Files:
        (tmp_path / "a.gz").write_bytes(NOISE[::-1])
        yield "a.gz", io.BytesIO(b"theirs")

    data_set = served(server, "mnist", ("a.gz", NOISE, ("a.gz",)))
    if owner == "user":
        (tmp_path / "a.gz").write_bytes(NOISE[::-1])
    elif owner == "other dataset":
        other = served(server, "fashion-mnist", ("a.gz", NOISE[::-1], ("a.gz",)))
        Fetch(other, tmp_path, server.url).run()
    else:
        data_set = dataclasses.replace(data_set, files=files)
    server.requests.clear()
    server.files["a.gz"] = NOISE
    with pytest.raises(UsageError, match=r"a\.gz exists and would be overwritten"):
        Fetch(data_set, tmp_path, server.url).run()
    assert files_below(tmp_path) == {"a.gz": NOISE[::-1]}
    assert bool(server.requests) == (owner == "meanwhile")


@pytest.mark.parametrize("link", [".data-fetch", ".data-fetch/mnist"])
def test_a_link_in_a_shared_folder_is_not_followed(
    link: str, one_file: Callable[[], Fetch], tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory() as elsewhere:
        (tmp_path / link).parent.mkdir(exist_ok=True)
        (tmp_path / link).symlink_to(elsewhere)
        with pytest.raises(UsageError, match=f"{link} is not a directory of yours"):
            one_file().run()
        assert not list(Path(elsewhere).iterdir())


def test_too_little_space_or_no_directory_is_rejected(tmp_path: Path) -> None:
    huge = dataclasses.replace(NAMED["coco"].remotes[0], size=2**60)
    with pytest.raises(UsageError, match=r"needs up to .* GiB, and .* GiB are free"):
        Fetch(dataclasses.replace(NAMED["coco"], remotes=(huge,)), tmp_path / "new").run()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="not a writable directory"):
        Fetch(NAMED["mnist"], tmp_path / "file").run()


def test_parallel_runs_download_once(
    server: Server, one_file: Callable[[], Fetch], tmp_path: Path
) -> None:
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(one_file().run) for _ in range(2)]
    assert [run.result() for run in runs] == [None, None]
    assert files_below(tmp_path) == {"a.gz": NOISE}
    assert server.requests == [("a.gz", 0)]


def test_removed_files_are_downloaded_again(server: Server, tmp_path: Path) -> None:
    data_set = served(server, "mnist", ("a.gz", NOISE, ("a.gz",)), ("b.gz", b"b", ("b.gz",)))
    Fetch(data_set, tmp_path, server.url).run()
    (tmp_path / "a.gz").unlink()
    assert not Fetch(data_set, tmp_path, server.url).is_done
    Fetch(data_set, tmp_path, server.url).run()
    assert files_below(tmp_path) == {"a.gz": NOISE, "b.gz": b"b"}
    assert [name for name, _ in server.requests] == ["a.gz", "b.gz", "a.gz"]


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


@pytest.mark.parametrize("data_set", DATA_SETS, ids=lambda data_set: data_set.name)
def test_each_has_a_trainer(data_set: DataSet) -> None:
    assert find_spec(f"hvdtrain.{data_set.trainer.split()[0]}")


def test_a_mirror_must_be_an_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data-fetch", "mnist", "--to", str(tmp_path), "--mirror", "/srv/mnist"]
    assert cli.main(words) == 2
    assert "--mirror /srv/mnist: must be an address" in capsys.readouterr().err


def test_a_directory_name_that_is_too_long_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--dry-run"]):
        assert cli.main(["data-fetch", "mnist", "--to", "x" * 300, *words]) == 2
        assert "File name too long" in capsys.readouterr().err
