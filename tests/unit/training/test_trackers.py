"""``--tracker``: what reaches a tracker, what one that fails does to a training, and real runs.

Runs in the real packages are read back by these packages.
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typing_extensions import override

from hvdtrain.config.options import Options
from hvdtrain.errors import EXIT_FAILURE, UsageError
from hvdtrain.steps.summary import Stopped, Summary
from hvdtrain.steps.world import World
from hvdtrain.system.runtime.exit import process_status
from hvdtrain.training import trackers
from hvdtrain.training.plan import Session, TrainingPlan
from hvdtrain.training.trackers import (
    MLflow,
    RunFacts,
    TensorBoard,
    Tracker,
    Trackers,
    check_trackers,
    flat,
    name_and_address,
    open_trackers,
    points,
)

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
STEP = {"step": 20, "epoch": 1, "loss": 0.25, "learning_rate": 0.1, "gpu_busy": float("nan")}
EPOCH = {"step": 30, "epoch": 1, "loss": None, "eval_accuracy": 0.5, "eval_samples": 297}
SUMMARY = Summary(workload="mnist", steps_completed=30, train_loss=0.125, stopped=Stopped.FINISHED)


class Notebook(Tracker):
    """Notes its calls; raises in, or waits for a gate before, one of them."""

    note = "the notebook is here"

    def __init__(self, bad: str = "", gate: threading.Event | None = None) -> None:
        self.bad, self.gate = bad, gate
        self.calls: list[tuple[Any, ...]] = []

    def start(self, where: str = "", facts: RunFacts | None = None) -> Notebook:
        self._take("start", where, facts)
        return self

    def _take(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] == self.bad and self.gate:
            self.gate.wait(60)
        elif call[0] == self.bad:
            raise ConnectionError(f"no\n{self.bad} of https://me:pass@host/x")

    @override
    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._take("write", step, values)

    @override
    def close(self, summary: Summary | None) -> None:
        self._take("close", summary)


@pytest.fixture(autouse=True)
def status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_status, "hangs", False)
    monkeypatch.setattr(process_status, "at_exit", [])


@pytest.mark.parametrize("bad", ["start", "write", "close"])
def test_one_that_raises_gives_one_warning_and_is_left_out(
    bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Others receive everything, in order."""
    broken, notebook, shown = Notebook(bad), Notebook(), list[str]()
    run = Trackers({"mlflow": broken.start, "wandb": notebook.start})
    for step in (1, 2, 3):
        run.write("step", {**STEP, "step": step})
    run.write("epoch", EPOCH)
    run.close(SUMMARY, shown.append)
    run.close(None, shown.append)
    assert [call[0] for call in broken.calls].count(bad) == 1 and broken.calls[-1][0] == bad
    values = {"step/loss": 0.25, "step/learning_rate": 0.1}
    assert notebook.calls[1:] == [
        *(("write", step, values) for step in (1, 2, 3)),
        ("write", 30, {"epoch/eval_accuracy": 0.5}),
        ("close", SUMMARY),
    ]
    (record,) = caplog.records
    assert record.getMessage() == (  # without the password
        f"--tracker mlflow: ConnectionError: no {bad} of https://host/x; the run continues without "
        "it"
    )
    assert (shown, process_status.hangs) == (["the notebook is here"], False)


@pytest.mark.parametrize("stopped", [None, Stopped.PREEMPTED, Stopped.FINISHED])
def test_one_that_hangs_is_waited_for_no_longer_than_promised(
    stopped: Stopped | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "END_TIMEOUT", 0.2)
    monkeypatch.setattr(trackers, "SHORT_END_TIMEOUT", 0.1)
    gate, shown = threading.Event(), list[str]()
    run = Trackers({"tensorboard": Notebook().start, "mlflow": Notebook("close", gate).start})
    run.close(replace(SUMMARY, stopped=stopped) if stopped else None, shown.append)
    gate.set()
    waits = ["waiting for mlflow, at most 0 s"] * (stopped is Stopped.FINISHED)
    assert shown == [*waits, "the notebook is here"]
    (record,) = caplog.records
    assert "--tracker mlflow: not finished in time" in record.getMessage()
    assert process_status.hangs


