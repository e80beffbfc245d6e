"""The saves of a training, and its progress as a checkpoint has it."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from hvdtrain.collectives.base import Communicator, SingleRank
from hvdtrain.config.options import Options
from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.steps.sharding import Position
from hvdtrain.system.runtime.exit import process_status
from hvdtrain.training.checkpoint_manager import CheckpointManager, TrainState, train_state
from hvdtrain.training.loop import TrainingLoop
from tests.unit.adapters.test_common_adapter import model_of
from tests.unit.adapters.test_save import StepAdapter
from tests.unit.conftest import OnRanks

SLOW = 0.2  # seconds


@pytest.mark.parametrize("value", [0.5, 3, float("inf")])
def test_the_progress_is_read_with_the_results_of_any_metrics(value: float) -> None:
    metrics = {"loss": 0.25, "mine": value, "samples": 297}
    state = TrainState(7, Position(1, 32), 96, 1.5, 32, metrics, 1)
    content = {**asdict(state), "origin": {}, "path": "x"}  # and other keys
    restored = msgspec.convert(json.loads(json.dumps(content)), TrainState)
    assert restored == state and restored.metrics and type(restored.metrics["samples"]) is int
    assert train_state(content) == state
    for wrong in ({"samples": -1}, {"position": {"epoch": 0, "consumed": -32}}):
        with pytest.raises(UsageError, match="not the checkpoint of a trainer"):
            train_state(content | wrong)


def test_a_rank_that_finds_a_bad_loss_before_the_last_save_does_not_leave_the_others(
    on_ranks: OnRanks,
) -> None:
    """The losses are read every 20 steps, and are those of a rank."""
    saved = []

    def end(communicator: Communicator) -> None:
        loop = object.__new__(TrainingLoop)
        adapter = SimpleNamespace(communicator=communicator)
        save = SimpleNamespace(save=lambda *_, **__: saved.append(communicator.gather(b"")))
        vars(loop).update(adapter=adapter, checkpoints=save, now=None, _finished=lambda: None)

        def read() -> None:
            if not communicator.is_root:
                raise TrainingError("the loss is nan")

        vars(loop).update(updates=SimpleNamespace(read=read))
        loop._save_before_error()

    assert on_ranks(2, end) == [None, None]
    assert not saved


def test_the_figures_of_saves_in_the_background(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a pending save has taken counts for the walltime; what the next one waits, as a wait."""
    monkeypatch.setattr(process_status, "checkpoint", "")
    adapter: Any = StepAdapter(SingleRank())
    task = SimpleNamespace(
        model=model_of(0),
        optimizer={"m": np.array([3.0])},
        train=SimpleNamespace(samples=32, digest=""),
        best=["accuracy", True],
        decoder="pillow",
        loss_scale=None,
    )
    session: Any = SimpleNamespace(
        options=Options(checkpoint_dir=tmp_path),
        adapter=adapter,
        task=task,
        workload=SimpleNamespace(name="own"),
        plan=SimpleNamespace(model="small"),
    )
    manager = CheckpointManager(session)
    manager.save(TrainState(step=1), None)
    before = manager.longest
    time.sleep(SLOW)
    assert manager.longest >= before + SLOW  # it is still pending
    threading.Timer(SLOW, gate.set).start()
    manager.save(TrainState(step=2), None)
    assert manager.saves.waited > SLOW / 2
    manager.save(TrainState(step=3), "finished", last=True)
    figures = manager.figures(steps_per_epoch=10)
    assert figures and figures.count == 3 and figures.waited == manager.saves.waited
    assert figures.stopped >= figures.waited and figures.longest >= 2 * SLOW
    assert [path.name[-1] for path in sorted(tmp_path.glob("step-*"))] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("saved", "now", "noted"),
    [
        ("dali", "pillow", True),
        ("pillow", "dali", True),
        ("dali", "dali", False),
        (None, "pillow", False),
        ("", "dali", False),
        ("dali", "", False),
        ("a\nb", "dali", False),
    ],
)
def test_another_decoder_of_the_images_is_noted(saved: object, now: str, noted: bool) -> None:
    task: Any = SimpleNamespace(decoder=now, notes=("first",))
    CheckpointManager._compare_decoder(SimpleNamespace(task=task), saved)  # type: ignore[arg-type]
    assert len(task.notes) == 1 + noted
    if noted:
        assert f"by {now} from here on" in task.notes[1] and f"--decoder {saved}" in task.notes[1]
