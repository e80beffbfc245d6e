"""Each reader keeps its promise for the inputs that broke one, and for mutations of valid ones."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.unit.conftest  # noqa: F401 (the profile of hypothesis)
from hvdtrain import cli
from hvdtrain.errors import UsageError
from tests.conftest import on_demand
from tests.fuzz import guard
from tests.fuzz.guard import BrokenPromiseError, check, prepare
from tests.fuzz.mutate import mutate
from tests.fuzz.targets import TARGETS, Target

GROUPS = sorted({target.group for target in TARGETS.values()})
HOUR = 3600


@pytest.mark.parametrize("name", TARGETS)
def test_valid_inputs_and_those_that_broke_a_promise(name: str, tmp_path: Path) -> None:
    prepare(TARGETS[name], tmp_path / "in")
    for data in [*TARGETS[name].seeds(), b"", b"[" * 1200, b'{"a":' * 1200]:
        check(TARGETS[name], data, tmp_path / "in")


@pytest.mark.parametrize("start", [b"Job Id: 1\n", b" a = b", b"JobState=X StdOut=/a"])
@pytest.mark.parametrize("filler", [b"\n", b" "])
def test_long_output_of_a_batch_system_takes_no_time(
    start: bytes, filler: bytes, tmp_path: Path
) -> None:
    check(TARGETS["batch-output"], start + 30_000 * filler + b"=", tmp_path / "in")


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.data())
@settings(max_examples=15)
def test_mutations_of_valid_inputs(name: str, data: st.DataObject, tmp_path: Path) -> None:
    seed = data.draw(st.sampled_from(TARGETS[name].seeds()))
    changed = mutate(seed, data.draw(st.randoms(use_true_random=False)))
    check(TARGETS[name], changed, tmp_path / "in")


@on_demand
@pytest.mark.timeout(2 * HOUR)
@pytest.mark.parametrize("group", GROUPS)
def test_an_hour_of_search(group: str, tmp_path: Path) -> None:
    names = [target.name for target in TARGETS.values() if target.group == group]
    command = [sys.executable, "-m", "tests.fuzz", *names, "--seconds", str(HOUR // len(names))]
    assert subprocess.run([*command, "--out", str(tmp_path)], check=False).returncode == 0


def test_names_of_any_bytes_are_reported(tmp_path: Path) -> None:
    text = b'"\\udcff"'  # a name that is not UTF-8, in JSON
    study, comparison = (TARGETS[name].seeds()[0] for name in ("study", "comparison"))
    (tmp_path / "results.jsonl").write_bytes(study.replace(b'"tutorial"', text))
    (tmp_path / "compare.jsonl").write_bytes(comparison.replace(b'"single"', text))
    for command in (["scaling", "--out"], ["compare", "--out"], ["report"]):
        assert cli.main([*command, str(tmp_path)]) == 0


def _loop(_: Path) -> None:
    while True:
        pass


@pytest.mark.parametrize(
    "action",
    [
        lambda folder: (folder.parent / "elsewhere").write_text(""),
        lambda folder: subprocess.run(["true"], check=False),
        lambda folder: socket.create_connection(("127.0.0.1", 9)),
        lambda folder: bytearray(300 * 2**20),
        lambda folder: int("x"),
        _loop,
    ],
)
def test_a_broken_promise_is_noticed(
    action: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "HANG", 0.5)
    target = Target("broken", "none", lambda data, folder: action(folder), list)
    with pytest.raises((BrokenPromiseError, ValueError)):
        check(target, b"", tmp_path / "in")


def test_an_error_is_one_line(tmp_path: Path) -> None:
    def refuse(data: bytes, folder: Path) -> None:
        raise UsageError(data.decode())

    target = Target("refusing", "none", refuse, list)
    check(target, b"a\rb\x1b[2J\nc", tmp_path / "in")
    with pytest.raises(BrokenPromiseError):
        check(target, b"", tmp_path / "in")
