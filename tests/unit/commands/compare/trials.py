"""Trials for tests."""

from __future__ import annotations

from typing import Any

from hvdtrain.commands.compare.methods import Method
from hvdtrain.commands.compare.trials import Trial
from hvdtrain.steps.summary import Summary

WORDS = ("python", "-m", "hvdtrain.mnist", "--num-steps", "20")
SINGLE = Method("single", "pytorch")
DDP = Method("ddp", "pytorch", ranks=2)
HOROVOD = Method("horovod", "pytorch", ranks=2)
PACKED = Method("horovod", "pytorch", compression="fp16", ranks=2)


def trial(method: Method, repeat: int = 1, rate: float = 100.0, **changed: Any) -> Trial:
    """Return one run; ``changed`` are keys of its summary."""
    content = {
        "workload": "mnist",
        "framework": method.framework,
        "strategy": method.strategy,
        "model": "small",
        "precision": "fp32",
        "world_size": method.ranks,
        "hosts": 1,
        "global_batch_size": 64,
        "training_samples": 1500,
        "images_per_second_mean": rate,
        "seconds_to_first_step": 4.0 + repeat,
        "peak_memory_bytes": 1000 * repeat,
        "utilisation_mean": 0.5,
        **changed,
    }
    return Trial(method, repeat, WORDS, 64, "a machine", 1, summary=Summary.from_json(content))


def unavailable_trial(method: Method, reason: str, *, failed: bool = False) -> Trial:
    """Return the record of a method without a run."""
    return Trial(method, 1, WORDS, 64, "a machine", 1, reason=reason, failed=failed)
