"""``--tracker``: what reaches a tracker, and what one that fails or hangs does to a training."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
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
from hvdtrain.training import trackers, tracking
from hvdtrain.training.plan import Session, TrainingPlan
from hvdtrain.training.trackers import LogEntry, RunFacts, Tracker, flat, name_and_address
from hvdtrain.training.tracking import Trackers, TrackerThread, check_trackers, open_trackers

FACTS = RunFacts(
    project="hvdtrain-mnist",
    name="small single 1",
    parameters={"lr": 0.1},
    environment={"python": "3.11"},
    training_id="0123456789ab",
)
STEP = {"step": 20, "epoch": 1, "loss": 0.25, "learning_rate": 0.1, "gpu_busy": float("nan")}
EPOCH = {"step": 30, "epoch": 1, "loss": None, "eval_accuracy": 0.5, "eval_samples": 297}
SUMMARY = Summary(workload="mnist", steps_completed=30, train_loss=0.125, stopped=Stopped.FINISHED)
CALLS = ("start", "write", "close")


class Notebook(Tracker):
    """Notes its calls; raises in, or waits for a gate before, one of them."""

    note = "the notebook is here"

    def __init__(self, bad: str = "", gate: threading.Event | None = None) -> None:
        self.bad, self.gate = bad, gate
        self.calls: list[tuple[str, Any]] = []

    def _take(self, call: str, value: Any) -> None:
        self.calls.append((call, value))
        if call == self.bad and self.gate is None:
            raise RuntimeError(f"no\n{call}")
        if call == self.bad and self.gate:
            self.gate.wait(60)

    @override
    def start(self, facts: RunFacts) -> None:
        self._take("start", facts)

    @override
    def write(self, records: Sequence[LogEntry]) -> None:
        self._take("write", [(record.kind, record.step) for record in records])

    @override
    def close(self, summary: Summary | None) -> None:
        self._take("close", summary)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Notebook], Trackers]]:
    monkeypatch.setattr(process_status, "hangs", False)

    def start(notebook: Notebook) -> Trackers:
        monkeypatch.setattr(tracking, "TRACKERS", {"mlflow": lambda where: notebook})
        return Trackers([TrackerThread("mlflow", FACTS)])

    yield start


def test_everything_arrives_in_order(opened: Callable[[Notebook], Trackers]) -> None:
    notebook, shown = Notebook(), list[str]()
    run = opened(notebook)
    for step in (1, 2, 3):
        run.write("step", {"step": step})
    run.write("epoch", {"step": 3})
    run.close(SUMMARY, shown.append)
    assert notebook.calls[0] == ("start", FACTS)
    assert notebook.calls[-1] == ("close", SUMMARY)
    written = [record for call, records in notebook.calls[1:-1] for record in records]
    assert written == [("step", 1), ("step", 2), ("step", 3), ("epoch", 3)]
    assert shown == ["the notebook is here"]
    run.close(None, shown.append)
    assert len(shown) == 1 and notebook.calls[-1] == ("close", SUMMARY)
    assert not process_status.hangs


@pytest.mark.parametrize("bad", CALLS)
def test_one_that_raises_gives_one_warning_and_is_left_out(
    bad: str, opened: Callable[[Notebook], Trackers], caplog: pytest.LogCaptureFixture
) -> None:
    notebook, shown = Notebook(bad), list[str]()
    run = opened(notebook)
    for step in range(500):
        run.write("step", {"step": step})
    run.close(SUMMARY, shown.append)
    assert [call for call, _ in notebook.calls].count(bad) == 1
    assert notebook.calls[-1][0] == bad
    (record,) = caplog.records
    assert record.getMessage() == (
        f"--tracker mlflow: RuntimeError: no {bad}; the run continues without it"
    )
    assert (shown, process_status.hangs) == ([], False)


@pytest.mark.parametrize("bad", CALLS)
def test_one_that_hangs_is_waited_for_no_longer_than_promised(
    bad: str,
    opened: Callable[[Notebook], Trackers],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracking, "PATIENCE", 0.2)
    monkeypatch.setattr(tracking, "BRIEF", 0.1)
    gate, shown = threading.Event(), list[str]()
    run = opened(Notebook(bad, gate))
    run.write("step", {"step": 1})
    run.close(SUMMARY, shown.append)
    gate.set()
    assert shown[0].startswith("waiting for mlflow, at most")
    (record,) = caplog.records
    assert "--tracker mlflow has not finished in time" in record.getMessage()
    assert process_status.hangs


@pytest.mark.parametrize("summary", [None, replace(SUMMARY, stopped=Stopped.PREEMPTED)])
def test_a_process_that_may_be_killed_waits_briefly(
    summary: Summary | None,
    opened: Callable[[Notebook], Trackers],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracking, "BRIEF", 0.1)
    gate = threading.Event()
    run = opened(Notebook("start", gate))
    done = threading.Thread(target=run.close, args=(summary,))
    done.start()
    done.join(10)
    gate.set()
    assert not done.is_alive()


def test_a_full_queue_drops_records_and_says_how_many(
    opened: Callable[[Notebook], Trackers],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracking, "CAPACITY", 10)
    gate = threading.Event()
    notebook = Notebook("start", gate)
    run = opened(notebook)
    for step in range(14):
        run.write("step", {"step": step})
    gate.set()
    run.close(SUMMARY)
    ((_, records),) = [call for call in notebook.calls if call[0] == "write"]
    assert [step for _, step in records] == list(range(10))
    (warning,) = caplog.records
    assert "4 records were dropped" in warning.getMessage()


def test_only_finite_measurements_are_curves() -> None:
    assert LogEntry("step", STEP).numbers == {"step/loss": 0.25, "step/learning_rate": 0.1}
    assert LogEntry("epoch", EPOCH).numbers == {"epoch/eval_accuracy": 0.5}


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
def test_where_a_tracker_writes(choice: str, environ: dict[str, str], address: str) -> None:
    assert name_and_address(choice, environ) == (choice.partition("=")[0], address)


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


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    """A notebook that ``open_trackers`` opens as MLflow."""
    notebook = Notebook()
    monkeypatch.setattr(tracking, "TRACKERS", {"mlflow": lambda where: notebook})
    monkeypatch.setattr(tracking, "check_trackers", lambda choices: None)
    monkeypatch.setattr(process_status, "at_exit", [])
    return notebook


def test_the_facts_of_a_run(notebook: Notebook) -> None:
    options: Any = {"tracker": ("mlflow=here",), "seed": 7}
    open_trackers(session("my task#1", **options), "../../'x", step=40).close(SUMMARY)
    open_trackers(session(**options)).close(SUMMARY)
    facts, other = (value for call, value in notebook.calls if call == "start")
    assert (facts.project, facts.name) == ("hvdtrain-my task_1", "small horovod 2")
    assert (facts.training_id, facts.step, other.step) == (".._..__x", 40, 0)
    assert len(other.training_id) == 12 and other.training_id != facts.training_id
    expected = {"seed": 7, "model": "small", "global_batch": 32, "lr": 0.0125, "world_size": 2}
    assert expected.items() <= facts.parameters.items()
    assert "num_steps" not in facts.parameters
    assert facts.environment["host"] == "h" and "ended" not in facts.environment


def test_a_process_that_fails_ends_the_run(notebook: Notebook) -> None:
    run = open_trackers(session(tracker=("mlflow",)))
    run.write("step", STEP)
    process_status.act(EXIT_FAILURE)
    assert notebook.calls[1:] == [("write", [("step", 20)]), ("close", None)]
    run.close(SUMMARY)
    assert len(notebook.calls) == 3


def test_a_password_is_not_shown(
    opened: Callable[[Notebook], Trackers], caplog: pytest.LogCaptureFixture
) -> None:
    class Refused(Notebook):
        @override
        def start(self, facts: RunFacts) -> None:
            raise ConnectionError("https://me:pass@host/x")

    opened(Refused()).close(SUMMARY)
    assert "ConnectionError: https://host/x;" in caplog.text
    assert "pass" not in caplog.text


def test_a_package_that_refuses_to_start_is_a_usage_error_and_no_run_is_started(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(where: str) -> Tracker:
        raise ImportError("its extension is for another Python")

    monkeypatch.setattr(tracking, "TRACKERS", {"mlflow": lambda where: notebook, "wandb": refuse})
    before = set(threading.enumerate())
    with pytest.raises(UsageError, match="--tracker wandb cannot be started: ImportError: its"):
        open_trackers(session(tracker=("mlflow", "wandb")))
    assert not notebook.calls and set(threading.enumerate()) <= before


def test_without_trackers_there_is_no_thread() -> None:
    before = threading.active_count()
    run = open_trackers(session())
    run.write("step", STEP)
    run.close(SUMMARY)
    assert threading.active_count() == before
    assert logging.getLogger(tracking.__name__)