def test_a_process_that_fails_ends_the_run() -> None:
    notebook = Notebook()
    run = Trackers({"mlflow": notebook.start})
    process_status.act(EXIT_FAILURE)
    assert notebook.calls[1:] == [("close", None)]
    run.write("step", STEP)
    run.close(SUMMARY)
    assert len(notebook.calls) == 2


def test_nested_values_have_short_texts() -> None:
    values = {"a": 1, "b": {"c": (1, 2), "d": {"e": "x" * 999}}, "f": None, "g": Path("p")}
    assert dict(flat(values)) == {"a": "1", "b.c": "[1, 2]", "b.d.e": "x" * 500, "g": '"p"'}


@pytest.mark.parametrize(
    ("choice", "environ", "address"),
    [
        ("wandb", {}, "."),
        ("wandb", {"WANDB_DIR": "w"}, "w"),
        ("wandb=here", {"WANDB_DIR": "w"}, "here"),
        ("mlflow", {}, "mlruns"),
        ("mlflow", {"MLFLOW_TRACKING_URI": "http://h:5000"}, "http://h:5000"),
        ("mlflow=a=b", {"MLFLOW_TRACKING_URI": "http://h:5000"}, "a=b"),
        ("tensorboard", {"WANDB_DIR": "w"}, "runs"),
    ],
)
def test_where_a_tracker_writes(
    choice: str, environ: dict[str, str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_DIR", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert name_and_address(choice) == (choice.partition("=")[0], address)


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("mlruns", True),
        ("/a/b", True),
        ("file:/a/b", True),
        ("http://host:5000", False),
        ("sqlite:///mlflow.db", False),
        ("databricks", False),
        ("databricks://profile", False),
    ],
)
def test_what_is_a_directory(address: str, local: bool) -> None:
    assert trackers.is_local(address) is local


