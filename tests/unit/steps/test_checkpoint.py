"""Checkpoints: complete or absent, the newest intact one loaded, nothing executed or lost."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128

from hvdtrain.errors import CheckpointError, HvdtrainError, UsageError
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps import checkpoint_files
from hvdtrain.steps.checkpoint import (
    check_origin,
    load,
    load_newest,
    newest_name,
    set_aside,
)
from hvdtrain.steps.checkpoint_files import (
    MODEL_FILE,
    STATE_FILE,
    TRAINING_FILE,
    Arrays,
    Checkpoint,
    Tensors,
    _digest_of_state,
    read,
)
from tests.conftest import error_of, flipped
from tests.saves import save

FILES = (MODEL_FILE, TRAINING_FILE, STATE_FILE)


def arrays_of(step: int) -> Arrays:
    """Return an array of each kind in models, optimizers and BatchNorm layers."""
    rng = np.random.default_rng(step)
    return {
        "weight": rng.normal(size=(3, 4)).astype(np.float32),
        "double": rng.normal(size=5),
        "half": rng.normal(size=5).astype(np.float16),
        "count": np.array([step, -step, 2**62], np.int64),
        "bytes": rng.integers(0, 256, 7, np.uint8),
        "flag": np.array([True, False]),
        "num_batches_tracked": np.array(step, np.int64),
        "scalar": np.array(math.pi * step),
        "empty": np.zeros((0, 4), np.float32),
        "special": np.array([np.nan, np.inf, -np.inf, -0.0, 5e-324]),
        "transposed": rng.normal(size=(2, 3)).T,
    }


def checkpoint_of(step: int, accuracy: float | None = None, **state: Any) -> Checkpoint:
    metrics = None if accuracy is None else {"loss": 1.0, "accuracy": accuracy}
    entries = {"step": step, "metrics": metrics, "origin": {"model": "small"}, **state}
    return Checkpoint(arrays_of(step), arrays_of(step + 1000), entries)


def same(first: Tensors, second: Tensors) -> bool:
    """Return whether names, types, shapes and all bits are equal."""
    return first.keys() == second.keys() and all(
        bits(value) == bits(second[name]) for name, value in first.items()
    )


def bits(value: Any) -> tuple[Any, ...]:
    array = np.asarray(value)
    return array.dtype, array.shape, array.tobytes()


def is_intact(checkpoint: Checkpoint | None, step: int) -> bool:
    return (
        checkpoint is not None
        and checkpoint.state["step"] == step
        and same(checkpoint.model, arrays_of(step))
        and same(checkpoint.training, arrays_of(step + 1000))
    )


def steps_in(directory: Path) -> list[int]:
    return [read(directory / name).state["step"] for name in sorted_names(directory)]


def sorted_names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


# Round trip


DTYPES = st.sampled_from(["f2", "f4", "f8", "i8", "i4", "u1", "?"])
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@settings(max_examples=40)
@given(st.dictionaries(st.text("abz./:_0", min_size=1), st.tuples(DTYPES, SHAPES), max_size=5))
def test_names_types_and_shapes_are_restored(
    tmp_path_factory: pytest.TempPathFactory, kinds: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    directory = tmp_path_factory.mktemp("round")
    arrays = {
        name: np.frombuffer(
            np.random.default_rng(1).bytes(math.prod(shape) * np.dtype(kind).itemsize), kind
        ).reshape(shape)
        for name, (kind, shape) in kinds.items()
        if kind != "?"
    }
    save(directory, Checkpoint({}, arrays, {"step": 1}), keep=1)
    checkpoint = load_newest(directory)
    assert checkpoint is not None
    assert same(checkpoint.training, arrays)
    assert checkpoint.model == {}


def test_state_is_restored_with_exact_floats(tmp_path: Path) -> None:
    state = {
        "step": 7,
        "position": {"epoch": 2, "consumed": 1280},
        "loss_sum": 0.1 + 0.2,
        "metrics": None,
        "origin": {"seed": 2**63 - 1, "model": "späť"},
    }
    path = save(tmp_path, Checkpoint({}, {}, state), keep=1)
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    assert {key: checkpoint.state[key] for key in state} == state
    assert checkpoint.path == path
    assert path.parent == tmp_path


def test_no_key_of_a_user_makes_a_checkpoint_unreadable(tmp_path: Path) -> None:
    state = {"step": 1, "format": "mine", "digests": {"mine": ""}}
    save(tmp_path, Checkpoint({}, {}, state), keep=1)
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None and checkpoint.state["step"] == 1


@pytest.mark.parametrize("keys", [(2, 10), (1, "all", None)])
def test_keys_that_are_not_text_are_loaded_as_text(tmp_path: Path, keys: tuple[Any, ...]) -> None:
    """A task may have metrics by class or epoch; 2 is less than 10, but its text is not."""
    metrics = {"per_class": dict.fromkeys(keys, 0.5)}
    save(tmp_path, Checkpoint({}, {}, {"step": 1, "metrics": metrics}), keep=1)
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    assert list(checkpoint.state["metrics"]["per_class"]) == [
        {None: "null"}.get(key, str(key)) for key in keys
    ]


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_no_checkpoint_is_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    assert load_newest(tmp_path / name) is None
    assert newest_name(tmp_path / name) is None
    assert set_aside(tmp_path / name) is None
    assert sorted_names(tmp_path) == ["empty"]


def test_the_newest_checkpoint_has_most_steps(tmp_path: Path) -> None:
    for step in (9, 10, 100, 99_999_999):  # 9 sorts after 10 as text
        save(tmp_path, checkpoint_of(step), keep=9)
    assert is_intact(load_newest(tmp_path), 99_999_999)
    assert steps_in(tmp_path) == [9, 10, 100, 99_999_999]


# Retention


@pytest.mark.parametrize(
    ("accuracies", "keep", "kept"),
    [
        ((None,) * 6, 1, [6]),
        ((None,) * 6, 3, [4, 5, 6]),
        ((0.5, 0.9, 0.7, None, 0.8, None), 2, [2, 5, 6]),  # the best, and the newest
        ((0.9, 0.1, 0.95, 0.2, 0.3), 1, [3, 5]),
        ((None, 0.0, None, None), 1, [2, 4]),  # zero is a score
    ],
)
def test_the_newest_and_the_best_are_kept(
    tmp_path: Path, accuracies: tuple[float | None, ...], keep: int, kept: list[int]
) -> None:
    directory = tmp_path / "new" / "folder"
    for step, accuracy in enumerate(accuracies, 1):
        save(directory, checkpoint_of(step, accuracy), keep)
        (directory / "notes.txt").write_text("mine")
    (directory / "notes.txt").unlink()  # it was kept, too
    assert steps_in(directory) == kept


def test_the_best_is_the_lowest_if_the_training_says_so(tmp_path: Path) -> None:
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.3), (4, 0.2)):
        checkpoint = checkpoint_of(step, metrics={"loss": loss}, best=("loss", False))
        save(tmp_path, checkpoint, keep=1)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        f"step-{step:09d}" for step in (2, 4)
    ]


def test_saving_a_step_twice_keeps_the_later_one(tmp_path: Path) -> None:
    first = save(tmp_path, checkpoint_of(5, note="first"), keep=3)
    for note in ("second", "third"):
        later = save(tmp_path, checkpoint_of(5, accuracy=0.5, note=note), keep=3)
        checkpoint = load_newest(tmp_path)
        assert checkpoint is not None and checkpoint.path == later
        assert checkpoint.state["note"] == note
    assert first != later
    assert len(sorted_names(tmp_path)) == 1
    for step in (6, 6, 7):  # two saves of a step count once
        save(tmp_path, checkpoint_of(step), keep=2)
    assert steps_in(tmp_path) == [5, 6, 7]  # the best, and the newest two


@pytest.mark.parametrize("keep", [1, 2])
def test_a_new_checkpoint_is_kept_despite_a_damaged_later_one(tmp_path: Path, keep: int) -> None:
    """A run that fell back from step 30 to step 20 continues and saves step 25."""
    save(tmp_path, checkpoint_of(20), keep=3)
    broken = [save(tmp_path, checkpoint_of(step), keep=9) for step in (30, 40)]
    for folder in broken:
        (folder / MODEL_FILE).write_bytes(b"")
    assert is_intact(load_newest(tmp_path), 20)
    path = save(tmp_path, checkpoint_of(25), keep)
    assert path.is_dir()
    assert is_intact(load_newest(tmp_path), 25)


# Crashes and damage


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Return a directory with checkpoints of steps 1 and 2."""
    for step in (1, 2):
        save(tmp_path, checkpoint_of(step), keep=3)
    return tmp_path


