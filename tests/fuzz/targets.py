"""The readers, as the commands use them, with valid inputs made by the project's own writers."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import socket
import struct
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image
from typing_extensions import override
from xxhash import xxh3_128

from hvdtrain.adapters.select import adapter
from hvdtrain.commands.compare.methods import LINES as TRIALS
from hvdtrain.commands.pack.packing import Packing
from hvdtrain.commands.pack.source import PackOptions
from hvdtrain.commands.report.find import look
from hvdtrain.commands.study.run import append_record
from hvdtrain.commands.timeline import report, trace_page
from hvdtrain.commands.timeline.analyse import Recorder
from hvdtrain.commands.timeline.read import repair
from hvdtrain.commands.timeline.verdict import analyse
from hvdtrain.config.command_line import parse
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps import checkpoint_files
from hvdtrain.steps.checkpoint_files import MODEL_FILE, STATE_FILE, TRAINING_FILE
from hvdtrain.system.folder import Folder
from hvdtrain.system.runtime import failure_detector, handshake
from hvdtrain.system.runtime.failure_detector import Connection, FailureDetector
from hvdtrain.system.runtime.handshake import (
    ACCEPTING,
    CONFIRM,
    CONNECTING,
    KEY,
    NONCE,
    Handshake,
    prove,
)
from hvdtrain.system.runtime.waits import Waits
from hvdtrain.training.checkpoint_manager import train_state
from hvdtrain.workloads.data import coco, image_folder, packed
from hvdtrain.workloads.mnist import data as mnist
from hvdtrain.workloads.mnist.task import WORKLOAD as MNIST
from hvdtrain.workloads.ssd300.task import WORKLOAD as SSD300
from tests.saves import save
from tests.studies import DDP, SINGLE, run, summary, trial
from tests.timelines import straggling

CORPUS = Path(__file__).parent / "corpus"
Read = Callable[[bytes, Path], object]
"""Reads an input in an empty folder."""


@dataclass(frozen=True)
class Target:
    """A reader of files or messages that somebody else wrote."""

    name: str
    group: str
    read: Read
    written: Callable[[], list[bytes]] = list  # valid inputs, by the project's own writers

    def valid(self) -> list[bytes]:
        """Return the valid inputs."""
        return self.written() + self._committed("valid*")

    def broken(self) -> list[bytes]:
        """Return the inputs that broke a promise."""
        return self._committed("[!v]*")

    def seeds(self) -> list[bytes]:
        """Return the inputs to mutate."""
        return self.valid() + self.broken()

    def _committed(self, names: str) -> list[bytes]:
        return [path.read_bytes() for path in sorted((CORPUS / self.name).glob(names))]


TARGETS: dict[str, Target] = {}


def reader(
    name: str, group: str, written: Callable[[], list[bytes]] = list
) -> Callable[[Read], Read]:
    """Add a function to the targets."""

    def add(read: Read) -> Read:
        TARGETS[name] = Target(name, group, read, written)
        return read

    return add


def every(*actions: Callable[[], object]) -> None:
    """Do all ``actions``, and raise the last error for users."""
    last: HvdtrainError | None = None
    for action in actions:
        try:
            action()
        except HvdtrainError as error:
            last = error
    if last:
        raise last


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def content(folder: Path, files: dict[str, bytes]) -> Path:
    """Write ``files``, by path."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    """Return the files in ``folder``, by path."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def written(write: Callable[[Path], object]) -> dict[str, bytes]:
    """Return the files that ``write`` writes to a folder."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        return files_in(Path(folder))


# Data


def _idx(shape: tuple[int, ...]) -> bytes:
    return struct.pack(f">I{len(shape)}I", 0x800 + len(shape), *shape) + bytes(int(np.prod(shape)))


IMAGES = "train-images-idx3-ubyte"
IDX = {
    f"{split}-{kind}-ubyte": _idx(shape)
    for split in ("train", "t10k")
    for kind, shape in (("images-idx3", (2, 28, 28)), ("labels-idx1", (2,)))
}


@reader("idx", "data", lambda: [IDX[IMAGES], gzip.compress(IDX[IMAGES], mtime=0)])
def read_idx(data: bytes, folder: Path) -> None:
    mnist.load(content(folder, {**IDX, IMAGES: data}))


def picture(form: str, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (12, 9), 70).save(file, form)
    return file.getvalue()


PNG = picture("PNG")
PICTURES = (("JPEG",), ("PNG", "P"), ("JPEG", "CMYK"))


@reader("image-names", "data")
def read_image_names(data: bytes, folder: Path) -> None:
    for name in data.split(b"\n")[:9]:
        parts = [part for part in name.split(b"/") if part.strip(b".")][:3]
        path = Path(os.fsdecode(b"/".join([bytes(folder), b"train", *parts])))
        with contextlib.suppress(OSError, ValueError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(PNG)
    _read_images(folder)


def _read_images(folder: Path) -> None:
    for images in image_folder.load(folder):
        for index in range(len(images.files) if images else 0):
            assert images
            if reason := image_folder.decoding_error(images.files, index):
                raise image_folder.broken_image(images.files.name(index), reason)
            assert isinstance(images.classes[images.labels[index]], str)


@reader("image", "data", lambda: [picture(*form) for form in PICTURES])
def read_image(data: bytes, folder: Path) -> None:
    _read_images(content(folder, {"train/a/1.jpg": data}))


@reader("coco", "data")
def read_coco(data: bytes, folder: Path) -> None:
    images = {f"train2017/{name}.jpg": b"" for name in "ab"}
    content(folder, {**images, "annotations/instances_train2017.json": data})

    def load(skip: bool) -> None:
        train, _ = coco.load(folder, skip_broken=skip)
        assert train.digest and [train.of(index) for index in range(len(train.files))]

    every(lambda: load(True), lambda: load(False))


@cache
def pack_files() -> dict[str, bytes]:
    images = {f"{split}/{c}/1.jpg": picture("JPEG") for split in ("train", "val") for c in "ab"}

    def pack(folder: Path) -> None:
        content(folder / "in", images)
        Packing(folder / "in", folder / "out", PackOptions(2**14, 1, 0)).run()

    return {k[4:]: v for k, v in written(pack).items() if k.startswith("out/") and "/." not in k}


@reader("pack-index", "data", lambda: [pack_files()[packed.INDEX]])
def read_pack(data: bytes, folder: Path) -> None:
    content(folder, {**pack_files(), packed.INDEX: data})
    for load in (mnist.load, coco.load):
        with contextlib.suppress(HvdtrainError):  # a valid index is of another kind
            load(folder)
    every(lambda: packed.Pack(folder).check_index(), lambda: _read_images(folder))


@reader("pack-shard", "data", lambda: [pack_files()["train-000000.tar"]])
def read_shard(data: bytes, folder: Path) -> None:
    """Read a shard whose size and digest are those in the index."""
    contents = packed.Pack(content(folder, pack_files())).contents
    shard, *others = contents.shards
    shard = shard._replace(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    content(folder, {shard.name: data})
    with contextlib.chdir(folder):  # the guard takes names in an open folder for relative paths
        replace(contents, shards=[shard, *others]).save(Folder.named(folder))
    assert isinstance(packed.Pack(folder).problem(0), str | None)
    _read_images(folder)


def parts(file: bytes) -> tuple[bytes, bytes]:
    """Return the header and the arrays of a safetensors file."""
    end = 8 + int.from_bytes(file[:8], "little")
    return file[8:end], file[end:]


# Checkpoints

STEP = "step-000000003"
ORIGIN = {"model": "small", "dataset_size": 60}


@cache
def checkpoint_content() -> dict[str, bytes]:
    progress = {
        **{"step": 3, "samples": 96, "loss_sum": 1.5, "loss_count": 32, "stopped": None},
        **{"position": {"epoch": 1, "consumed": 32}, "metrics": {"accuracy": 0.5, "loss": 1.0}},
        **{"best": ["accuracy", True], "origin": ORIGIN},
    }
    model = {"weight": np.ones((3, 2), np.float32), "count": np.array(3)}
    saved = checkpoint_files.Checkpoint(model, {"momentum": np.zeros(2)}, progress)
    files = written(lambda folder: save(folder, saved, keep=1))
    return {Path(name).name: data for name, data in files.items()}


def sealed(state: bytes, tensors: bytes | None = None) -> bytes:
    """Return a state with the checksums of itself and of ``tensors``, if it has any."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError, AttributeError):
        values = json.loads(state)
        if tensors is not None:
            digest = xxh3_128(tensors).hexdigest()
            values["digests"][MODEL_FILE] = digest
        own = checkpoint_files._digest_of_state(values)
        values["digests"][STATE_FILE] = own
        return json.dumps(values).encode()
    return state


