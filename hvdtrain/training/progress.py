"""What a training shows while it runs: a bar or plain lines, JSON Lines, TensorBoard.

Only the writing rank holds a ``Progress``; the others hold a ``Silent``, which does nothing, so
that the loop never asks who it is.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.segment import ControlType, Segment
from rich.table import Table
from typing_extensions import override

from hvdtrain.config.options import Options
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.steps.summary import Summary, nan_to_null
from hvdtrain.system.files import Output, check_writable
from hvdtrain.system.runtime import terminal

PLAIN_SECONDS = 5.0  # between two lines where the output is no terminal


class _Bar(Bar):
    """A bar whose frames pass through mpirun; see ``terminal``."""

    @override
    def get_renderables(self) -> Iterable[RenderableType]:
        yield _Frame(self.make_tasks_table(self.tasks))


@dataclass(frozen=True)
class _Frame:
    """The first line of ``content`` as a frame; rich takes it for the line that it is on."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        resized = options.update(width=terminal.columns() or options.max_width)
        yield _control(terminal.BEFORE_FRAME)
        yield from console.render_lines(self.content, resized, pad=False)[0]
        yield _control(terminal.AFTER_FRAME)


def _control(codes: str) -> Segment:
    return Segment(codes, control=[(ControlType.CARRIAGE_RETURN,)])  # of no width, never split


class _Screen(Console):
    """A console that never hides the cursor: a run that is killed could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        """Leave it as it is."""
        return False


class Silent:
    """What ranks other than the writer hold."""

    def begin(self, headline: list[str], total: int, done: int) -> None:
        """Show the headline of a training of which ``done`` of ``total`` steps are done already.

        A ``total`` of 0: no step will come.
        """

    def step(self, record: dict[str, Any]) -> None:
        """Show and record the figures of a log interval."""

    def epoch(self, record: dict[str, Any], measured: str = "") -> None:
        """Show and record an epoch; ``measured`` are its metrics besides the loss."""

    def say(self, text: str) -> None:
        """Show a line."""

    def stop(self) -> None:
        """Leave what moves as it is now; what is written from here on comes below it."""

    def predictions(self, pieces: Iterable[bytes]) -> None:
        """Write the file of ``--predict``, which comes in pieces from all ranks."""
        for _ in pieces:  # each takes a collective
            pass

    def end(self, title: str, rows: list[tuple[str, str]], summary: Summary | None = None) -> None:
        """Show the result, write the summary and close all files."""


class Progress(Silent):
    """What the writing rank holds.

    Args:
        options: for ``quiet`` and the files.
        unit: what the samples are, in the plural.

    Raises:
        UsageError: a file cannot be written, or TensorBoard is not installed.
    """

    def __init__(self, options: Options, unit: str = "images") -> None:
        self.unit = unit
        width = terminal.columns()
        self.console = _Screen(
            quiet=options.quiet,
            highlight=False,
            markup=False,
            emoji=False,
            force_terminal=width is not None,
            soft_wrap=width is None,
            width=width or 10_000,  # a file has no edge
        )
        self._lines = _output(options.metrics, "--metrics")
        self._summary = _output(options.summary, "--summary")
        self._predictions = _output(options.predict, "--predict")
        self._tensorboard = options.tensorboard
        self._board = _board(self._tensorboard) if self._tensorboard else None
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._last_line = 0.0
        self._total = 0

    @override
    def begin(self, headline: list[str], total: int, done: int) -> None:
        terminal.clear()
        for line in headline:
            self.console.print(line)
        self._total = total
        if total and self.console.is_terminal and not self.console.quiet:
            self._bar = _Bar(
                TextColumn("epoch {task.fields[epoch]}"),
                BarColumn(),
                TextColumn("step {task.completed}/{task.total}  loss {task.fields[loss]}"),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=self.console,
                refresh_per_second=2,  # each refresh takes time from the core that trains
            )
            self._task = self._bar.add_task(
                "", total=total, completed=done, epoch="-", loss="-", rate=f"- {self.unit}/s"
            )
            self._bar.start()

    @override
    def step(self, record: dict[str, Any]) -> None:
        self._record("step", record)
        loss = f"{record['loss']:.4f}"
        rate = f"{record['images_per_second']:,.0f} {self.unit}/s"
        if "gpu_busy" in record:
            rate += f"  GPU {100 * record['gpu_busy']:.0f} %"
        if self._bar:
            self._bar.update(
                self._task,
                completed=record["step"],
                epoch=record["epoch"] + 1,
                loss=loss,
                rate=rate,
            )
        elif time.monotonic() - self._last_line > PLAIN_SECONDS:
            self._last_line = time.monotonic()
            left = (self._total - record["step"]) * record["seconds_per_step"]
            self.console.print(
                f"epoch {record['epoch'] + 1}  step {record['step']}/{self._total}  loss {loss}  "
                f"{rate}  {_clock(left)} left"
            )

    @override
    def epoch(self, record: dict[str, Any], measured: str = "") -> None:
        self._record("epoch", record)
        tested = (
            f"  test loss {record['eval_loss']:.4f}  {measured}".rstrip()
            if record.get("eval_loss") is not None
            else ""
        )
        # None where --on-nan skip left every update of the epoch out.
        loss = "-" if record["loss"] is None else f"{record['loss']:.4f}"
        self.console.print(f"epoch {record['epoch'] + 1} done: loss {loss}{tested}")

    @override
    def say(self, text: str) -> None:
        self.console.print(text)

    @override
    def stop(self) -> None:
        if self._bar:
            self._bar.stop()
            self.console.print()  # rich has moved down to the bar; this is below it
            self._bar = None

    @override
    def predictions(self, pieces: Iterable[bytes]) -> None:
        assert self._predictions is not None
        with self._predictions.replacing() as file:
            for piece in pieces:
                file.write(piece)
        self._predictions.close()

    @override
    def end(self, title: str, rows: list[tuple[str, str]], summary: Summary | None = None) -> None:
        self.stop()
        table = Table(title=title, show_header=False, title_justify="left")
        for label, value in rows:
            table.add_row(label, value, style=None)
        self.console.print(table)
        if self._lines:
            self._lines.close()
        with self._drawing():
            if self._board:
                self._board.close()
        if self._summary and summary is not None:
            with self._summary.replacing() as file:
                file.write(json.dumps(summary.to_json(), indent=1).encode() + b"\n")
            self._summary.close()

    def _record(self, kind: str, record: dict[str, Any]) -> None:
        if self._lines:
            self._lines.append(json.dumps({"kind": kind, **nan_to_null(record)}).encode() + b"\n")
        with self._drawing():
            for name, value in record.items():
                if self._board and isinstance(value, float):
                    self._board.add_scalar(f"{kind}/{name}", value, record["step"])

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # TensorBoard writes through TensorFlow where that is installed
            raise HvdtrainError(
                f"--tensorboard {self._tensorboard} cannot be written: {error}"
            ) from error


def _output(path: Path | None, option: str) -> Output | None:
    check_writable(path, option)
    return None if path is None else Output(path, option)


def _board(directory: Path) -> Any:
    try:
        from tensorboard.summary import Writer
    except ImportError as error:
        raise UsageError(
            "--tensorboard: TensorBoard is not installed; pip install tensorboard"
        ) from error
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return Writer(str(directory))
    except OSError as error:
        raise UsageError(f"--tensorboard {directory}: {error.strerror or error}") from error


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
