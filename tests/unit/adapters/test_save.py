"""Saves in the background, on ranks that are threads; their disk is a real directory."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.adapters import save as saves
from hvdtrain.adapters import state
from hvdtrain.adapters.framework import Flags
from hvdtrain.collectives.base import Communicator
from hvdtrain.errors import CheckpointError, HvdtrainError, TrainingError
from hvdtrain.steps import checkpoint as checkpoints
from tests.unit.adapters.test_common_adapter import ArrayAdapter, Model, model_of


class Sums:
    """The sums of an update, which the test makes by ``update``."""

    def __init__(self, adapter: StepAdapter) -> None:
        self.adapter, flags = adapter, Flags(stop=False, saving=False)
        adapter.read_flags = lambda: flags

    def update(self) -> None:
        rows = self.adapter.communicator.gather_json(self.adapter.flags)
        flags = Flags(*map(any, zip(*rows, strict=True)))
        self.adapter.read_flags = lambda: flags


class StepAdapter(ArrayAdapter):
    """Exchanges its flags when a test asks for an update."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator)
        self.sums = Sums(self)


def begun(communicator: Communicator, folder: Path, **changes: Any) -> tuple[Any, Model, Any]:
    """Begin a save of step 1 in the background, of replicas that are equal."""
    adapter, model = StepAdapter(communicator), model_of(0)
    adapter.samples_seen = 1
    model["running"]["mean"] += communicator.rank
    model["weights"] |= changes.get(f"rank{communicator.rank}", {})
    momenta = {"m": np.array([3.0])}
    save = adapter.save_checkpoint(folder, model, momenta, state={"step": 1}, wait=False)
    return adapter, model, save


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_saved_is_the_state_at_the_call(
    on_ranks: Any, tmp_path: Path, gate: threading.Event, size: int
) -> None:
    def act(communicator: Communicator) -> Any:
        adapter, model, save = begun(communicator, tmp_path)
        model["weights"]["w"] += 100.0  # the training continues
        adapter.sums.update()
        unfinished = save.poll()
        communicator.wait_for_all()
        gate.set()
        path = save.result()
        return unfinished, path, save.poll(), save.result()

    final = tmp_path / "step-000000001"
    assert on_ranks(size, act) == [(False, final, True, final)] * size
    saved = checkpoints.load_newest(tmp_path)
    assert saved is not None
    assert np.asarray(saved.model["w"]).tolist() == [1.0, 2.0]
    assert np.asarray(saved.model["mean"]).tolist() == [(size - 1) / 2]
    assert np.asarray(saved.training["m"]).tolist() == [3.0]
    assert not list(tmp_path.glob(".partial*"))


def test_a_save_is_complete_some_updates_later_without_waiting(
    on_ranks: Any, tmp_path: Path, gate: threading.Event
) -> None:
    """Each rank makes the same number of updates, and sees the same answer after each."""

    def act(communicator: Communicator) -> list[bool]:
        adapter, _, save = begun(communicator, tmp_path)
        seen = []
        while not (seen and seen[-1]):
            adapter.sums.update()
            seen.append(save.poll())
            if len(seen) == 4:
                assert not list(tmp_path.glob("step-*"))
                gate.set()
        return seen

    first, second = on_ranks(2, act)
    assert first == second
    assert first[:4] == [False] * 4
    assert (tmp_path / "step-000000001").is_dir()


def test_a_second_save_waits_for_the_first(
    on_ranks: Any, tmp_path: Path, gate: threading.Event
) -> None:
    def act(communicator: Communicator) -> Any:
        adapter, model, first = begun(communicator, tmp_path)
        gate.set()
        second = adapter.save_checkpoint(tmp_path, model, {}, state={"step": 2}, wait=False)
        return first.poll(), second.result().name

    assert on_ranks(2, act) == [(True, "step-000000002")] * 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000001", "step-000000002"]


@pytest.mark.parametrize(
    ("trouble", "kind", "text"),
    [
        ("disk", CheckpointError, "step 1 cannot be written"),
        ("nan", TrainingError, "w is not finite after step 1"),
        ("drift", HvdtrainError, "(rank 1) differs from rank 0"),
    ],
)
def test_a_failure_is_raised_on_every_rank_and_the_next_save_is_right(
    on_ranks: Any, tmp_path: Path, gate: threading.Event, trouble: str, kind: type, text: str
) -> None:
    wrong = {"nan": np.array([np.nan, 1.0]), "drift": np.array([1.0, 2.5])}
    changed = {"rank0" if trouble == "nan" else "rank1": {"w": wrong.get(trouble)}}
    if trouble == "nan":
        changed["rank1"] = changed["rank0"]
    ready = threading.Barrier(2)

    def act(communicator: Communicator) -> Any:
        adapter, _, save = begun(communicator, tmp_path, **({} if trouble == "disk" else changed))
        if trouble == "disk" and communicator.is_root:
            checkpoints.remove_partial(tmp_path)
        ready.wait()
        gate.set()
        caught = None
        try:
            save.result()
        except HvdtrainError as error:
            caught = error
        again = adapter.save_checkpoint(tmp_path, model_of(0), {}, state={"step": 2}, wait=False)
        return caught, again.result()

    for caught, path in on_ranks(2, act):
        assert type(caught) is kind
        assert text in str(caught)
        assert path == tmp_path / "step-000000002"
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000002"]


