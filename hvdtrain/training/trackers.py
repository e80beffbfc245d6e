"""``--tracker``: a training recorded by Weights & Biases, MLflow or TensorBoard.

Only the writing rank has trackers. Their packages write in the background. One that fails is
dropped with a warning, and the training continues.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import math
import os
import re
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

from typing_extensions import override

from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import Stopped, Summary
from hvdtrain.system.files import check_folder
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.exit import process_status
from hvdtrain.system.runtime.tuning import set_defaults
from hvdtrain.training.plan import Session
from hvdtrain.training.summary import environment, non_default_options

log = logging.getLogger(__name__)

Figures = Mapping[str, Any]
"""Figures of a log interval or an epoch, by key of ``--metrics``."""

END_TIMEOUT = 30.0  # seconds for all trackers to end their runs
SHORT_END_TIMEOUT = 2.0  # the same if the process may be killed; the longest wait without a message
SERVER_TIMEOUT = 3.0  # seconds for the server of Weights & Biases to answer
MAX_LINE = 300  # characters of an error
MAX_NAME = 80  # characters; MLflow's names are those of files
MAX_VALUE = 500  # characters; MLflow's limit in its oldest servers
MAX_NAMES = 100  # parameters or tags in a request to MLflow
TRAINING = "training"  # MLflow's tag with the identity of the training


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """What is known of a run when it starts."""

    project: str
    name: str
    parameters: Figures
    environment: Figures
    training_id: str  # a resumed training has that of the run before
    step: int = 0  # number of updates done before


class Tracker(ABC):
    """A run in a tracker; the constructor creates it, or continues that of a resumed training."""

    note = ""  # where the run is: a message to the user at the end

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the points of some curves after ``step`` updates."""

    @abstractmethod
    def close(self, summary: Summary | None) -> None:
        """Add the summary, if the run has not failed, and end the run."""


class WandB(Tracker):
    """A run of Weights & Biases, offline unless its server can be used."""

    def __init__(self, where: str, facts: RunFacts) -> None:
        import wandb

        self._wandb: Any = wandb
        mode = self._mode()
        if mode == "offline":  # nothing at all is sent
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        Path(where).mkdir(parents=True, exist_ok=True)  # else it would write to another one
        self._run = run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", facts.project),
            id=os.environ.get("WANDB_RUN_ID", facts.training_id),
            resume=os.environ.get("WANDB_RESUME", "allow"),
            dir=where,
            mode=mode,
            config={**facts.parameters, "environment": dict(facts.environment)},
            # The run must neither replace the standard streams nor end the training when a user
            # stops it in the browser, for which Weights & Biases interrupts the main thread.
            settings={"console": "off", "silent": True, "stop_fn": lambda: None},
        )
        run.define_metric("*", step_metric="step")
        self.note = f"wandb: {run.url}" if run.url else ""
        if run.offline:
            folder = run.settings.sync_dir
            self.note = f"wandb: offline run in {folder}; upload it with: wandb sync {folder}"

    def _mode(self) -> str:
        """Return the user's mode; by default online if there is a key and the server answers."""
        from urllib import error, request

        settings = self._wandb.setup(self._wandb.Settings(silent=True)).settings
        if "WANDB_MODE" in os.environ or settings.mode != "online":
            return str(settings.mode)
        try:
            if not self._wandb.login(prompt=False, verify=False):
                return "offline"
            request.urlopen(settings.base_url, timeout=SERVER_TIMEOUT).close()
        except error.HTTPError:
            return "online"  # an error is an answer
        except (OSError, ValueError):
            return "offline"
        return "online"

    @override
    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    @override
    def close(self, summary: Summary | None) -> None:
        if summary:
            plain = json.loads(json.dumps(summary.to_json()))  # of an enum it would store the name
            self._run.summary.update(plain)
        code = int(summary is None or summary.stopped is Stopped.DIVERGED)
        self._run.finish(exit_code=code)
        self._wandb.teardown(exit_code=code)


