"""Each reader keeps its promise for the inputs that broke one, and for mutations of valid ones."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from hvdtrain.errors import UsageError
from tests.fuzz import guard
from tests.fuzz.guard import BrokenPromiseError, check, prepare
from tests.fuzz.mutate import mutate
from tests.fuzz.targets import TARGETS, Target

INPUTS = 25  # mutated ones of each target


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Return a target whose modules are imported."""
    prepare(TARGETS[request.param], tmp_path_factory.mktemp("prepare") / "in")
    return TARGETS[request.param]


def test_valid_inputs_are_read(target: Target, tmp_path: Path) -> None:
    for data in target.valid():
        assert check(target, data, tmp_path / "in") is None


def test_inputs_that_broke_a_promise(target: Target, tmp_path: Path) -> None:
    for data in [*target.broken(), b"", b"[" * 1200, b'{"a":' * 1200]:
        check(target, data, tmp_path / "in")


def test_mutations_of_valid_inputs(target: Target, tmp_path: Path) -> None:
    """The same inputs in each run; ``python -m tests.fuzz`` searches others."""
    random, seeds = Random(target.name), target.seeds()
    for _ in range(INPUTS):
        data = mutate(random.choice(seeds), random)
        (tmp_path / "data").write_bytes(data)  # for whoever looks into a failure
        check(target, data, tmp_path / "in")


def _loop(_: Path) -> None:
    while True:
        pass


@pytest.mark.parametrize(
    "action",
    [
        lambda folder: (folder.parent / "elsewhere").write_text(""),
        lambda folder: (folder / ".." / "elsewhere").write_text(""),
        lambda folder: Path(f"{folder}-elsewhere").write_text(""),
        lambda folder: (folder.parent / "elsewhere").mkdir(),
        lambda folder: folder.rename(folder.parent / "elsewhere"),
        lambda folder: (folder / "link").symlink_to(folder.parent),
        lambda folder: folder.parent.chmod(0o700),
        lambda folder: os.utime(folder.parent),
        lambda folder: sys.exit(0),
        lambda folder: time.sleep(60),
        lambda folder: subprocess.run(["true"], check=False),
        lambda folder: socket.create_connection(("127.0.0.1", 9)),
        lambda folder: bytearray(300 * 2**20),
        _loop,
    ],
)
def test_a_broken_promise_is_noticed(
    action: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "HANG", 0.5)
    monkeypatch.setattr(guard, "WAIT", 1.0)
    target = Target("broken", "none", lambda data, folder: action(folder), list)
    with pytest.raises(BrokenPromiseError):
        check(target, b"", tmp_path / "in")


def test_an_error_is_one_line(tmp_path: Path) -> None:
    def refuse(data: bytes, folder: Path) -> None:
        raise UsageError(data.decode())

    target = Target("refusing", "none", refuse, list)
    check(target, b"a\rb\x1b[2J\nc", tmp_path / "in")
    with pytest.raises(BrokenPromiseError):
        check(target, b"", tmp_path / "in")