def test_without_memory_for_a_copy_the_training_waits(
    on_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state, "available_memory", lambda: 2)

    def act(communicator: Communicator) -> Any:
        adapter, model, save = begun(communicator, tmp_path)
        over = save.status is not saves.Status.PENDING
        adapter.save_checkpoint(tmp_path, model, {}, state={"step": 2}, wait=False)
        return over

    with caplog.at_level(logging.WARNING):
        assert on_ranks(2, act) == [True, True]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "saving in the background needs 0.0 GiB of memory on h, which has 0.0 GiB"
    ]


def test_the_thread_gives_way_to_the_training() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert saves.in_thread(niceness).result() == min(19, niceness() + saves.NICE)


def test_the_next_save_raises_an_error_that_nobody_has_seen(
    on_ranks: Any, tmp_path: Path, gate: threading.Event
) -> None:
    """Once: the save after it is made."""
    ready = threading.Barrier(2)

    def act(communicator: Communicator) -> Any:
        adapter, model, save = begun(communicator, tmp_path)
        if communicator.is_root:
            checkpoints.remove_partial(tmp_path)
        ready.wait()
        gate.set()
        while not save.poll():
            adapter.sums.update()
        with pytest.raises(CheckpointError, match="step 1 cannot be written"):
            adapter.save_checkpoint(tmp_path, model, {}, state={"step": 2})
        return adapter.save_checkpoint(tmp_path, model, {}, state={"step": 3}).name

    assert on_ranks(2, act) == ["step-000000003"] * 2


def test_a_save_that_cannot_begin_fails_when_it_is_waited_for(
    on_ranks: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()

    def act(communicator: Communicator) -> bool:
        _, _, save = begun(communicator, tmp_path / "file")
        over = save.status is not saves.Status.PENDING
        with pytest.raises(CheckpointError, match="step 1 cannot be written"):
            save.result()
        return over

    assert on_ranks(2, act) == [True, True]


@pytest.mark.parametrize("moment", ["begin", "write", "prune"])
def test_a_directory_that_cannot_be_listed_costs_at_most_one_checkpoint(
    on_ranks: Any,
    tmp_path: Path,
    gate: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    moment: str,
) -> None:
    """As in the minutes in which a file server is replaced by another."""
    is_stale, ready = threading.Event(), threading.Barrier(2)

    def stale(method: Any) -> Any:
        def call(path: Path, *arguments: Any) -> Any:
            if is_stale.is_set():
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return method(path, *arguments)

        return call

    for name in ("iterdir", "glob"):
        monkeypatch.setattr(Path, name, stale(getattr(Path, name)))

    def act(communicator: Communicator) -> Any:
        if moment == "begin":
            is_stale.set()
        adapter, model, save = begun(communicator, tmp_path)
        if moment == "write" and communicator.is_root:
            checkpoints.remove_partial(tmp_path)
        ready.wait()
        is_stale.set()
        gate.set()
        first = save.settle()
        ready.wait()
        is_stale.clear()
        return first, adapter.save_checkpoint(tmp_path, model, {}, state={"step": 2})

    paths = [tmp_path / f"step-00000000{step}" for step in (1, 2)]
    written = moment == "prune"
    assert on_ranks(2, act) == [(paths[0] if written else None, paths[1])] * 2
    assert sorted(tmp_path.iterdir()) == (paths if written else paths[1:])
    assert ("step 1 cannot be written" in caplog.text) is not written


def test_ranks_that_have_summed_nothing_do_not_wait_for_different_disks(
    on_ranks: Any, tmp_path: Path, gate: threading.Event
) -> None:
    def act(communicator: Communicator) -> Any:
        adapter, model = ArrayAdapter(communicator), model_of(0)
        adapter.samples_seen = 1
        save = adapter.save_checkpoint(tmp_path, model, {}, state={"step": 1}, wait=False)
        unfinished = save.poll()
        gate.set()
        return unfinished, save.result().name

    assert on_ranks(2, act) == [(False, "step-000000001")] * 2


def test_no_memory_is_reserved_while_a_save_is_written(
    on_ranks: Any, tmp_path: Path, gate: threading.Event
) -> None:
    """Otherwise it would be written with the values of a later step."""

    def act(communicator: Communicator) -> Any:
        adapter, model, save = begun(communicator, tmp_path)
        model["weights"]["w"] += 100.0
        adapter.reserve_copies(model, {"m": np.array([5.0])})
        gate.set()
        return save.result()

    on_ranks(2, act)
    saved = checkpoints.load_newest(tmp_path)
    assert saved is not None and np.asarray(saved.model["w"]).tolist() == [1.0, 2.0]