def test_a_missing_package_is_reported_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in trackers.TRACKERS:
        for module in [known for known in sys.modules if known.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
        for folder in (False, True):  # of earlier runs: no package
            if folder:
                (tmp_path / name).mkdir()
            with pytest.raises(UsageError, match=rf"pip install 'hvdtrain\[{name}\]'"):
                check_trackers([name])


def test_a_directory_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file", tmp_path / "file" / "board"):
        with pytest.raises(UsageError, match=f"--tracker tensorboard={path}: "):
            check_trackers([f"tensorboard={path}"])


def session(name: str = "mnist", **options: Any) -> Session:
    plan = TrainingPlan(
        model="small",
        global_batch=32,
        epochs=14,
        num_steps=None,
        lr_scaling="linear",
        lr=0.0125,
        schedule={
            "epochs": 14,
            "warmup_epochs": 3.0,
            "schedule": "linear",
            "milestones": (),
            "decay": 0.1,
        },
        weight_decay=0.0,
    )
    world = World(rank=0, size=2, local_rank=0, local_size=2, host="h", hosts=1)
    parts = {
        "workload": SimpleNamespace(name=name),
        "options": Options(**options),
        "plan": plan,
        "adapter": SimpleNamespace(name="horovod", world=world),
        "task": SimpleNamespace(options=SimpleNamespace(precision="fp32")),
    }
    return cast(Session, SimpleNamespace(**parts))


def test_the_facts_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook()
    monkeypatch.setattr(trackers, "TRACKERS", {"mlflow": (notebook.start, "", "here")})
    monkeypatch.setattr(trackers, "check_trackers", lambda choices: None)
    options: Any = {"tracker": ("mlflow",), "seed": 7}
    open_trackers(session("my task#1", **options), "../../'x", step=40)
    open_trackers(session(**options), "", step=0)
    (_, where, facts), (_, _, other) = notebook.calls
    assert (where, facts.project, facts.name) == ("here", "hvdtrain-my task_1", "small horovod 2")
    assert (facts.training_id, facts.step, other.step) == (".._..__x", 40, 0)
    assert len(other.training_id) == 12 and other.training_id != facts.training_id
    expected = {"seed": 7, "model": "small", "global_batch": 32, "lr": 0.0125, "world_size": 2}
    assert expected.items() <= facts.parameters.items()
    assert "num_steps" not in facts.parameters
    assert facts.environment["host"] == "h" and "ended" not in facts.environment


# Runs in the real packages

ODD = {  # metrics of a user's own
    "top-1 (%)": 0.75,
    "..": 1.0,
    "../../outside": 2.0,
    "/a//b": 3.0,
    "a\nb\x00": 4.0,
    "gro\u00df": 5.0,
    "x" * 999: 6.0,
}


def play(
    start: Callable[[str, RunFacts], Tracker],
    where: Path,
    summary: Summary | None = SUMMARY,
    facts: RunFacts = FACTS,
) -> str:
    """Record a training; return the message for the user."""
    tracker = start(str(where), facts)
    for n in (10, 20):
        tracker.write(facts.step + n, points("step", STEP))
    for epoch in (EPOCH, ODD):
        tracker.write(30, points("epoch", epoch))
    tracker.close(summary)
    return tracker.note


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
    note = play(MLflow, tmp_path / "mlruns")
    run = the_run(client)
    assert (run.info.run_name, run.info.status) == ("small horovod 2", "FINISHED")
    assert run.info.run_id in note
    assert len(run.data.params) == 153
    assert run.data.params["schedule.decay"] == "0.5"
    assert run.data.tags["variables.OMP_NUM_THREADS"] == "1"
    history = client.get_metric_history(run.info.run_id, "step/loss")
    assert sorted((point.step, point.value) for point in history) == [(10, 0.25), (20, 0.25)]
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
    play(MLflow, tmp_path / "mlruns", summary)
    assert the_run(client).info.status == status


@pytest.mark.parametrize("named", [False, True])
def test_a_resumed_training_continues_its_run_of_mlflow(
    named: bool, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mlruns"
    play(MLflow, folder, facts=replace(FACTS, training_id="another"))
    play(MLflow, folder, replace(SUMMARY, stopped=Stopped.PREEMPTED))
    resumed = replace(FACTS, parameters={"lr": 0.2, "epochs": 3}, step=20)  # --lr has changed
    if named:  # by the user, who starts another training from the weights
        (last, _) = runs_of(client)
        monkeypatch.setenv("MLFLOW_RUN_ID", last.info.run_id)
        resumed = replace(resumed, step=0)
    play(MLflow, folder, facts=resumed)
    run, other = sorted(runs_of(client), key=lambda run: run.data.tags["training"])
    assert run.data.tags["training"] == FACTS.training_id
    assert (run.data.params["lr"], run.data.params["epochs"]) == ("0.1", "3")
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "step/loss")
    steps = [10, 10, 20, 20] if named else [10, 20, 30, 40]
    assert sorted(point.step for point in history) == steps
    assert "epochs" not in other.data.params


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    note = play(TensorBoard, tmp_path)
    (folder,) = tmp_path.iterdir()
    assert folder.name == "hvdtrain-mnist-0123456789ab"
    assert note == f"tensorboard: curves in {folder}"
    assert curve(folder, "step/loss") == [(10, 0.25), (20, 0.25)]
    assert curve(folder, "summary/train_loss") == [(30, 0.125)]
    assert curve(folder, "epoch/.._.._outside") == [(30, 2.0)]
    (table,) = values(folder, "parameters")
    assert b"| schedule.decay | 0.5 |" in table[1].item()


def test_a_resumed_training_continues_its_curves(tmp_path: Path) -> None:
    """It was resumed from step 10, and had been at step 20 when it failed."""
    pytest.importorskip("tensorboard")
    play(TensorBoard, tmp_path)
    play(TensorBoard, tmp_path, facts=replace(FACTS, training_id="another"))
    resumed = TensorBoard(str(tmp_path), replace(FACTS, step=10))
    resumed.write(15, {"step/loss": 0.125})
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
    program = f"play(TensorBoard, {str(tmp_path)!r}); print('tensorflow' in sys.modules)"
    assert python(program) == "False\n"


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
    output = python(f"print(play(WandB, {str(tmp_path / 'new')!r}))")
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
play(WandB, {str(tmp_path)!r}, replace(SUMMARY, stopped=Stopped.DIVERGED))
play(WandB, {str(tmp_path)!r}, facts=replace(FACTS, step=20))
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
    program = f"play(WandB, {str(tmp_path / 'new')!r})"
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
        program = "import wandb; print(WandB._mode(SimpleNamespace(_wandb=wandb)))"
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
