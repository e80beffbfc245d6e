"""``hvd.elastic`` for Keras: Horovod's API for a training that survives the loss of a rank.

Under ``hvdtrain launch --elastic`` all ranks exit after a loss or a change of the hosts, and are
replaced by new processes (``system/runtime/elastic.py``). So a commit is a checkpoint on disk, and
``run`` begins with the newest one. If it is started otherwise, the same script trains without
commits, which then have no effect.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdtrain.adapters.common import CommonAdapter
from hvdtrain.errors import EXIT_PREEMPTED, UsageError
from hvdtrain.keras import checkpoint, session
from hvdtrain.keras.callbacks import set_learning_rate
from hvdtrain.keras.elastic_callbacks import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from hvdtrain.keras.model import adapter_of, note_samples, rate_of
from hvdtrain.system.runtime import elastic
from hvdtrain.system.runtime.detect import is_elastic
from hvdtrain.system.runtime.exit import announce, leave, process_status, restart_ranks
from hvdtrain.system.runtime.walltime import Walltime, ends_at

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

HOSTS_CHANGED, WALLTIME = "the hosts have changed", "the walltime is near"
# Stop signals of the elastic worker, of batch systems and of the terminal.
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


class TensorFlowKerasState:
    """A model, its optimizer and values of the script, e.g. ``batch`` and ``epoch``.

    Stop signals are handled from the creation of the state until ``run`` returns.

    Args:
        model: the model, built.
        optimizer: its optimizer; default: that of the compiled model.
        backend: not used.
        directory: directory of the commits, which rank 0 writes, on a file system that all hosts
            share; required under ``launch --elastic``, where restarted processes read it.
        keep: number of recent commits to keep.
        values: numbers, strings, or lists of them; they become attributes.

    Raises:
        UsageError: the model is not built, or is of a process set; the directory is missing; a
            value cannot be saved in a commit.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        backend: Any = None,
        directory: str | Path | None = None,
        keep: int = 3,
        **values: Any,
    ) -> None:
        if not model.built:
            raise UsageError(
                "KerasState: the model has no weights yet: start it with keras.Input(shape), or "
                "call model.build(shape)"
            )
        self.model, self.optimizer = model, optimizer or model.optimizer
        self.directory: Path | None = None  # None: commits do nothing
        self.keep = keep
        self._names = tuple(values)
        self._set(values)
        self._reason = ""  # of a stop after the next commit
        self._reset: list[Callable[[], object]] = []
        self._commits = 0
        self._rate: float | None = None  # set by the script
        # Of the current epoch, by ``UpdateBatchStateCallback``: its number of steps, the progress
        # of the dataset of ``shard`` (samples, samples trained on), and the last logs.
        self.of_epoch: dict[str, Any] = {}
        self.restored: dict[str, Any] | None = None  # the commit from which ``run`` has begun
        self._walltime = Walltime(ends=None)
        self._last_commit: float | None = None  # time of the last commit or check
        self._longest = 0.0  # seconds between two of them
        self._runs = 0  # number of active calls of ``run``
        self._former: dict[signal.Signals, Any] = {}  # previous signal handlers
        if is_elastic(os.environ):
            self._keep_in(directory)

    def _keep_in(self, directory: str | Path | None) -> None:
        """Commit to ``directory`` from now on, and handle signals."""
        if directory is None:
            raise UsageError(
                'KerasState: specify directory="checkpoints", on a file system that all hosts '
                "share: under launch --elastic restarted ranks read the commits from it"
            )
        if self.adapter is not session.adapter():
            raise UsageError(
                "KerasState: the model trains in a process set, whose ranks differ after a change "
                "of the hosts: under launch --elastic train it on all ranks"
            )
        self.directory = Path(directory)
        self._plain_values()
        self._listen()

    @property
    def adapter(self) -> CommonAdapter:
        """The adapter of the ranks that train the model."""
        return adapter_of(self.optimizer)

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Register ``callbacks`` to call before restoring a commit of another number of ranks."""
        self._reset += callbacks

    def sync(self) -> None:
        """Restore the newest commit on all ranks, or send rank 0's state; all ranks must call it.

        If the script's learning rate depends on the number of ranks, the restored one is rescaled.
        """
        self._rate = self._learning_rate()
        if self.directory is None:
            if self.adapter.world.size > 1:
                note_samples(self.optimizer)
                self.adapter.broadcast_state(self.model, self.optimizer)
            return
        state = self._restore(self.directory)
        if state and state["world_size"] != self.adapter.world.size and self._reset:
            if self._rate is not None:
                self.optimizer.learning_rate = self._rate
            for callback in self._reset:
                callback()
            self._rate = self._learning_rate()
            state = self._restore(self.directory)
        self.restored = state
        if not state:
            return
        self._commits, self.of_epoch = state["step"], state["of_epoch"]
        self._set(state["values"])
        if self._rate and state["script_rate"] and state["learning_rate"]:
            ratio = self._rate / state["script_rate"]
            if ratio != 1:
                set_learning_rate(self.optimizer, state["learning_rate"] * ratio)

    def save(self) -> None:
        """Write a checkpoint; all ranks must call it."""
        if self.directory is None:
            return
        self._commits += 1
        began = time.monotonic()
        checkpoint.save(
            self.adapter,
            self.directory,
            self.model,
            self.optimizer,
            keep=self.keep,
            step=self._commits,
            script_rate=self._rate,
            of_epoch=self.of_epoch,
            values=self._plain_values(),
        )
        self._walltime.saved(time.monotonic() - began)

    def commit(self) -> None:
        """Write a checkpoint, and exit to restart if the hosts changed; all ranks must call it."""
        if self.directory is not None:
            with self.adapter.waits.during("commit"):
                reason = self._agreed_reason()
                self.save()
            self._leave(reason)

    def check_host_updates(self) -> None:
        """Commit if the hosts changed or the job is to stop; all ranks must call it."""
        if self.directory is not None:
            with self.adapter.waits.during("check_host_updates"):
                if reason := self._agreed_reason():
                    self.save()
            self._leave(reason)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for changed hosts, the walltime and signals within the block."""
        if self.directory is None:
            yield
            return
        self._listen()
        if self.adapter.world.is_writer and not self._runs:
            self._walltime.ends = ends_at()
            elastic.watch_hosts(lambda: self._want_stop(HOSTS_CHANGED))
        self._runs += 1
        try:
            yield
        finally:
            self._runs -= 1
            while self._former and not self._runs:
                signal.signal(*self._former.popitem())

    def _listen(self) -> None:
        if not self._former:
            for number in SIGNALS:
                self._former[number] = signal.signal(number, self._hear) or signal.SIG_DFL

    def _hear(self, number: int, _: Any) -> None:
        self._want_stop(signal.Signals(number).name)
        if number == signal.SIGINT:  # a second one ends the process at once
            signal.signal(number, signal.default_int_handler)

    def _want_stop(self, reason: str) -> None:
        if self._reason in ("", HOSTS_CHANGED):
            self._reason = reason

    def _agreed_reason(self) -> str:
        """Return the reason to stop, the same on all ranks; empty: continue."""
        now = time.monotonic()
        self._longest = max(self._longest, now - (self._last_commit or now))
        self._last_commit = now
        if self._walltime.is_near(self._longest):
            self._want_stop(WALLTIME)
        gathered = self.adapter.communicator.gather(self._reason.encode())
        reasons = {reason.decode() for reason in gathered}
        stops = sorted(reasons - {"", HOSTS_CHANGED})
        return stops[0] if stops else max(reasons)

    def _leave(self, reason: str) -> None:
        restart = reason == HOSTS_CHANGED
        if reason and self.adapter.world.is_writer:
            hint = "the ranks restart" if restart else "run the same command again to continue"
            text = f"{reason}: committed {process_status.checkpoint}: {hint}"
            announce(text, mpirun_ends=False)
        if restart:
            restart_ranks()
        elif reason:
            leave(EXIT_PREEMPTED)

    def _restore(self, directory: Path) -> dict[str, Any] | None:
        return checkpoint.restore(self.adapter, directory, self.model, self.optimizer)

    def _learning_rate(self) -> float | None:
        rate = rate_of(self.optimizer)
        return None if rate is None else float(rate)

    def _plain_values(self) -> dict[str, Any]:
        return {name: _plain(name, getattr(self, name)) for name in self._names}

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class KerasState(TensorFlowKerasState):
    """The state of a Keras model; see ``TensorFlowKerasState``."""


def _plain(name: str, value: Any) -> Any:
    """Return ``value`` as a JSON value.

    Raises:
        UsageError: it cannot be converted.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    try:
        json.dumps(value)
    except TypeError:
        raise UsageError(
            f"KerasState: {name} is a {type(value).__name__}; a commit can contain only numbers, "
            "strings and lists of them, in addition to the model and its optimizer"
        ) from None
    return value


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``function``, whose first argument is a state, to begin with the newest commit.

    If a rank is lost meanwhile, this process exits, and is restarted.
    """

    @functools.wraps(function)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, TensorFlowKerasState):
            kind = type(state).__name__
            raise UsageError(f"elastic.run: {function.__name__} was passed a {kind}, not a state")
        with state.watching(), session.outliving_loss():
            state.sync()
            return function(state, *args, **kwargs)

    return wrapper