@reader("checkpoint-state", "checkpoints", lambda: [checkpoint_content()[STATE_FILE]])
def read_checkpoint(state: bytes, folder: Path, tensors: bytes | None = None) -> None:
    files = checkpoint_content() | {STATE_FILE: sealed(state, tensors)}
    if tensors is not None:
        files[MODEL_FILE] = tensors
    content(folder / STEP, files)

    def check(checkpoint: checkpoints.Checkpoint) -> None:
        if name := checkpoints.not_finite(checkpoint.model, infinite=True):
            raise ValueError(f"{name} is not finite")

    def resume() -> None:
        checkpoint = checkpoints.load_newest(folder, check)
        assert checkpoint
        checkpoints.check_origin(checkpoint, ORIGIN)
        train_state({**checkpoint.state, "path": str(checkpoint.path)})
        for tensor in checkpoint.model.values():
            assert np.asarray(tensor).shape == tensor.shape
            assert not tensor.shape or len(tensor[0:1]) <= 1

    def other_commands() -> None:
        if newest := checkpoints.read_newest_state(folder):
            checkpoints.check_origin(newest, ORIGIN)
        assert isinstance(checkpoint_files.score(folder / STEP), float | None)

    every(other_commands, lambda: checkpoints.load(folder / STEP, check), resume)


