"""Whether what stands in a file has the form that a report needs; anybody may have written it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Record = dict[str, Any]

RATES = ("images_per_second_mean", "eval_accuracy", "seconds_total")
PARTS = ("data", "compute", "communication", "waiting", "undivided")
CURVES = ("loss", "eval_loss", "eval_accuracy", "learning_rate", "images_per_second")
LARGEST = 2**63  # of whole numbers: a larger one is no measurement, and too large for a float


def check_summary(summary: Mapping[str, Any]) -> None:
    """Refuse a summary whose values are not what their names say.

    Raises:
        ValueError: naming the value.
    """
    _numbers(summary, RATES)
    _numbers(_part(summary, "step_split"), PARTS)
    traffic = _part(summary, "gradient_messages")
    if summary.get("gradient_messages") is not None:
        for key in ("count", "bytes"):
            if traffic.get(key) is None:
                raise ValueError(f"gradient_messages has no {key}")
        _numbers(traffic, ("count", "bytes"))


def checkpoint(state: Any, nbytes: int) -> Record:
    """What a report tells of a checkpoint, from its ``state.json`` and its size.

    Raises:
        ValueError: it is no state of a checkpoint.
    """
    if not isinstance(state, dict):
        raise ValueError("no object, so no state of a checkpoint")
    if state.get("step") is None:
        raise ValueError("it tells no step, so it is no state of a checkpoint")
    metrics = _part(state, "metrics")
    _numbers(metrics, ("accuracy",))
    return {
        "step": state["step"],
        "epoch": _part(state, "position").get("epoch"),
        "accuracy": metrics.get("accuracy"),
        "bytes": nbytes,
    }


def check_record(record: Any) -> None:
    """Refuse what is no line of ``--metrics``.

    Raises:
        ValueError: naming what is wrong.
    """
    if not isinstance(record, dict) or record.get("kind") not in ("step", "epoch"):
        raise ValueError("no record of a training")
    if record.get("step") is None:
        raise ValueError("it tells no step")
    _numbers(record, ("step", *CURVES))


def _part(whole: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = whole.get(key)
    if part is not None and not isinstance(part, dict):
        raise ValueError(f"{key} is {_shown(part)}, no object")
    return part or {}


def _numbers(values: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    for key in keys:
        value = values.get(key)
        whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST
        if not (value is None or whole or isinstance(value, float)):
            raise ValueError(f"{key} is {_shown(value)}, no number")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
