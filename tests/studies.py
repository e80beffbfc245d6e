"""Runs of a scaling study, as written by a trainer."""

from __future__ import annotations

from typing import Any

from hvdtrain.commands.scaling.runs import MeasuredRun
from hvdtrain.steps.summary import Summary

TUTORIAL = "ranks,images_per_second\n1,281.22\n2,382.01\n4,689.22\n8,1341.25\n"
WORDS = ("python", "-m", "hvdtrain.mnist", "--num-steps", "20")
RUN_FIELDS = ("scaling", "command", "machine", "cores", "threads", "ranks_per_host")


def summary(ranks: int, rate: float = 100.0, **changed: Any) -> dict[str, Any]:
    """Return the summary of a trainer."""
    return {
        "workload": "mnist",
        "framework": "pytorch",
        "strategy": "horovod",
        "model": "tutorial",
        "precision": "bf16",
        "world_size": ranks,
        "hosts": 1,
        "global_batch_size": 64 * ranks,
        "images_per_second_mean": rate,
        "timeline": None,
        "stopped": "steps",
        "step_split": {"data": 0.1, "compute": 0.3, "communication": 0.0, "waiting": 0.0},
        **changed,
    }


def run(ranks: int, repeat: int = 1, rate: float = 100.0, **changed: Any) -> MeasuredRun:
    """Return one run; keys that are not its fields belong to its summary."""
    fields = {key: changed.pop(key) for key in RUN_FIELDS if key in changed}
    content = Summary.from_json(summary(ranks, rate, **changed))
    return MeasuredRun(ranks, repeat, content, **{"command": WORDS, **fields})
