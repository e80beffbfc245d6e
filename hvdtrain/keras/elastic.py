"""``hvd.elastic`` for Keras: Horovod's names for a training that outlives the loss of a rank.

Under ``hvdtrain launch --elastic`` a rank that has lost another one, or is to have another rank,
ends, and a new process takes its place (``system/runtime/elastic.py``). So a commit is a checkpoint
on disk, and ``run`` begins with the newest one. Started otherwise, the same script trains as if
nothing of this were there: a commit does nothing.
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
from hvdtrain.system.runtime.exit import announce, leave, process_status, start_anew
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
# By these a worker asks its rank to stop, and a batch system or a terminal does.
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


class TensorFlowKerasState:
    """A model, its optimizer and values of the script, such as ``batch`` and ``epoch``.

    A signal that asks to stop is taken note of from now on, until ``run`` returns.

    Args:
        model: built.
        optimizer: its own by default.
        backend: not used.
        directory: where the commits are written by rank 0, on a file system that all hosts share.
            Under ``launch --elastic`` it is needed: a process that is started anew knows no more.
        keep: how many of the newest commits stay.
        values: numbers, texts, or lists of them; they become attributes.

    Raises:
        UsageError: the model is not built, or is of a process set; there is no directory; a value
            is none that a commit can hold.
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
                "KerasState: the model has no weights yet: begin it with keras.Input(shape), or "
                "call model.build(shape)"
            )
        self.model, self.optimizer = model, optimizer or model.optimizer
        self.directory: Path | None = None  # None: commits do nothing
        self.keep = keep
        self._names = tuple(values)
        self._set(values)
        self._why = ""  # to stop after the next commit
        self._reset: list[Callable[[], object]] = []
        self._commits = 0
        self._rate: float | None = None  # as the script has set it
        # Of the epoch at hand, by ``UpdateBatchStateCallback``: how many steps it has, what of the
        # dataset of ``shard`` is done (its samples, those trained on), and the last logs.
        self.of_epoch: dict[str, Any] = {}
        self.restored: dict[str, Any] | None = None  # the commit that ``run`` has begun with
        self._walltime = Walltime(ends=None)
        self._looked: float | None = None  # when the last commit was, or could have been
        self._longest = 0.0  # seconds between two of them
        self._runs = 0  # of ``run`` that are under way
        self._former: dict[signal.Signals, Any] = {}  # handlers
        if is_elastic(os.environ):
            self._keep_in(directory)

    def _keep_in(self, directory: str | Path | None) -> None:
        """Commit to ``directory`` from now on, and hear signals."""
        if directory is None:
            raise UsageError(
                'KerasState: give directory="checkpoints", on a file system that all hosts share: '
                "under launch --elastic a commit is a file, since ranks start anew"
            )
        if self.adapter is not session.adapter():
            raise UsageError(
                "KerasState: the model trains in a process set, whose ranks are others after a "
                "change: under launch --elastic train it on all ranks"
            )
        self.directory = Path(directory)
        self._plain_values()
        self._listen()

    @property
    def adapter(self) -> CommonAdapter:
        """The adapter of the ranks that train the model."""
        return adapter_of(self.optimizer)

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Call ``callbacks`` before a commit is restored that another number of ranks has made."""
        self._reset += callbacks

    def sync(self) -> None:
        """Restore the newest commit on all ranks, or send rank 0's state; all ranks call it.

        A learning rate that the script has set by another number of ranks goes on in proportion.
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
        """Write a checkpoint; all ranks call it."""
        if self.directory is None:
            return
        self._commits += 1
        began = time.monotonic()
        checkpoint.save(
            *(self.adapter, self.directory, self.model, self.optimizer),
            keep=self.keep,
            step=self._commits,
            script_rate=self._rate,
            of_epoch=self.of_epoch,
            values=self._plain_values(),
        )
        self._walltime.saved(time.monotonic() - began)

    def commit(self) -> None:
        """Write a checkpoint, and leave for a new start where hosts came or went; all call it."""
        if self.directory is not None:
            with self.adapter.waits.during("commit"):
                why = self._agreed()
                self.save()
            self._leave(why)

    def check_host_updates(self) -> None:
        """Do as ``commit`` where hosts came or went, or the job is to stop; all ranks call it."""
        if self.directory is not None:
            with self.adapter.waits.during("check_host_updates"):
                if why := self._agreed():
                    self.save()
            self._leave(why)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take note within the block of hosts that come and go, the walltime, and signals."""
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

    def _want_stop(self, why: str) -> None:
        if self._why in ("", HOSTS_CHANGED):
            self._why = why

    def _agreed(self) -> str:
        """Return why to stop, the same on all ranks; nothing where they go on."""
        now = time.monotonic()
        self._longest = max(self._longest, now - (self._looked or now))
        self._looked = now
        if self._walltime.is_near(self._longest):
            self._want_stop(WALLTIME)
        told = {why.decode() for why in self.adapter.communicator.gather(self._why.encode())}
        asked = sorted(told - {"", HOSTS_CHANGED})
        return asked[0] if asked else max(told)

    def _leave(self, why: str) -> None:
        anew = why == HOSTS_CHANGED
        if why and self.adapter.world.is_writer:
            goes_on = "the ranks start anew" if anew else "run the same command again to go on"
            text = f"{why}: committed {process_status.checkpoint}: {goes_on}"
            announce(text, mpirun_ends=False)
        if anew:
            start_anew()
        elif why:
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
    """Return ``value`` as JSON knows it.

    Raises:
        UsageError: it does not.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    try:
        json.dumps(value)
    except TypeError:
        raise UsageError(
            f"KerasState: {name} is a {type(value).__name__}; a commit holds numbers, texts and "
            "lists of them, besides the model and its optimizer"
        ) from None
    return value


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``function``, which is given a state first, begin with the newest commit on all ranks.

    Where a rank is lost meanwhile, this process ends, and is started anew.
    """

    @functools.wraps(function)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, TensorFlowKerasState):
            kind = type(state).__name__
            raise UsageError(f"elastic.run: {function.__name__} is given a {kind}, not a state")
        with state.watching(), session.outliving_loss():
            state.sync()
            return function(state, *args, **kwargs)

    return wrapper