class MLflow(Tracker):
    """A run of MLflow, in files or on a server."""

    def __init__(self, where: str, facts: RunFacts) -> None:
        defaults = {"MLFLOW_DISABLE_TELEMETRY": "true"}
        # The training waits for the server to create the run.
        defaults |= {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
        if is_local(where):
            # The file store needs no database package, but in new versions this permission.
            defaults |= {"MLFLOW_ALLOW_FILE_STORE": "true"}
        set_defaults(defaults)
        import mlflow.entities
        import mlflow.tracking

        # A line for each of its tries to reach a server would not help anyone.
        logging.getLogger("urllib3").setLevel(logging.ERROR)
        self._entities: Any = mlflow.entities
        self._client: Any = mlflow.tracking.MlflowClient(tracking_uri=where)
        self._written: deque[Any] = deque(maxlen=1000)  # the latest, in the background
        self._run = run = self._open_run(facts)
        self._client.update_run(run, status="RUNNING")
        known = self._client.get_run(run).data.params  # they cannot be changed
        tag, parameter = self._entities.RunTag, self._entities.Param
        tags = [tag(*item) for item in flat(facts.environment)]
        added = [parameter(*item) for item in flat(facts.parameters) if item[0] not in known]
        for start in range(0, max(len(tags), len(added)), MAX_NAMES):
            end = start + MAX_NAMES
            self._client.log_batch(run, params=added[start:end], tags=tags[start:end])
        self.note = f"mlflow: run {run} in {without_password(where)}"

    def _open_run(self, facts: RunFacts) -> str:
        """Return the run of the training that is resumed, if it was recorded, or a new one."""
        if run := os.environ.get("MLFLOW_RUN_ID"):
            return run
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", facts.project)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        if facts.step:
            condition = f"tags.{TRAINING} = '{facts.training_id}'"
            if runs := self._client.search_runs([experiment], condition, max_results=1):
                return str(runs[0].info.run_id)
        tags = {TRAINING: facts.training_id}
        new = self._client.create_run(experiment, run_name=facts.name, tags=tags)
        return str(new.info.run_id)

    @override
    def write(self, step: int, values: Mapping[str, float]) -> None:
        metric, now = self._entities.Metric, round(1000 * time.time())
        metrics = [metric(name, value, now, step) for name, value in values.items()]
        written = self._client.log_batch(self._run, metrics=metrics, synchronous=False)
        self._written.append(written)

    @override
    def close(self, summary: Summary | None) -> None:
        status = "FAILED"
        if summary:
            self.write(*_results(summary))
            self._client.log_dict(self._run, summary.to_json(), "summary.json")
            ends = {Stopped.DIVERGED: "FAILED", Stopped.PREEMPTED: "KILLED"}
            status = ends.get(summary.stopped or Stopped.FINISHED, "FINISHED")
        self._client.set_terminated(self._run, status)
        for written in self._written:
            written.wait()  # raises if it has failed


class TensorBoard(Tracker):
    """Curves and tables in event files, in a directory for each training."""

    def __init__(self, where: str, facts: RunFacts) -> None:
        if "tensorflow" not in sys.modules:  # TensorBoard would import it, in seconds, if it can
            sys.modules.setdefault("tensorboard.compat.notf", ModuleType("notf"))
        from tensorboard.compat.proto import event_pb2
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = f"{where}/{facts.project}-{facts.training_id}"
        self.note = f"tensorboard: curves in {folder}"
        self._events, self._scalar, self._text = event_pb2, scalar_pb, text_pb
        # A random name: it would follow a link that others have put there.
        self._writer = EventFileWriter(folder, filename_suffix=f".{secrets.token_hex(8)}")
        # If an earlier run has failed, its points after ``step`` are left out.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(event_pb2.Event(step=facts.step + 1, session_log=start))
        self._add_table("parameters", facts.parameters)
        self._add_table("environment", facts.environment)

    @override
    def write(self, step: int, values: Mapping[str, float]) -> None:
        event = self._events.Event(wall_time=time.time(), step=step)
        for name, value in values.items():
            event.summary.MergeFrom(self._scalar(name, value))
        self._writer.add_event(event)
        self._writer.flush()

    @override
    def close(self, summary: Summary | None) -> None:
        if summary:
            self.write(*_results(summary))
            self._add_table("summary", summary.to_json())
        self._writer.close()

    def _add_table(self, title: str, values: Figures) -> None:
        rows = [f"| {name} | {value.replace('|', '&#124;')} |" for name, value in flat(values)]
        table = self._text(title, "\n".join(["| name | value |", "|---|---|", *rows]))
        self._writer.add_event(self._events.Event(wall_time=time.time(), summary=table))


# By name: the tracker, the variable that has the default of WHERE, and the one without it.
TRACKERS: Mapping[str, tuple[Callable[[str, RunFacts], Tracker], str, str]] = {
    "wandb": (WandB, "WANDB_DIR", "."),
    "mlflow": (MLflow, "MLFLOW_TRACKING_URI", "mlruns"),
    "tensorboard": (TensorBoard, "", "runs"),
}


def name_and_address(choice: str) -> tuple[str, str]:
    """Return the parts of a value of ``--tracker``, the second one also if it is not given."""
    name, _, where = choice.partition("=")
    _, variable, folder = TRACKERS[name]
    return name, where or os.environ.get(variable) or folder


def is_local(address: str) -> bool:
    """Return whether ``address`` is a directory: no URI of a server, a database or a bucket."""
    return address.startswith("file:") or (":" not in address and address != "databricks")


def plain_name(name: str) -> str:
    """Return a name of a user's metric, option or file as all trackers accept it."""
    return re.sub(r"[^\w.\- ]|^\.+$", "_", name)[:MAX_NAME]


def without_password(text: str) -> str:
    """Return ``text`` without the user names and passwords of the URIs in it."""
    return re.sub(r"//[^/@\s]*@", "//", text)


def flat(values: Figures, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the known values as short texts; those of nested objects as ``outer.inner``."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        elif value is not None:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield plain_name(f"{prefix}{name}"), text[:MAX_VALUE]


def points(kind: str, figures: Figures) -> dict[str, float]:
    """Return the finite measurements of a ``step``, ``epoch`` or ``summary``, by curve."""
    return {
        f"{kind}/{plain_name(name)}": value
        for name, value in figures.items()
        if isinstance(value, float) and math.isfinite(value)
    }


def _results(summary: Summary) -> tuple[int, dict[str, float]]:
    return summary.steps_completed or 0, points("summary", summary.to_json())


def check_trackers(choices: Sequence[str]) -> None:
    """Check the values of ``--tracker`` before a training, without importing a package.

    Raises:
        UsageError: a package is not installed, or a directory is not writable.
    """
    for choice in choices:
        name, where = name_and_address(choice)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # the folder of earlier runs has the same name
            remedy = f"pip install 'hvdtrain[{name}]'"
            raise UsageError(f"--tracker {name}: {name} is not installed; {remedy}")
        if is_local(where):
            check_folder(Path(where.removeprefix("file:")), f"--tracker {name}={where}")


def new_training_id() -> str:
    """Return an identity for a training, which its checkpoints keep."""
    return secrets.token_hex(6)


def open_trackers(session: Session, training_id: str, step: int) -> Trackers:
    """Start the trackers of a run, on the writing rank.

    Args:
        session: of the run.
        training_id: identity of the training; empty: of an evaluation, a run of its own.
        step: number of updates done before by the training.

    Raises:
        UsageError: a package is not installed, or a directory is not writable.
    """
    options, world, plan = session.options, session.adapter.world, session.plan
    if not options.tracker:
        return Trackers({})
    check_trackers(options.tracker)  # also those of ranks that a launcher does not report
    known = non_default_options(options) | dataclasses.asdict(plan)
    known |= {"framework": options.framework, "strategy": session.adapter.name}
    known |= {"precision": session.task.options.precision}
    known |= {"world_size": world.size, "hosts": world.hosts}
    facts = RunFacts(
        project=plain_name(f"hvdtrain-{session.workload.name}"),
        name=f"{plan.model} {session.adapter.name} {world.size}",
        parameters={k: v for k, v in known.items() if v is not None},
        environment={k: v for k, v in environment(world).items() if k != "ended"},
        # Of a checkpoint, perhaps of someone else.
        training_id=plain_name(training_id or new_training_id()),
        step=step,
    )
    named = [name_and_address(choice) for choice in options.tracker]
    return Trackers({name: partial(TRACKERS[name][0], where, facts) for name, where in named})


class Trackers:
    """The trackers of this rank, which may have none; they end with the process at the latest."""

    def __init__(self, starts: Mapping[str, Callable[[], Tracker]]) -> None:
        self._trackers: dict[str, Tracker] = {}
        for name, start in starts.items():
            terminal.status(f"starting {name}")
            with self._dropped_if_it_fails(name):
                self._trackers[name] = start()
        if self._trackers:
            process_status.at_exit.append(lambda code: self.close(None))  # if the run has failed

    @contextmanager
    def _dropped_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            self._trackers.pop(name, None)
            message = without_password(" ".join(str(error).split()))
            problem = f"{type(error).__name__}: {message}"[:MAX_LINE]
            log.warning("--tracker %s: %s; the run continues without it", name, problem)

    def write(self, kind: str, figures: Figures) -> None:
        """Add figures of a ``step`` or ``epoch`` to each tracker."""
        for name, tracker in list(self._trackers.items()):
            with self._dropped_if_it_fails(name):
                tracker.write(int(figures["step"]), points(kind, figures))

    def close(
        self, summary: Summary | None, show: Callable[[str], None] = lambda line: None
    ) -> None:
        """End the run in each tracker, and show where it is; a second call does nothing.

        Args:
            summary: of the run; None if it failed.
            show: shows a line to the user.
        """
        trackers, self._trackers = self._trackers, {}
        if not trackers:
            return
        open_, notes = list(trackers), list[str]()

        def end() -> None:
            for name, tracker in trackers.items():
                with self._dropped_if_it_fails(name):
                    tracker.close(summary)
                    notes.append(tracker.note)
                open_.remove(name)

        thread = Thread(target=end, name="trackers", daemon=True)  # a server may not answer
        thread.start()
        thread.join(SHORT_END_TIMEOUT)
        if open_ and summary is not None and summary.stopped is not Stopped.PREEMPTED:
            show(f"waiting for {' and '.join(open_)}, at most {END_TIMEOUT:.0f} s")
            thread.join(END_TIMEOUT - SHORT_END_TIMEOUT)
        for note in filter(None, notes):
            show(note)
        if open_:
            process_status.hangs = True  # a package may also wait when the process exits
            text = "not finished in time: the last records may be missing"
            log.warning("--tracker %s: %s", ", ".join(open_), text)