@cache
def network() -> Callable[[], tuple[Any, Any]]:
    """Return a function that makes a model and its optimizer, both with a state."""
    import torch

    def make() -> tuple[Any, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        return model, optimizer

    return make


@cache
def single_process() -> Any:
    hvd = adapter("pytorch", "single", environ={})
    hvd.initialize()
    return hvd


@cache
def resumable() -> dict[str, bytes]:
    hvd, state = single_process(), {"step": 3}
    files = written(lambda folder: hvd.save_checkpoint(folder, *network()(), state=state))
    return {Path(name).name: data for name, data in files.items()}


@reader("checkpoint-training", "checkpoints", lambda: [resumable()[TRAINING_FILE]])
def restore_training(data: bytes, folder: Path) -> None:
    """Resume from a checkpoint whose optimizer state is ``data``."""
    state = json.loads(resumable()[STATE_FILE])
    state["digests"][TRAINING_FILE] = xxh3_128(data).hexdigest()
    files = resumable() | {TRAINING_FILE: data, STATE_FILE: sealed(json.dumps(state).encode())}
    content(folder / STEP, files)
    single_process().resume(folder, *network()())


@reader("checkpoint-tensors", "checkpoints", lambda: [checkpoint_content()[MODEL_FILE]])
def read_tensors(data: bytes, folder: Path) -> None:
    read_checkpoint(checkpoint_content()[STATE_FILE], folder, data)


@reader("checkpoint-header", "checkpoints", lambda: [parts(checkpoint_content()[MODEL_FILE])[0]])
def read_tensor_header(data: bytes, folder: Path) -> None:
    _, rest = parts(checkpoint_content()[MODEL_FILE])
    read_tensors(len(data).to_bytes(8, "little") + data + rest, folder)


# Results


TIMELINE = straggling(3).text.encode()


@reader("timeline", "results", lambda: [TIMELINE, gzip.compress(TIMELINE, mtime=0)])
def read_timeline(data: bytes, folder: Path) -> None:
    path = content(folder, {"t.json": data}) / "t.json"
    recorder = Recorder()
    facts, _ = analyse(path, None, recorder)
    json.dumps(asdict(facts))
    json.dumps(trace_page.data(facts, recorder))
    repair(path, folder / "repaired.json")
    json.loads((folder / "repaired.json").read_bytes())
    sliced, _ = analyse(path, (0.1, 0.5))
    assert (report.text(facts) + report.comparison(report.compare(facts, sliced))).encode()


def results() -> list[bytes]:
    runs = [run(ranks, n, 90.0 * ranks + n) for ranks in (1, 2, 4) for n in (1, 2)]
    trials = [trial(SINGLE), trial(DDP, rate=150.0)]

    def write(folder: Path) -> None:
        for each in runs:
            append_record(folder / "results.jsonl", each)
        for each in trials:
            append_record(folder / TRIALS, each)

    return [_json(summary(2, samples_trained=9)), *written(write).values()]


@reader("results", "results", results)
def read_results(data: bytes, folder: Path) -> None:
    """Read the results of others, as a report does."""
    names = ("run.json", "results.jsonl", "compare.jsonl", "metrics.jsonl", "results.csv")
    look(content(folder, dict.fromkeys(names, data)))


# Settings


@reader("config", "settings")
def read_config(data: bytes, folder: Path) -> None:
    path = str(content(folder, {"c.yaml": data}) / "c.yaml")
    every(
        *(
            partial(
                parse,
                workload.name,
                ["--config", path],
                description="",
                epilog="",
                kind=workload.options,
            )
            for workload in (MNIST, SSD300)
        )
    )


# Messages between ranks

SECRET, NUMBER, RANK_1 = bytes(KEY), bytes(NONCE), bytes([0, 0, 0, 1])


GREETING = RANK_1 + prove(SECRET, CONNECTING, NUMBER, "", RANK_1)
ANSWER = NUMBER + prove(SECRET, ACCEPTING, NUMBER, "", RANK_1)


@reader("handshake", "ranks", lambda: [GREETING + CONFIRM])
def read_handshake(data: bytes, folder: Path) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(data[:4096])
        there.shutdown(socket.SHUT_WR)
        here.setblocking(False)
        begun = Handshake(here, SECRET, NUMBER)
        try:
            while not begun.read():
                pass
        except OSError as error:  # as the detector does
            raise UsageError(str(error)) from error
    assert data.startswith(GREETING)


class _Connected(socket.socket):
    """A socket that is connected already."""

    @override
    def connect(self, address: object) -> None:
        pass


@reader("handshake-answer", "ranks", lambda: [ANSWER])
def read_handshake_answer(data: bytes, folder: Path) -> None:
    here, there = socket.socketpair()
    connected = _Connected(fileno=here.detach())
    sockets = mock.patch.object(handshake.socket, "socket", lambda family: connected)
    with connected, there:
        there.sendall(data[:4096])
        there.shutdown(socket.SHUT_WR)
        with sockets:
            confirmed = handshake.connect([("127.0.0.1", 1)], 1, SECRET)
    assert (confirmed is not None) == data.startswith(ANSWER)
    if not confirmed:
        raise UsageError("refused")


@reader("waits", "ranks")
def read_report(data: bytes, folder: Path) -> None:
    """Read a report per line; then look for a deadlock, and for late ranks."""
    waits = Waits(0, ["a", "b", "c", "d"])
    for line in data.splitlines():
        waits.take(line)
    with mock.patch.multiple("hvdtrain.system.runtime.waits", fail=_end, LATE_TIMEOUT=0.0):
        waits.check()


class _EndedError(HvdtrainError):
    """The process has ended, as a rank is lost or waits in another call."""


def _end(*words: str, **more: object) -> None:
    raise _EndedError(*words)


@reader("failure-detector", "ranks")
def read_messages(data: bytes, folder: Path) -> None:
    here, there = socket.socketpair()
    detector = FailureDetector(0, [("node", "")] * 2, [])
    detector.on_report = Waits(0, ["node", "node"]).take
    patches = {"leave": partial(_end, "ended"), "print_error": mock.Mock()}
    with here, there, contextlib.closing(detector.selector), contextlib.closing(detector):
        there.sendall(data[:65536])
        there.shutdown(socket.SHUT_WR)
        with mock.patch.multiple(failure_detector, time=mock.Mock(), **patches):
            while detector._read(Connection(here, 1)):
                pass
