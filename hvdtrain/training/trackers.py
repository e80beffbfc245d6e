"""The trackers of ``--tracker``: Weights & Biases, MLflow and TensorBoard.

Their packages are imported by the constructors. ``tracking`` calls them in threads.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import os
import re
import sys
import time
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from typing_extensions import override

from hvdtrain.steps.summary import Stopped, Summary
from hvdtrain.system.files import lock

Figures = Mapping[str, Any]
"""Figures of a log interval or an epoch, by key of ``--metrics``."""

ANSWER = 3.0  # seconds for the server of Weights & Biases to answer
LONGEST_VALUE = 500  # characters; MLflow's limit in its oldest servers
LONGEST_NAME = 80  # characters; MLflow's names are those of files
MOST_METRICS, MOST_NAMES = 1000, 100  # of a request to MLflow
LOCK = ".hvdtrain.lock"  # in a directory of MLflow's files
TRAINING = "training"  # MLflow's tag with the identity of the training


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run when it starts."""

    project: str
    name: str
    parameters: Figures
    environment: Figures
    training_id: str  # a resumed training has that of the run before
    step: int = 0  # number of updates done before


@dataclass(frozen=True)
class LogEntry:
    """Figures at a step; ``kind`` is ``step`` or ``epoch``."""

    kind: str
    figures: Figures
    time: float = field(default_factory=time.time)  # seconds since 1970

    @property
    def step(self) -> int:
        """Number of updates since the start of the training."""
        return int(self.figures["step"])

    @property
    def numbers(self) -> dict[str, float]:
        """The measured values, by the name of their curve."""
        return {
            f"{self.kind}/{plain_name(name)}": value
            for name, value in self.figures.items()
            if isinstance(value, float) and math.isfinite(value)
        }


def plain_name(name: str) -> str:
    """Return a name of a user's metric, option or file as all trackers accept it."""
    return re.sub(r"[^\w.\- ]|^\.+$", "_", name)[:LONGEST_NAME]


def without_password(text: str) -> str:
    """Return ``text`` without the user names and passwords of the URIs in it."""
    return re.sub(r"//[^/@\s]*@", "//", text)


class Tracker(ABC):
    """A run in a tracker; after the constructor, one thread calls all methods."""

    note = ""
    """Message for the user at the end: where the run is."""

    @abstractmethod
    def start(self, facts: RunFacts) -> None:
        """Create the run."""

    @abstractmethod
    def write(self, records: Sequence[LogEntry]) -> None:
        """Add records."""

    @abstractmethod
    def close(self, summary: Summary | None) -> None:
        """Add the summary, if the run has not failed, and end the run."""


class WandB(Tracker):
    """A run of Weights & Biases, offline unless its server can be used."""

    def __init__(self, where: str) -> None:
        import wandb

        if "prompt" not in inspect.signature(wandb.login).parameters:
            raise ImportError(f"wandb {wandb.__version__} is too old: pip install --upgrade wandb")
        self._wandb: Any = wandb
        self._folder = Path(where)
        self._folder.mkdir(parents=True, exist_ok=True)  # else it would write to another one
        self._run: Any = None

    @override
    def start(self, facts: RunFacts) -> None:
        mode = self._mode()
        if mode == "offline":  # nothing at all is sent
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", facts.project),
            id=os.environ.get("WANDB_RUN_ID", facts.training_id),
            resume=os.environ.get("WANDB_RESUME", "allow"),
            dir=self._folder,
            mode=mode,
            config={**facts.parameters, "environment": dict(facts.environment)},
            # The run must neither replace the standard streams nor end the training when a user
            # stops it in the browser, for which Weights & Biases interrupts the main thread.
            settings={"console": "off", "silent": True, "stop_fn": lambda: None},
        )
        self._run.define_metric("*", step_metric="step")
        if self._run.offline:
            folder = self._run.settings.sync_dir
            self.note = f"wandb: offline run in {folder}; upload it with: wandb sync {folder}"
        elif self._run.url:
            self.note = f"wandb: {self._run.url}"

    def _mode(self) -> str:
        """Return the user's mode; by default online if there is a key and the server answers."""
        settings = self._wandb.setup(self._wandb.Settings(silent=True)).settings
        if "WANDB_MODE" in os.environ or settings.mode != "online":
            return str(settings.mode)
        has_key = self._wandb.login(prompt=False, verify=False)
        return "online" if has_key and _answers(settings.base_url) else "offline"

    @override
    def write(self, records: Sequence[LogEntry]) -> None:
        for record in records:
            self._run.log({"step": record.step, **record.numbers})

    @override
    def close(self, summary: Summary | None) -> None:
        if summary:
            plain = json.loads(json.dumps(summary.to_json()))  # of an enum it would store the name
            self._run.summary.update(plain)
        code = int(summary is None or summary.stopped is Stopped.DIVERGED)
        self._run.finish(exit_code=code)
        self._wandb.teardown(exit_code=code)


