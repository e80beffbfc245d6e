"""The progress of a training, as a checkpoint has it."""

from __future__ import annotations

import json
from dataclasses import asdict

import msgspec
import pytest

from hvdtrain.steps.sharding import Position
from hvdtrain.training.checkpoint_manager import TrainState


@pytest.mark.parametrize("value", [0.5, 3, None, True, [0.1, 0.2], float("inf")])
def test_the_progress_is_read_with_any_result_of_a_tasks_own_metric(value: object) -> None:
    state = TrainState(7, Position(1, 32), 96, 1.5, 32, {"loss": 0.25, "mine": value}, 1, [[0, 8]])
    content = {**asdict(state), "origin": {}, "path": "x"}  # and other keys
    assert msgspec.convert(json.loads(json.dumps(content)), TrainState) == state
