"""The time until an evaluation reached the target, from training records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdtrain.commands.study.curves import (
    Evaluation,
    Target,
    TrainingCurves,
    evaluations,
    read_target,
    seconds_to,
)


def training(*records: dict[str, Any]) -> TrainingCurves:
    return TrainingCurves(Path("x"), [], [{"step": 1, **record} for record in records])


def test_the_first_evaluation_that_reaches_the_target() -> None:
    curve = evaluations(
        training(
            {"epoch": 0, "elapsed": 3.0, "eval_accuracy": 0.5, "eval_loss": 2.0},
            {"epoch": 1, "elapsed": None, "eval_accuracy": 1.0},
            {"epoch": 2, "elapsed": 7.5, "eval_accuracy": 0.75, "eval_loss": 1.0},
            {"epoch": 3, "elapsed": 9.0, "eval_accuracy": None},
            {"epoch": 4, "elapsed": 11.0, "eval_accuracy": 0.7},
        ),
        "accuracy",
    )
    assert curve == [Evaluation(1, 3.0, 0.5), Evaluation(3, 7.5, 0.75), Evaluation(5, 11.0, 0.7)]
    assert seconds_to(Target("accuracy", 0.5), curve) == 3.0
    assert seconds_to(Target("accuracy", 0.6), curve) == 7.5
    assert seconds_to(Target("accuracy", 0.8), curve) is None
    assert seconds_to(Target("accuracy", 0.8), []) is None


@pytest.mark.parametrize("text", ["loss=1.5", "error<=1.5", "eval_error <= 1.5"])
def test_a_metric_for_which_lower_is_better(text: str) -> None:
    curve = [Evaluation(1, 3.0, 2.0), Evaluation(2, 6.0, 1.0)]
    assert seconds_to(read_target(text), curve) == 6.0


def test_a_target_is_read_from_the_option() -> None:
    assert read_target("accuracy=0.985") == read_target("eval_accuracy = .985")
    assert str(read_target("map50=0.4")) == "map50 0.4"
    for text in ("accuracy", "=1", "<=1", "accuracy<1", "accuracy=", "accuracy=high"):
        with pytest.raises(ValueError, match="is not NAME=VALUE"):
            read_target(text)
