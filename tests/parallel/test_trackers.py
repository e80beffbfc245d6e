"""``--tracker`` in real trainings: packages that fail or hang change nothing, and rank 0 writes."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Outcome, on_demand, ranks, run
from tests.parallel.conftest import assert_bit_equal, train

PROGRAM = ("-m", "hvdtrain.mnist", "--model=small", "--num-steps=20", "--log-every=1")
RAISING = {
    "wandb/__init__.py": """
Settings = dict

def login(prompt):
    raise RuntimeError("no\\nlogin")

setup = init = login
""",
    "mlflow/__init__.py": "",
    "mlflow/entities.py": "",
    "mlflow/tracking.py": """
class MlflowClient:
    def __init__(self, tracking_uri):
        pass

    def __getattr__(self, name):
        raise OSError(f"{name}: the server is on fire")
""",
}
# Python waits for such a thread when it exits, and so would the job.
HANGING = {
    "wandb/__init__.py": """
import threading, time
from types import SimpleNamespace

Settings = dict

class Run:
    offline, summary = False, {}

    def __getattr__(self, name):
        return lambda *values, **named: None

    def finish(self, exit_code):
        threading.Thread(target=time.sleep, args=(600,)).start()
        time.sleep(600)

def setup(settings):
    return SimpleNamespace(settings=SimpleNamespace(mode="offline"))

def init(**named):
    return Run()
"""
}


def packages(folder: Path, files: dict[str, str]) -> str:
    """Write packages in place of the real ones; return a PYTHONPATH with them."""
    for name, text in files.items():
        path = folder / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return f"{folder / 'packages'}:{ROOT}"


def real(name: str) -> str:
    """Return a PYTHONPATH with the real package, wherever it is installed."""
    pytest.importorskip(name)
    spec = importlib.util.find_spec(name)
    assert spec and spec.origin
    return f"{ROOT}:{Path(spec.origin).parents[1]}"


def test_packages_that_raise_at_each_call_change_nothing(tmp_path: Path) -> None:
    path = packages(tmp_path, RAISING)

    def alone(number: int, *words: str, **more: Any) -> Outcome:
        return run([sys.executable, *words], cwd=tmp_path, PYTHONPATH=path, **more)

    options = PROGRAM[2:]
    plain = train(1, tmp_path / "plain", "mnist", *options, start=alone)
    tracked = ("--tracker=wandb", "--tracker=mlflow")
    recorded = train(1, tmp_path / "recorded", "mnist", *options, *tracked, start=alone)
    assert_bit_equal(plain, recorded)
    for key in ("train_loss", "eval_loss", "parameter_norm", "stopped", "steps_completed"):
        assert recorded.summary[key] == plain.summary[key]
    outcome = run([sys.executable, *PROGRAM, *tracked], cwd=tmp_path, PYTHONPATH=path, code=0)
    assert sorted(outcome.said) == [
        "hvdtrain: --tracker mlflow: OSError: get_experiment_by_name: the server is on fire; the "
        "run continues without it",
        "hvdtrain: --tracker wandb: RuntimeError: no login; the run continues without it",
    ]


@on_demand  # half a minute of waiting
def test_a_package_that_hangs_delays_the_end_by_half_a_minute(tmp_path: Path) -> None:
    path, began = packages(tmp_path, HANGING), time.monotonic()
    summary = tmp_path / "summary.json"
    outcome = ranks(2, *PROGRAM, "--tracker=wandb", f"--summary={summary}", PYTHONPATH=path, code=0)
    assert outcome.said == [
        "hvdtrain: --tracker wandb: not finished in time: the last records may be missing"
    ]
    assert "waiting for wandb, at most 30 s" in outcome.out
    assert 30 < time.monotonic() - began < 150
    assert summary.exists()


def test_only_rank_0_writes_and_a_resumed_training_continues_its_run(tmp_path: Path) -> None:
    path, folder = real("mlflow"), tmp_path / "mlruns"
    summary = f"--summary={tmp_path / 's.json'}"
    choice = f"--tracker=mlflow={folder}"
    saved = f"--checkpoint-dir={tmp_path / 'c'}"
    outcome = ranks(2, *PROGRAM, choice, saved, summary, PYTHONPATH=path)
    assert (outcome.code, outcome.said) == (0, []), outcome.err
    evaluation = (*PROGRAM, "--evaluate-only", choice, saved, "--quiet")
    evaluated = ranks(2, *evaluation, PYTHONPATH=path)
    assert (evaluated.code, evaluated.out, evaluated.err) == (0, "", "")
    resumed = ranks(2, *PROGRAM, "--num-steps=25", choice, saved, "--quiet", PYTHONPATH=path)
    assert (resumed.code, resumed.out, resumed.err) == (0, "", "")
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=str(folder))
    experiment = client.get_experiment_by_name("hvdtrain-mnist")
    second, first = client.search_runs([experiment.experiment_id])
    assert first.data.params["world_size"] == "2"
    losses = client.get_metric_history(first.info.run_id, "step/step_loss")
    assert [point.step for point in losses] == list(range(1, 26))
    for done in (first, second):
        assert done.info.status == "FINISHED"
        assert done.data.metrics["summary/eval_accuracy"] > 0
