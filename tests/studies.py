"""Runs of a scaling study and of a comparison, as written by a trainer."""

from __future__ import annotations

from typing import Any

from hvdtrain.commands.compare.methods import Method, Trial
from hvdtrain.commands.scaling.runs import MeasuredRun
from hvdtrain.steps.summary import Summary

TUTORIAL = "ranks,images_per_second\n1,281.22\n2,382.01\n4,689.22\n8,1341.25\n"
WORDS = ("python", "-m", "hvdtrain.mnist", "--num-steps", "20")
SINGLE = Method("single", "pytorch")
DDP = Method("ddp", "pytorch", ranks=2)
HOROVOD = Method("horovod", "pytorch", ranks=2)
PACKED = Method("horovod", "pytorch", compression="fp16", ranks=2)
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


def trial(method: Method, repeat: int = 1, rate: float = 100.0, **changed: Any) -> Trial:
    """Return one run of a comparison; ``changed`` are keys of its summary."""
    content = {
        "framework": method.framework,
        "strategy": method.strategy,
        "model": "small",
        "precision": "fp32",
        "global_batch_size": 64,
        "step_split": None,
        "training_samples": 1500,
        "seconds_to_first_step": 4.0 + repeat,
        "peak_memory_bytes": 1000 * repeat,
        "utilisation_mean": 0.5,
        **changed,
    }
    measured = Summary.from_json(summary(method.ranks, rate, **content))
    return Trial(method, repeat, WORDS, 64, "a machine", 1, summary=measured)


def unavailable_trial(method: Method, reason: str, *, failed: bool = False) -> Trial:
    """Return the record of a method without a run."""
    return Trial(method, 1, WORDS, 64, "a machine", 1, reason=reason, failed=failed)