def assert_falls_back(directory: Path, damaged: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="hvdtrain"):
        assert is_intact(load_newest(directory), 1)
    assert damaged.name in caplog.text


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_or_changed_file_is_skipped(
    two: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    newest = two / "step-000000002"
    whole = (newest / name).read_bytes()
    offsets = {0, 1, 2, 7, 8, 9, len(whole) // 2, len(whole) - 2, len(whole) - 1}
    for length in sorted(offsets):
        (newest / name).write_bytes(whole[:length])
        assert_falls_back(two, newest, caplog)
    for damaged in (whole + b"\0", *(flipped(whole, offset, 0xFF) for offset in (3, 30, 99))):
        (newest / name).write_bytes(damaged)
        assert_falls_back(two, newest, caplog)
    (newest / name).write_bytes(whole)
    assert is_intact(load_newest(two), 2)


def test_no_flipped_bit_of_the_state_goes_unnoticed(two: Path) -> None:
    """Of step, position or counters: resuming from a wrong position would not be noticed."""
    newest = two / "step-000000002"
    whole = (newest / STATE_FILE).read_bytes()
    before = json.loads(whole)
    unnoticed = []
    for offset in range(len(whole)):
        (newest / STATE_FILE).write_bytes(flipped(whole, offset, 1))
        checkpoint = load_newest(two)
        assert checkpoint is not None
        if checkpoint.state["step"] != 1 and checkpoint.state != before:
            unnoticed.append(whole[max(0, offset - 12) : offset + 4])
    assert unnoticed == []


DEEP = "[" * 200_000
STATES = ["[]", "{}", '{"format": 99}', DEEP, '{"format":2,"digests":[1]}']
STATES += ['{"format":' + "9" * 5000 + "}"]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("number", [1, 2])
def test_an_invalid_or_malicious_state_is_skipped(
    two: Path, state: str, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    broken = two / f"step-00000000{number}"
    (broken / STATE_FILE).write_text(state)
    assert is_intact(load_newest(two), 3 - number)
    assert caplog.text.count(broken.name) == (number == 2)  # read, and reported once
    save(two, checkpoint_of(3, accuracy=0.5), keep=1)  # pruning reads all of them
    assert is_intact(load_newest(two), 3)


@pytest.mark.parametrize("score", ["high", True, 10**400, float("nan")])
def test_an_accuracy_that_is_not_a_number_is_no_score(tmp_path: Path, score: Any) -> None:
    for step, accuracy in ((1, 0.1), (2, 0.9)):
        save(tmp_path, checkpoint_of(step, accuracy), keep=9)
    state = json.loads((tmp_path / "step-000000001" / STATE_FILE).read_bytes())
    state["metrics"]["accuracy"] = score
    write_state(tmp_path / "step-000000001", state)
    save(tmp_path, checkpoint_of(3), keep=1)
    assert sorted_names(tmp_path) == ["step-000000002", "step-000000003"]


def test_a_damaged_state_is_not_kept_as_the_best(tmp_path: Path) -> None:
    for step, accuracy in ((1, 0.1), (2, 0.2)):
        save(tmp_path, checkpoint_of(step, accuracy), keep=9)
    damaged = tmp_path / "step-000000001" / STATE_FILE
    damaged.write_text(damaged.read_text().replace('"accuracy": 0.1', '"accuracy": 0.9'))
    save(tmp_path, checkpoint_of(3), keep=1)
    assert sorted_names(tmp_path) == ["step-000000002", "step-000000003"]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_a_pipe_or_a_device_is_skipped(
    two: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    newest = two / "step-000000002"
    (newest / name).unlink()
    assert_falls_back(two, newest, caplog)
    os.mkfifo(newest / name)
    assert_falls_back(two, newest, caplog)
    (newest / name).unlink()
    (newest / name).symlink_to("/dev/zero")
    assert_falls_back(two, newest, caplog)
    save(two, checkpoint_of(3), keep=1)
    assert is_intact(load_newest(two), 3)


def test_an_invalid_name_is_skipped_and_reported_once(
    two: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strays = ["step-000000004+xx", "step-by-step.txt"]
    for name in strays:
        (two / name).mkdir()
    assert is_intact(load_newest(two), 2)
    assert [caplog.text.count(name) for name in strays] == [1, 1]
    save(two, checkpoint_of(4), keep=3)
    assert is_intact(load_newest(two), 4)
    assert set(strays) < set(sorted_names(two))


def test_leftovers_of_killed_saves_are_removed(two: Path, tmp_path: Path) -> None:
    precious = tmp_path / "elsewhere" / "file"
    precious.parent.mkdir()
    precious.write_text("mine")
    for number in (7, 8):
        shutil.copytree(two / "step-000000002", two / f".partial-step-00000000{number}")
    (two / ".partial-step-000000003").symlink_to(precious.parent)
    (two / ".partial-step-000000004").write_text("")
    checkpoints.remove_partial(two)
    assert not list(two.glob(".*"))
    shutil.copytree(two / "step-000000002", two / ".partial-step-000000009")
    (two / ".partial-step-000000009" / "left over").write_text("by the crash")
    assert is_intact(load_newest(two), 2)
    save(two, checkpoint_of(3), keep=3)
    assert not list(two.glob(".*"))
    assert sorted_names(two / "step-000000003") == sorted(FILES)
    assert precious.read_text() == "mine"


def test_a_log_line_shows_escape_sequences_as_text(
    two: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (two / "step-\x1b]0;title\x07").mkdir()
    (two / "step-000000002" / "state.json").write_text(json.dumps({"format": "\x1b[31m"}))
    assert is_intact(load_newest(two), 1)
    assert len(caplog.records) == 2 and "\x1b" not in caplog.text
    assert r"\x1b]0;title" in caplog.text and r"\x1b[31m" in caplog.text


def test_what_is_removed_is_not_completed_meanwhile(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that commits would otherwise complete a checkpoint without some of its files."""
    partial, final = two / ".partial-step-000000007", two / "step-000000007"
    shutil.copytree(two / "step-000000002", partial)
    remove, raced = shutil.rmtree, []

    def race(folder: Path, **options: bool) -> None:
        with pytest.raises(FileNotFoundError):
            partial.rename(final)
        raced.append(folder)
        remove(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", race)
    checkpoints.remove_partial(two)
    assert raced and not final.exists() and not list(two.glob(".*"))


@pytest.mark.parametrize("failing", [errno.ENOSPC, errno.EDQUOT])
def test_what_cannot_be_renamed_is_removed(
    two: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk may refuse a rename; partial checkpoints would fill it further."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(failing, os.strerror(failing))

    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(Path, "rename", refuse)
    for _ in range(2):
        message = error_of(save, two, checkpoint_of(3), keep=3, kind=CheckpointError)
        assert os.strerror(failing) in message
        assert sorted_names(two) == ["step-000000001", "step-000000002"]


class Killed(BaseException):
    """The process ends here, without any handler."""


@pytest.mark.parametrize("keep", [1, 3])
def test_a_save_killed_at_any_moment_leaves_an_intact_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    for moment in range(999):
        directory = tmp_path / str(moment)
        save(directory, checkpoint_of(1), keep)
        left = moment
        with monkeypatch.context() as patch:

            def dying(original: Any) -> Any:
                def call(*args: Any, **kwargs: Any) -> Any:
                    nonlocal left
                    if left == 0:
                        raise Killed
                    left -= 1
                    return original(*args, **kwargs)

                return call

            for owner, name in (
                (os, "fsync"),
                (os, "open"),
                (os, "mkdir"),
                (os, "rename"),
                (os, "unlink"),
                (shutil, "rmtree"),
            ):
                patch.setattr(owner, name, dying(getattr(owner, name)))
            try:
                save(directory, checkpoint_of(2), keep)
            except Killed:
                pass
            else:
                break
        checkpoint = load_newest(directory)
        assert is_intact(checkpoint, 1) or is_intact(checkpoint, 2)
        save(directory, checkpoint_of(2), keep)  # rerun
        assert is_intact(load_newest(directory), 2)
    assert moment > 6  # killed at several moments, and once not at all
    assert is_intact(load_newest(directory), 2)


def test_everything_is_on_disk_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    fsync, rename = os.fsync, os.rename

    def spy_fsync(handle: int) -> None:
        events.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        fsync(handle)

    def spy_rename(*names: str, **folders: int) -> None:
        events.append("rename")
        rename(*names, **folders)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "rename", spy_rename)
    save(tmp_path, checkpoint_of(1), keep=1)
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert {*FILES, ".partial-step-000000001"} <= set(before)
    assert before[-1] == ".partial-step-000000001"
    assert after == [tmp_path.name]


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO])
@pytest.mark.parametrize("failures", [2, 99])
def test_a_checkpoint_that_the_file_system_does_not_give_is_not_damaged(
    two: Path, code: int, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one would be resumed silently, and the best one be deleted."""
    original, calls = checkpoint_files.read_regular, []

    def fail(path: Path) -> bytes:
        if path.parent.name == "step-000000002" and len(calls) < failures:
            calls.append(path)
            raise OSError(code, os.strerror(code), str(path))
        return original(path)

    monkeypatch.setattr(checkpoint_files, "read_regular", fail)
    monkeypatch.setattr(checkpoints.time, "sleep", lambda _: None)
    if failures == 2:
        assert is_intact(load_newest(two), 2)
        return
    for path in (two, two / "step-000000002"):
        message = error_of(load, path, kind=HvdtrainError)
        assert f"step-000000002 cannot be read ({os.strerror(code)})" in message
    save(two, checkpoint_of(3), keep=1)
    assert "step-000000002" in sorted_names(two)


def seal(folder: Path, **changes: Any) -> None:
    """Change the state of a checkpoint, and give it the right checksum."""
    state = {**json.loads((folder / STATE_FILE).read_text()), **changes}
    state["digests"][STATE_FILE] = _digest_of_state(state)
    (folder / STATE_FILE).write_text(json.dumps(state))


@pytest.mark.parametrize("step", [-5, True, 2.0])
def test_a_step_that_is_no_number_of_updates_is_damage(two: Path, step: Any) -> None:
    seal(two / "step-000000002", step=step)
    assert is_intact(load_newest(two), 1)


def test_a_header_of_too_many_tensors_is_neither_read_nor_written(two: Path) -> None:
    newest = two / "step-000000002"
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"{number:0100}": entry for number in range(120_000)}).encode()
    data = len(header).to_bytes(8, "little") + header
    (newest / MODEL_FILE).write_bytes(data)
    digests = json.loads((newest / STATE_FILE).read_text())["digests"]
    seal(newest, digests={**digests, MODEL_FILE: xxh3_128(data).hexdigest()})
    assert "a header of" in error_of(load, newest, kind=UsageError)
    many = dict.fromkeys((f"{number:0200}" for number in range(70_000)), np.zeros(0))
    message = error_of(save, two, Checkpoint(many, {}, {"step": 3}), keep=3, kind=UsageError)
    assert "70,000 tensors" in message


def test_a_checkpoint_of_version_0_1_0_is_refused_and_not_skipped(two: Path) -> None:
    seal(two / "step-000000002", format=1)
    for path in (two, two / "step-000000002"):
        message = error_of(load, path)
        assert "step-000000002 was written by hvdtrain 0.1.0" in message
        assert "another directory" in message and "\n" not in message
    with pytest.raises(UsageError, match=r"0\.1\.0"):
        checkpoints.read_newest_state(two)
    save(two, checkpoint_of(3, accuracy=0.5), keep=1)  # pruning reads all of them
    assert is_intact(load_newest(two), 3)


def test_if_all_are_damaged_the_error_names_the_remedy(two: Path) -> None:
    for name in sorted_names(two):
        (two / name / TRAINING_FILE).write_bytes(b"x")
    message = error_of(load_newest, two)
    assert str(two) in message and "--resume never" in message


# Loading a checkpoint by its path


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user without rights")
def test_a_directory_that_cannot_be_listed_is_not_an_empty_one(two: Path) -> None:
    two.chmod(0o700)
    os.setresuid(65534, 65534, 0)
    try:
        with pytest.raises(UsageError, match=r"cannot be listed \(Perm.*--resume never"):
            load_newest(two)
        with pytest.raises(UsageError, match="Permission denied"):
            load(two)
    finally:
        os.setresuid(0, 0, 0)


def test_load_by_directory_of_a_checkpoint_or_of_several(two: Path) -> None:
    names = sorted_names(two)
    for number, name in enumerate(names, start=1):
        assert is_intact(checkpoints.load(two / name), number)
    (two / "best").symlink_to(names[0])
    assert is_intact(checkpoints.load(two / "best"), 1)
    (two / names[1] / MODEL_FILE).unlink()
    assert is_intact(checkpoints.load(two), 1)  # the newest intact one
    with pytest.raises(UsageError, match=rf"{names[1]} is damaged .FileNotFoundError"):
        checkpoints.load(two / names[1])


def test_a_refused_or_missing_checkpoint_is_a_usage_error(two: Path, tmp_path: Path) -> None:
    def refuse(checkpoint: Checkpoint) -> None:
        raise ValueError("w is not finite")

    folder = two / sorted_names(two)[0]
    for path, words in (
        (folder, "is damaged (ValueError: w is not finite)"),
        (two, "none of its 2 checkpoints can be read"),
        (folder / MODEL_FILE, "Not a directory"),
        (two / "absent", "No such file or directory"),
    ):
        message = error_of(checkpoints.load, path, refuse)
        assert str(path) in message and words in message and "--resume" not in message
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"there is no checkpoint in .*empty"):
        checkpoints.load(tmp_path / "empty")


# No code is executed


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", FILES)
def test_a_pickle_with_the_right_checksum_is_not_executed(
    two: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    newest, fuse = two / "step-000000002", tmp_path / "exploded"
    data = pickle.dumps(Bomb(fuse))
    replace_file(newest, name, data)
    assert_falls_back(two, newest, caplog)
    assert "checksum" not in caplog.text  # it was read
    assert not fuse.exists()
    pickle.loads(data)
    assert fuse.exists()  # loading the pickle would have executed it


def replace_file(folder: Path, name: str, data: bytes) -> None:
    """Replace a file as an attacker would, with correct checksums."""
    state = json.loads((folder / STATE_FILE).read_bytes())
    state["digests"][name] = xxh3_128(data).hexdigest()
    write_state(folder, state)
    (folder / name).write_bytes(data)


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write a state with its correct checksum."""
    state["digests"][STATE_FILE] = _digest_of_state(state)
    (folder / STATE_FILE).write_text(json.dumps(state))


def test_a_file_is_read_once_whatever_its_names(
    two: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    newest, hashed = two / "step-000000002", []
    state = json.loads((newest / STATE_FILE).read_bytes())
    digest = state["digests"][MODEL_FILE]
    state["digests"] |= {f"{number}/{MODEL_FILE}": digest for number in range(1000)}
    write_state(newest, state)
    original = checkpoint_files.file_digest

    def counted(path: Path, algorithm: Any) -> str:
        hashed.append(path)
        return original(path, algorithm)

    monkeypatch.setattr(checkpoint_files, "file_digest", counted)
    assert_falls_back(two, newest, caplog)
    assert hashed.count(newest / MODEL_FILE) == 1


def test_loading_compiles_imports_and_runs_nothing(two: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from hvdtrain.steps.checkpoint import load_newest
directory = Path({str(two)!r})
load_newest(directory)  # perform its late imports
seen = []
watched = ("exec", "compile", "import", "marshal.loads", "pickle.find_class", "os.system",
           "subprocess.Popen", "ctypes.dlopen")
sys.addaudithook(lambda event, _: seen.append(event) if event in watched else None)
assert load_newest(directory).state["step"] == 2
print(seen)
"""
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


# Full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a separate file system of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount_point = tmp_path / "disk"
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount_point)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except OSError as error:
        pytest.skip(f"no mount command: {error}")
    if mounted.returncode:
        pytest.skip(f"mount is refused here: {mounted.stderr.strip()}")
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", "-l", str(mount_point)], check=True, timeout=20)


@pytest.mark.parametrize("where", ["model", "training", "state"])
def test_a_full_disk_costs_only_the_new_checkpoint(small_disk: Path, where: str) -> None:
    save(small_disk, checkpoint_of(1), keep=3)
    large = {"large": np.zeros(80_000)}  # 640 kB
    small = checkpoint_of(2)
    checkpoint = Checkpoint(
        {**small.model, **(large if where == "model" else {})},
        {**small.training, **(large if where == "training" else {})},
        {**small.state, **({"note": "x" * 640_000} if where == "state" else {})},
    )
    message = error_of(save, small_disk, checkpoint, keep=3, kind=CheckpointError)
    for words in ("No space left", str(small_disk), "step 2", "step-000000001 is intact"):
        assert words in message
    assert sorted_names(small_disk) == ["step-000000001"]
    assert is_intact(load_newest(small_disk), 1)
    save(small_disk, checkpoint_of(3), keep=3)  # the space is free again
    assert is_intact(load_newest(small_disk), 3)


def test_the_error_of_a_first_save_names_no_checkpoint(small_disk: Path) -> None:
    with pytest.raises(CheckpointError, match="Free some space") as caught:
        save(small_disk, Checkpoint({"large": np.zeros(80_000)}, {}, {"step": 1}), keep=3)
    assert "intact" not in str(caught.value)
    assert sorted_names(small_disk) == []


def test_a_file_size_limit_costs_only_the_new_checkpoint(tmp_path: Path) -> None:
    """Like a quota, but without root."""
    save(tmp_path, checkpoint_of(1), keep=3)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CheckpointError, match="step-000000001 is intact"):
            save(tmp_path, Checkpoint({"w": np.zeros(9000)}, {}, {"step": 2}), keep=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted_names(tmp_path) == ["step-000000001"]
    assert is_intact(load_newest(tmp_path), 1)


def test_a_file_in_place_of_the_directory_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="file"):
        save(tmp_path / "file", checkpoint_of(1), keep=1)
    assert (tmp_path / "file").read_text() == "in the way"


# Origin of a checkpoint


def test_a_checkpoint_of_another_training_is_refused_with_each_difference(two: Path) -> None:
    checkpoint = load_newest(two)
    assert checkpoint is not None
    check_origin(checkpoint, {"model": "small"})
    words = r"step-000000002 .*\(model 'small' there, 'large' here; seed None there, 0 here\)"
    with pytest.raises(UsageError, match=f"{words}.*--checkpoint-dir"):
        check_origin(checkpoint, {"model": "large", "seed": 0})


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    origin = {"model": "small", "training_data_digest": "0a"}
    checkpoint = Checkpoint({}, {}, {"origin": origin}, tmp_path)
    check_origin(checkpoint, origin)
    check_origin(checkpoint, {"model": "small"})  # data of a user's class
    with pytest.raises(UsageError, match=r"\(training data digest '0a' there, 'b1' here\).* data"):
        check_origin(checkpoint, {**origin, "training_data_digest": "b1"})


def test_set_aside_moves_all_checkpoints(two: Path) -> None:
    assert set_aside(two) == two / "before-1"
    assert load_newest(two) is None
    assert is_intact(load_newest(two / "before-1"), 2)
    assert steps_in(two / "before-1") == [1, 2]
    save(two, checkpoint_of(1), keep=1)
    assert is_intact(load_newest(two), 1)
    assert set_aside(two) == two / "before-2"
    assert steps_in(two / "before-1") == [1, 2]
    assert steps_in(two / "before-2") == [1]