def _answers(address: str) -> bool:
    """Return whether there is a server, even if its answer is an error."""
    import urllib.error
    import urllib.request

    try:
        urllib.request.urlopen(address, timeout=ANSWER).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True


class MLflow(Tracker):
    """A run of MLflow, in files or on a server."""

    def __init__(self, where: str) -> None:
        self._address = where
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        if is_local(where):
            # The file store needs no database package, but in new versions this permission.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        import mlflow.entities
        import mlflow.exceptions
        import mlflow.tracking

        # A line for each of its tries to reach a server would not help anyone.
        logging.getLogger("urllib3").setLevel(logging.ERROR)
        self._mlflow: Any = mlflow
        self._client: Any = mlflow.tracking.MlflowClient(tracking_uri=self._address)
        self._run = ""

    @override
    def start(self, facts: RunFacts) -> None:
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", facts.project))
        known: Mapping[str, str] = {}
        if run := os.environ.get("MLFLOW_RUN_ID") or self._earlier_run(experiment, facts):
            known = self._client.get_run(run).data.params
            self._client.update_run(run, status="RUNNING")
        else:
            tags = {TRAINING: facts.training_id}
            new = self._client.create_run(experiment, run_name=facts.name, tags=tags)
            run = new.info.run_id
        self._run = run
        tag, parameter = self._mlflow.entities.RunTag, self._mlflow.entities.Param
        for batch in _batches(flat(facts.environment), MOST_NAMES):
            self._client.log_batch(run, tags=[tag(k, v) for k, v in batch])
        # Parameters of a run cannot be changed.
        added = [(k, v) for k, v in flat(facts.parameters) if k not in known]
        for batch in _batches(added, MOST_NAMES):
            self._client.log_batch(run, params=[parameter(k, v) for k, v in batch])
        self.note = f"mlflow: run {run} in {without_password(self._address)}"

    def _experiment(self, name: str) -> str:
        """Create the experiment ``name`` unless it exists, and return its id."""
        with self._alone():
            try:
                return str(self._client.create_experiment(name))
            except self._mlflow.exceptions.MlflowException:
                if known := self._client.get_experiment_by_name(name):
                    return str(known.experiment_id)
                raise

    def _alone(self) -> AbstractContextManager[None]:
        """Exclude other jobs, as two at once would create an experiment twice in files."""
        if not is_local(self._address):
            return nullcontext()
        folder = Path(unquote(urlparse(self._address).path))
        folder.mkdir(parents=True, exist_ok=True)
        return lock(folder / LOCK, "creates an experiment of MLflow")

    def _earlier_run(self, experiment: str, facts: RunFacts) -> str | None:
        """Return the run of the training that is resumed, if it was recorded."""
        if not facts.step:
            return None
        condition = f"tags.{TRAINING} = '{facts.training_id}'"
        runs = self._client.search_runs([experiment], condition, max_results=1)
        return str(runs[0].info.run_id) if runs else None

    @override
    def write(self, records: Sequence[LogEntry]) -> None:
        metrics = [
            self._mlflow.entities.Metric(name, value, round(1000 * record.time), record.step)
            for record in records
            for name, value in record.numbers.items()
        ]
        for batch in _batches(metrics, MOST_METRICS):
            self._client.log_batch(self._run, metrics=batch)

    @override
    def close(self, summary: Summary | None) -> None:
        status = "FAILED"
        if summary:
            self.write([_results(summary)])
            self._client.log_dict(self._run, summary.to_json(), "summary.json")
            ends = {Stopped.DIVERGED: "FAILED", Stopped.PREEMPTED: "KILLED"}
            status = ends.get(summary.stopped or Stopped.FINISHED, "FINISHED")
        self._client.set_terminated(self._run, status)


