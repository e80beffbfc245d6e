"""Runs in the real packages, read back by these packages."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.steps.summary import Stopped
from hvdtrain.training.trackers import LogEntry, MLflow, RunFacts, TensorBoard
from tests.unit.training.test_tracking import EPOCH, STEP, SUMMARY

FACTS = RunFacts(
    project="hvdtrain-mnist",
    name="small horovod 2",
    parameters={
        "lr": 0.1,
        "model": "small",
        "schedule": {"decay": 0.5},
        **{f"x{n}": n for n in range(150)},
    },
    environment={"python": "3.11", "variables": {"OMP_NUM_THREADS": "1"}},
    training_id="0123456789ab",
)
ODD = {  # metrics of a user's own
    "step": 30,
    "top-1 (%)": 0.75,
    "..": 1.0,
    "../../outside": 2.0,
    "/a//b": 3.0,
    "a\nb\x00": 4.0,
    "gro\u00df": 5.0,
    "x" * 999: 6.0,
}


def play(tracker: Any, summary: Any = SUMMARY, facts: RunFacts = FACTS) -> Any:
    tracker.start(facts)
    tracker.write([LogEntry("step", {**STEP, "step": facts.step + n}) for n in (10, 20)])
    tracker.write([LogEntry("epoch", EPOCH), LogEntry("epoch", ODD)])
    tracker.close(summary)
    return tracker


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("mlflow")
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=str(tmp_path / "mlruns"))


def runs_of(client: Any) -> Any:
    experiment = client.get_experiment_by_name("hvdtrain-mnist")
    return client.search_runs([experiment.experiment_id])


def the_run(client: Any) -> Any:
    (run,) = runs_of(client)
    return run


def test_mlflows_file_store(client: Any, tmp_path: Path) -> None:
    tracker = play(MLflow(str(tmp_path / "mlruns")))
    run = the_run(client)
    assert (run.info.run_name, run.info.status) == ("small horovod 2", "FINISHED")
    assert run.info.run_id in tracker.note
    assert len(run.data.params) == 153
    assert run.data.params["schedule.decay"] == "0.5"
    assert run.data.tags["variables.OMP_NUM_THREADS"] == "1"
    history = client.get_metric_history(run.info.run_id, "step/loss")
    assert [(point.step, point.value) for point in history] == [(10, 0.25), (20, 0.25)]
    assert abs(history[0].timestamp / 1000 - run.info.start_time / 1000) < 60
    odd = {"top-1 ___": 0.75, "_": 1.0, ".._.._outside": 2.0, "_a__b": 3.0, "a_b_": 4.0}
    odd |= {"gro\u00df": 5.0, "x" * 80: 6.0, "eval_accuracy": 0.5}
    epoch = {k: v for k, v in run.data.metrics.items() if k.startswith("epoch/")}
    assert epoch == {f"epoch/{name}": value for name, value in odd.items()}
    assert run.data.metrics["summary/train_loss"] == 0.125
    path = client.download_artifacts(run.info.run_id, "summary.json", str(tmp_path))
    assert json.loads(Path(path).read_text()) == SUMMARY.to_json()


@pytest.mark.parametrize(
    ("summary", "status"),
    [
        (None, "FAILED"),
        (replace(SUMMARY, stopped=Stopped.DIVERGED), "FAILED"),
        (replace(SUMMARY, stopped=Stopped.PREEMPTED), "KILLED"),
    ],
)
def test_how_a_run_of_mlflow_ended(client: Any, tmp_path: Path, summary: Any, status: str) -> None:
    play(MLflow(str(tmp_path / "mlruns")), summary)
    assert the_run(client).info.status == status


@pytest.mark.parametrize("named", [False, True])
def test_a_resumed_training_continues_its_run_of_mlflow(
    named: bool, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = str(tmp_path / "mlruns")
    play(MLflow(address), facts=replace(FACTS, training_id="another"))
    play(MLflow(address), replace(SUMMARY, stopped=Stopped.PREEMPTED))
    resumed = replace(FACTS, parameters={"lr": 0.2, "epochs": 3}, step=20)  # --lr has changed
    if named:  # by the user, who starts another training from the weights
        (last, _) = runs_of(client)
        monkeypatch.setenv("MLFLOW_RUN_ID", last.info.run_id)
        resumed = replace(resumed, step=0)
    play(MLflow(address), facts=resumed)
    run, other = sorted(runs_of(client), key=lambda run: run.data.tags["training"])
    assert run.data.tags["training"] == FACTS.training_id
    assert (run.data.params["lr"], run.data.params["epochs"]) == ("0.1", "3")
    assert run.info.status == "FINISHED"
    points = client.get_metric_history(run.info.run_id, "step/loss")
    assert [point.step for point in points] == ([10, 20] * 2 if named else [10, 20, 30, 40])
    assert "epochs" not in other.data.params


def test_two_jobs_create_the_same_experiment(client: Any, tmp_path: Path) -> None:
    address = str(tmp_path / "mlruns")
    both = [MLflow(address), MLflow(address)]
    threads = [
        threading.Thread(target=play, args=(tracker, SUMMARY, replace(FACTS, training_id=str(n))))
        for n, tracker in enumerate(both)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {run.info.status for run in runs_of(client)} == {"FINISHED"}
    assert len(runs_of(client)) == 2


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracker = play(TensorBoard(str(tmp_path)))
    (folder,) = tmp_path.iterdir()
    assert folder.name == "hvdtrain-mnist-0123456789ab"
    assert tracker.note == f"tensorboard: curves in {folder}"
    assert curve(folder, "step/loss") == [(10, 0.25), (20, 0.25)]
    assert curve(folder, "summary/train_loss") == [(30, 0.125)]
    assert curve(folder, "epoch/.._.._outside") == [(30, 2.0)]
    (table,) = values(folder, "parameters")
    assert b"| schedule.decay | 0.5 |" in table[1].item()


def test_a_resumed_training_continues_its_curves(tmp_path: Path) -> None:
    """It was resumed from step 10, and had been at step 20 when it failed."""
    pytest.importorskip("tensorboard")
    play(TensorBoard(str(tmp_path)))
    play(TensorBoard(str(tmp_path)), facts=replace(FACTS, training_id="another"))
    resumed = TensorBoard(str(tmp_path))
    resumed.start(replace(FACTS, step=10))
    resumed.write([LogEntry("step", {**STEP, "step": 15, "loss": 0.125})])
    resumed.close(None)
    assert len(list(tmp_path.iterdir())) == 2
    folder = tmp_path / "hvdtrain-mnist-0123456789ab"
    assert curve(folder, "step/loss") == [(10, 0.25), (15, 0.125)]


def values(folder: Path, tag: str) -> list[tuple[int, Any]]:
    from tensorboard.backend.event_processing import plugin_event_accumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = plugin_event_accumulator.EventAccumulator(str(folder)).Reload().Tensors(tag)
    return [(event.step, make_ndarray(event.tensor_proto)) for event in events]


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(step, float(value)) for step, value in values(folder, tag)]


def test_tensorboard_does_not_import_tensorflow(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    program = (
        "import sys; from hvdtrain.training.trackers import TensorBoard; "
        f"TensorBoard({str(tmp_path)!r}); sys.exit('tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # without netrc
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def python(program: str, **variables: str) -> str:
    """Return the output of a process: wandb replaces ``sys.exit`` and hooks of the process."""
    names = (
        "from hvdtrain.training.trackers import *; from tests.unit.training.test_trackers import *"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{names}\n{program}"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def records_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a run, as wandb itself reads them."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    yield from map(json.loads, done.stdout.splitlines())


@pytest.mark.usefixtures("offline")
def test_wandb_offline(tmp_path: Path) -> None:
    output = python(f"print(play(WandB({str(tmp_path / 'new')!r})).note)")
    (line,) = output.splitlines()  # and nothing from the package
    folder = Path(line.rpartition(" ")[2])
    assert line == f"wandb: offline run in {folder}; upload it with: wandb sync {folder}"
    records = list(records_of(folder))
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    assert (run["project"], run["run_id"]) == ("hvdtrain-mnist", "0123456789ab")
    config = run["config"]["update"]
    assert (config["model"], config["schedule"]) == ("small", {"decay": 0.5})
    assert config["environment"]["variables"] == {"OMP_NUM_THREADS": "1"}
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    assert [(row["step"], row["step/loss"]) for row in rows[:2]] == [(10, 0.25), (20, 0.25)]
    assert rows[-1]["epoch/.._.._outside"] == 2.0
    results: dict[str, Any] = {}
    for record in records:
        results |= record.get("summary", {}).get("update", {})
    assert (results["train_loss"], results["stopped"]) == (0.125, "finished")
    assert records[-1]["exit"]["exit_code"] == 0


@pytest.mark.usefixtures("offline")
def test_a_resumed_training_continues_its_run_of_wandb(tmp_path: Path) -> None:
    """As two folders of one run, which `wandb sync` uploads in order."""
    program = f"""
