"""The frameworks' profilers: the trace that they write, as other programs read it."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.adapters.framework import Profiler
from hvdtrain.steps.world import World

WORLD = World(rank=1, size=2, local_rank=1, local_size=2, host="h", hosts=1)
FACTS = {"backend": "horovod", "rank": WORLD.rank, "world_size": WORLD.size}


def started(framework: str) -> tuple[Profiler, Any]:
    """Return a running profiler, and a function that computes something large."""
    values = np.ones((500, 500), np.float32)
    if framework == "pytorch":
        torch = pytest.importorskip("torch")
        from hvdtrain.adapters.pytorch.profiler import TorchProfiler

        tensor = torch.from_numpy(values)
        return TorchProfiler(FACTS), lambda: (tensor @ tensor).sum().item()
    tf = pytest.importorskip("tensorflow")
    from hvdtrain.adapters.tensorflow.profiler import TensorFlowProfiler

    constant = tf.constant(values)
    compiled = tf.function(lambda: tf.reduce_sum(tf.matmul(constant, constant)))
    compiled()
    return TensorFlowProfiler(FACTS), lambda: compiled().numpy()


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_the_trace_of_three_updates(
    framework: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    profiler, compute = started(framework)
    before = time.time()
    for number in (21, 22, 23):
        with profiler.step(number):
            compute()
            with profiler.mark("communication: a wait"):
                time.sleep(0.02)
    after = time.time()
    path = tmp_path / "rank-1.json.gz"
    profiler.stop(path)
    assert [file.name for file in tmp_path.iterdir()] == ["rank-1.json.gz"]
    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    assert trace["distributedInfo"] == {"backend": "horovod", "rank": 1, "world_size": 2}
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    steps = [event for event in bars if event["name"].startswith("ProfilerStep#")]
    assert [step["name"] for step in steps] == [f"ProfilerStep#{n}" for n in (21, 22, 23)]
    assert {step["cat"] for step in steps} == {"user_annotation"}
    base = trace["baseTimeNanoseconds"] * 1e-9
    for step in steps:
        assert before - 1 < base + step["ts"] * 1e-6 < after + 1
        end = step["ts"] + step["dur"]
        inside = [bar for bar in bars if step["ts"] <= bar["ts"] < end]
        (wait,) = [bar for bar in inside if bar["name"] == "communication: a wait"]
        assert 20_000 <= wait["dur"] < step["dur"]
        products = [bar for bar in inside if "mm" in bar["name"] or "MatMul" in bar["name"]]
        assert any(bar["cat"] == "cpu_op" and bar["dur"] > 0 for bar in products)
    names = {event["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert {"process_name", "thread_name"} <= names
    out, err = capfd.readouterr()
    assert out == "" and "USDT" not in err