def is_local(address: str) -> bool:
    """Return whether ``address`` is a directory: no URI of a server, a database or a bucket."""
    return address.startswith("file:") or (":" not in address and address != "databricks")


class TensorBoard(Tracker):
    """Curves and tables in event files, in a directory for each training."""

    def __init__(self, where: str) -> None:
        if "tensorflow" not in sys.modules:  # TensorBoard would import it, in seconds, if it can
            sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("notf"))
        from tensorboard.compat.proto import event_pb2
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._scalar, self._text = event_pb2, scalar_pb, text_pb
        self._new_writer, self._where = EventFileWriter, where
        self._writer: Any = None

    @override
    def start(self, facts: RunFacts) -> None:
        folder = f"{self._where}/{facts.project}-{facts.training_id}"
        self._writer = self._new_writer(folder)
        self.note = f"tensorboard: curves in {folder}"
        # If an earlier run has failed, its points after ``step`` are left out.
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(self._events.Event(step=facts.step + 1, session_log=start))
        self._add_table("parameters", facts.parameters)
        self._add_table("environment", facts.environment)

    @override
    def write(self, records: Sequence[LogEntry]) -> None:
        for record in records:
            event = self._events.Event(wall_time=record.time, step=record.step)
            for name, value in record.numbers.items():
                event.summary.MergeFrom(self._scalar(name, value))
            self._writer.add_event(event)
        self._writer.flush()

    @override
    def close(self, summary: Summary | None) -> None:
        if summary:
            self.write([_results(summary)])
            self._add_table("summary", summary.to_json())
        self._writer.close()

    def _add_table(self, title: str, values: Figures) -> None:
        rows = [f"| {name} | {value.replace('|', '&#124;')} |" for name, value in flat(values)]
        table = "\n".join(["| name | value |", "|---|---|", *rows])
        self._writer.add_event(
            self._events.Event(wall_time=time.time(), summary=self._text(title, table)),
        )


TRACKERS: Mapping[str, Callable[[str], Tracker]] = {
    "wandb": WandB,
    "mlflow": MLflow,
    "tensorboard": TensorBoard,
}


def name_and_address(choice: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the parts of a value of ``--tracker``, the second one also if it is not given."""
    name, _, where = choice.partition("=")
    variables = {"wandb": "WANDB_DIR", "mlflow": "MLFLOW_TRACKING_URI"}
    folders = {"wandb": ".", "mlflow": "mlruns", "tensorboard": "runs"}
    return name, where or environ.get(variables.get(name, "")) or folders[name]


def flat(values: Figures, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the known values as short texts; those of nested objects as ``outer.inner``."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        elif value is not None:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield plain_name(f"{prefix}{name}"), text[:LONGEST_VALUE]


def _batches(items: Any, most: int) -> Iterator[list[Any]]:
    items = list(items)
    for start in range(0, len(items), most):
        yield items[start : start + most]


def _results(summary: Summary) -> LogEntry:
    """Return the numbers of a summary as a record of its last step."""
    figures = {name: value for name, value in summary.to_json().items() if value is not None}
    return LogEntry("summary", {**figures, "step": summary.steps_completed or 0})
