"""A summary comes back from its file as it was, and a file that is none is told in one line."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import GradientMessages, StepSplit, Stopped, Summary

WHOLE = Summary(
    workload="mnist",
    world_size=2,
    train_loss=0.5,
    eval_metrics={"accuracy": 0.75},
    eval_accuracy=0.75,
    images_per_second_mean=100.0,
    step_split=StepSplit(steps=5, data=0.5, slowest_rank=1),
    gradient_messages=GradientMessages(count=4, bytes=1000),
    stopped=Stopped.STEPS,
    options={"epochs": 2},
    environment={"python": "3.11", "variables": {"A": "b"}},
)


def test_there_and_back(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_text(json.dumps(WHOLE.to_json()))
    assert Summary.read(file) == WHOLE
    assert isinstance(Summary.read(file).stopped, Stopped)


def test_the_object_has_the_keys_of_the_contract() -> None:
    content = WHOLE.to_json()
    assert " ".join(content) == (
        "workload framework strategy model world_size devices hosts precision compression "
        "global_batch_size epochs_completed steps_completed samples_trained training_samples "
        "unit train_loss eval_loss "
        "eval_accuracy eval_metrics eval_samples images_per_second_mean images_per_second_std "
        "step_seconds_median seconds_total seconds_to_first_step step_split gradient_messages "
        "peak_memory_bytes utilisation_mean utilisation_lowest parameter_norm stopped "
        "checkpoint timeline profile options environment"
    )
    assert json.loads(json.dumps(content))["stopped"] == "steps"
    assert content["gradient_messages"] == {"count": 4, "bytes": 1000}
    assert Summary(steps_skipped=3).to_json()["steps_skipped"] == 3


def test_what_is_not_finite_is_null() -> None:
    content = Summary(train_loss=math.nan, eval_metrics={"r2": -math.inf}).to_json()
    assert (content["train_loss"], content["eval_metrics"]) == (None, {"r2": None})


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ([1], "expected `object`, got `array`"),
        ({"world_size": "2"}, "world_size: expected `int | null`, got `str`"),
        ({"world_size": 2.5}, "world_size: expected `int | null`, got `float`"),
        ({"world_size": 2**70}, "world_size: expected `int` <= "),
        ({"train_loss": True}, "train_loss: expected `float | null`, got `bool`"),
        ({"stopped": "early"}, "stopped: invalid enum value 'early'"),
        ({"step_split": {"data": "much"}}, "step_split.data: expected `float | null`, got `str`"),
        ({"gradient_messages": {"count": 1}}, "gradient_messages: object missing required field"),
        ({"eval_metrics": {"r2": "good"}}, "eval_metrics[...]: expected `float | null`"),
        ({"world_size": 2}, "there is no images_per_second_mean"),
        ({"images_per_second_mean": None}, "there is no images_per_second_mean"),
    ],
)
def test_what_is_wrong_is_told_by_its_key(content: Any, error: str, tmp_path: Path) -> None:
    needed = ("images_per_second_mean",)
    with pytest.raises(ValueError, match=re.escape(error)) as caught:
        Summary.from_json(content, needed=needed)
    assert len(str(caught.value)) < 100
    file = tmp_path / "s.json"
    file.write_text(json.dumps(content))
    with pytest.raises(
        UsageError, match=re.escape(f"{file} is not a summary of a training: {error}")
    ):
        Summary.read(file, needed=needed)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    with pytest.raises(UsageError, match=f"{file} .*No such file"):
        Summary.read(file)
    file.write_text("{")
    with pytest.raises(UsageError, match=f"{file} is not a summary"):
        Summary.read(file)


def test_keys_of_another_version_are_left_out() -> None:
    assert Summary.from_json({"model": "small", "new": 1}) == Summary(model="small")
    assert Summary.from_json({"seconds_total": 3}).seconds_total == 3