play(WandB({str(tmp_path)!r}), replace(SUMMARY, stopped=Stopped.DIVERGED))
play(WandB({str(tmp_path)!r}), facts=replace(FACTS, step=20))
"""
    assert python(program) == ""
    folders = sorted(tmp_path.glob("wandb/offline-run-*"))
    assert len(folders) == 2
    for folder, code, steps in zip(folders, (1, 0), ([10, 20], [30, 40]), strict=True):
        records = list(records_of(folder))
        (run,) = [record["run"] for record in records if record["type"] == "run"]
        assert (run["run_id"], run["resume"]) == ("0123456789ab", True)
        assert records[-1]["exit"].get("exit_code", 0) == code
        rows = [record["history"]["item"] for record in records if record["type"] == "history"]
        assert [row["step"] for row in rows if "step/loss" in row] == steps


KEY = "5ec2e7" * 7


@pytest.mark.usefixtures("offline")
def test_no_key_and_no_variable_is_in_the_files_of_wandb(tmp_path: Path) -> None:
    program = f"play(WandB({str(tmp_path / 'new')!r}))"
    python(program, WANDB_MODE="offline", WANDB_API_KEY=KEY, MY_TOKEN=KEY)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 3
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


@pytest.mark.usefixtures("offline")
def test_wandb_is_online_only_with_a_key_and_a_server(tmp_path: Path) -> None:
    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *words: Any) -> None:
            pass

    def mode(address: str, **variables: str) -> str:
        program = f"print(WandB({str(tmp_path)!r})._mode())"
        return python(program, WANDB_BASE_URL=address, **variables).strip()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert mode(address) == "offline"
        assert mode(address, WANDB_API_KEY=KEY) == "online"  # an error is an answer
        assert mode(address, WANDB_API_KEY=KEY, WANDB_MODE="offline") == "offline"
        login = f"machine 127.0.0.1:{server.server_port}\n  login user\n  password {KEY}\n"
        (tmp_path / "netrc").write_text(login)
        assert mode(address) == "online"
        server.shutdown()
    assert mode(address) == "offline"
    assert mode(address, WANDB_MODE="online") == "online"  # as the user wants it
