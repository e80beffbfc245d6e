"""Runs of a scaling study, as a trainer would have left them."""

from __future__ import annotations

from typing import Any

from hvdtrain.commands.runs.records import Run
from hvdtrain.steps.summary import Summary

TUTORIAL = "ranks,images_per_second\n1,281.22\n2,382.01\n4,689.22\n8,1341.25\n"
WORDS = ("python", "-m", "hvdtrain.mnist", "--num-steps", "20")
OWN = ("scaling", "command", "machine", "cores", "threads", "ranks_per_host")  # fields of a run


def summary(ranks: int, rate: float = 100.0, **other: Any) -> dict[str, Any]:
    """Return what a trainer would have written."""
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
        **other,
    }


def run(ranks: int, repeat: int = 1, rate: float = 100.0, **other: Any) -> Run:
    """Return one run; keys that are no field of it belong to its summary."""
    own = {k: other.pop(k) for k in OWN if k in other}
    found = Summary.from_json(summary(ranks, rate, **other))
    return Run(ranks, repeat, found, **{"command": WORDS, **own})
