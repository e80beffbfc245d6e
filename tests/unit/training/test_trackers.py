"""Runs in the real packages, read back."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.steps.summary import Stopped
from hvdtrain.training.trackers import LogEntry, MLflow, RunFacts, TensorBoard, WandB, _has_password
from tests.unit.training.test_tracking import EPOCH, STEP, SUMMARY

FACTS = RunFacts(
    "hvdtrain-mnist",
    "small horovod 2",
    {"lr": 0.1, "model": "small", "schedule": {"decay": 0.5}, **{f"x{n}": n for n in range(150)}},
    {"python": "3.11", "variables": {"OMP_NUM_THREADS": "1"}},
)
ODD = {"step": 30, "top-1 (%)": 0.75}  # a metric of a user's own


def play(tracker: Any, summary: Any = SUMMARY) -> Any:
    tracker.start(FACTS)
    tracker.write([LogEntry("step", {**STEP, "step": n}) for n in (10, 20)])
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


def the_run(client: Any) -> Any:
    experiment = client.get_experiment_by_name("hvdtrain-mnist")
    (run,) = client.search_runs([experiment.experiment_id])
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
    assert run.data.metrics["epoch/top-1 ___"] == 0.75
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


def test_a_run_of_mlflow_is_continued(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = str(tmp_path / "mlruns")
    play(MLflow(address), replace(SUMMARY, stopped=Stopped.PREEMPTED))
    monkeypatch.setenv("MLFLOW_RUN_ID", the_run(client).info.run_id)
    tracker = MLflow(address)
    tracker.start(replace(FACTS, parameters={"lr": 0.2, "epochs": 3}))  # --lr may have changed
    tracker.write([LogEntry("step", STEP)])
    tracker.close(SUMMARY)
    run = the_run(client)
    assert (run.data.params["lr"], run.data.params["epochs"]) == ("0.1", "3")
    assert run.info.status == "FINISHED"


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    play(TensorBoard(str(tmp_path)))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(tmp_path)).Reload()
    points = [(e.step, float(make_ndarray(e.tensor_proto))) for e in events.Tensors("step/loss")]
    assert points == [(10, 0.25), (20, 0.25)]
    (table,) = events.Tensors("parameters")
    assert b"| schedule.decay | 0.5 |" in bytes(make_ndarray(table.tensor_proto).item())
    (end,) = events.Tensors("summary/train_loss")
    assert (end.step, float(make_ndarray(end.tensor_proto))) == (30, 0.125)


def test_tensorboard_does_not_import_tensorflow(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    program = (
        "import sys; from hvdtrain.training.trackers import TensorBoard; "
        f"TensorBoard({str(tmp_path)!r}).close(None); sys.exit('tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0


def records_of(path: Path) -> Iterator[bytes]:
    """Yield the records of an offline run: LevelDB's log format after a header of seven bytes."""
    data, offset, record = path.read_bytes(), 7, b""
    while offset + 7 <= len(data):
        if -offset % 32768 < 7:  # the rest of a block is too small for a header
            offset += -offset % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        record += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))  # without netrc


@pytest.mark.usefixtures("offline")
def test_wandb_offline(tmp_path: Path) -> None:
    """In a process of its own: the package replaces ``sys.exit`` and hooks of the process."""
    program = (
        "from tests.unit.training.test_trackers import WandB, play\n"
        f"print(play(WandB({str(tmp_path / 'new')!r})).note)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()  # and nothing from the package
    folder = Path(line.rpartition(" ")[2])
    assert line == f"wandb: offline run in {folder}; upload it with: wandb sync {folder}"
    (file,) = folder.glob("run-*.wandb")
    from wandb.proto.wandb_internal_pb2 import Record as Stored

    stored = [Stored.FromString(data) for data in records_of(file)]
    (run,) = [one.run for one in stored if one.WhichOneof("record_type") == "run"]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (config["model"], config["schedule"]) == ("small", {"decay": 0.5})
    assert config["environment"]["variables"] == {"OMP_NUM_THREADS": "1"}
    assert run.project == "hvdtrain-mnist"
    history = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row}
        for row in (one.history.item for one in stored)
        if row
    ]
    assert [(row["step"], row["step/loss"]) for row in history[:2]] == [(10, 0.25), (20, 0.25)]
    results = {
        item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
        for one in stored
        for item in one.summary.update
    }
    assert (results["train_loss"], results["stopped"]) == (0.125, "finished")
    assert any(one.WhichOneof("record_type") == "exit" for one in stored)


@pytest.mark.usefixtures("offline")
def test_wandb_is_online_only_with_a_key_and_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    import http.server
    import threading

    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *words: Any) -> None:
            pass

    tracker = object.__new__(WandB)

    def settings_of(address: str) -> None:
        class Settings:
            base_url = address

        class Package:
            @staticmethod
            def setup() -> Any:
                return type("Setup", (), {"settings": Settings})

        tracker._wandb = Package

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings_of(f"http://127.0.0.1:{server.server_port}")
        assert not tracker._has_server()
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        assert tracker._has_server()  # an error is an answer
        server.shutdown()
    settings_of("http://127.0.0.1:9")
    assert not tracker._has_server()


def test_a_key_that_wandb_login_has_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(file))
    assert not _has_password("api.wandb.ai")
    file.write_text("machine api.wandb.ai\n  login user\n  password 123\n")
    assert _has_password("api.wandb.ai")
    assert not _has_password("api.example.com")
    file.write_text("nonsense")
    assert not _has_password("api.wandb.ai")
