"""Progress output of a training: a bar or plain lines, JSON Lines, trackers."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, ProgressColumn, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.progress import Task as Piece
from rich.segment import ControlType, Segment
from rich.table import Column
from rich.text import Text
from typing_extensions import override

from hvdtrain.config.options import Options
from hvdtrain.errors import escaped
from hvdtrain.steps.summary import Summary, nan_to_null
from hvdtrain.system.files import Output, check_writable
from hvdtrain.system.output.tables import summary_table
from hvdtrain.system.runtime import terminal
from hvdtrain.training.plan import Session
from hvdtrain.training.summary import loss_text
from hvdtrain.training.trackers import Figures, Trackers, open_trackers

PLAIN_SECONDS = 5.0  # between two lines if the output is no terminal


class _Bar(Bar):
    """A bar whose frames pass through mpirun; see ``terminal``."""

    @override
    def get_renderables(self) -> Iterable[RenderableType]:
        yield _Frame(self.make_tasks_table(self.tasks))


@dataclass(frozen=True)
class _Frame:
    """The first line of ``content`` as a frame, which rich treats as the current line."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        resized = options.update(width=terminal.columns() or options.max_width)
        lines = console.render_lines(self.content, resized, pad=False)
        yield _control(terminal.BEFORE_FRAME)
        yield from lines[0] if lines else ()  # nothing to show yet
        yield _control(terminal.AFTER_FRAME)


def _control(codes: str) -> Segment:
    return Segment(codes, control=[(ControlType.CARRIAGE_RETURN,)])  # of no width, never split


class _Clock(ProgressColumn):
    """The elapsed time of a task and, as far as it is known, its remaining time.

    It also advances during a long step, so that users see that the training is alive.
    """

    def render(self, task: Piece) -> Text:
        """Return both times."""
        left, each = "-", task.fields["each"]
        if each is not None and task.total is not None:
            # A step that takes longer than the previous ones does not shorten the others.
            spent = min(time.monotonic() - task.fields["moved"], each * task.fields["stride"])
            left = _clock(max(0.0, (task.total - task.completed) * each - spent))
        return Text(f" {_clock(task.elapsed or 0.0)}  {left} left")


class _Screen(Console):
    """A console that never hides the cursor, which a killed run could not restore."""

    def show_cursor(self, show: bool = True) -> bool:
        """Leave the cursor unchanged."""
        return False


class Progress:
    """Progress output of a rank.

    A rank that does not write (``writes``) shows and records nothing, so that the loop need not
    distinguish ranks. ``unit`` is the plural noun of the samples; ``speed_only`` hides epochs and
    losses; ``trackers`` receive what is recorded.
    """

    def __init__(
        self,
        options: Options,
        unit: str = "images",
        *,
        speed_only: bool = False,
        writes: bool = True,
        trackers: Trackers | None = None,
    ) -> None:
        if not writes:
            options = dataclasses.replace(
                options, quiet=True, metrics=None, summary=None, predict=None
            )
        self.unit, self._speed_only = unit, speed_only
        width = terminal.columns()
        self.console = _Screen(
            quiet=options.quiet,
            highlight=False,
            markup=False,
            emoji=False,
            force_terminal=width is not None,
            soft_wrap=width is None,
            width=width or 10_000,  # no line breaks in a file
        )
        self._lines = _output(options.metrics, "--metrics")
        self._summary = _output(options.summary, "--summary")
        self._predictions = _output(options.predict, "--predict")
        self._trackers = trackers or Trackers({})
        self._bar: Bar | None = None
        self._training: TaskID | None = None  # of the bar; hidden during an evaluation
        self._evaluation: TaskID | None = None
        self._loss, self._rate = "-", f"- {unit}/s"
        self._last_line = 0.0
        self._total = 0

    def begin(self, headline: list[str], total: int, done: int) -> None:
        """Show the headline of a training, of which ``done`` of ``total`` steps are done.

        A ``total`` of 0: there are no steps.
        """
        terminal.clear()
        for line in headline:
            self.message(line)
        self._total = total
        if not self.console.is_terminal or self.console.quiet:
            return
        self._bar = _Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            _Clock(Column(no_wrap=True)),
            console=self.console,
            refresh_per_second=2,  # each refresh takes time from the core that trains
        )
        if total:
            label = "measuring" if self._speed_only else "epoch -"
            self._training = self._add(self._bar, label, done, total, self._figures(done))
        self._bar.start()

    def _add(self, bar: Bar, label: str, done: int, total: int, figures: str = "") -> TaskID:
        return bar.add_task(
            label,
            total=total,
            completed=done,
            figures=figures,
            moved=time.monotonic(),
            each=None,
            stride=1,
        )

    def _figures(self, step: int) -> str:
        learned = "" if self._speed_only else f"  loss {self._loss}"
        return f"step {step}/{self._total}{learned}  {self._rate}"

    def advance(self, step: int, **fields: Any) -> None:
        """Show that ``step`` steps are done, and the ``fields`` of the bar."""
        if self._bar and self._training is not None:
            self._bar.update(
                self._training,
                completed=step,
                moved=time.monotonic(),
                figures=self._figures(step),
                **fields,
            )

    def step(self, record: Figures) -> None:
        """Show and record the figures of a log interval."""
        self._record("step", record)
        step, each, speed = record["step"], record["seconds_per_step"], record["images_per_second"]
        self._loss = loss_text(record["loss"])
        self._rate = f"{speed:,.{int(speed < 10)}f} {self.unit}/s"
        if "gpu_busy" in record:
            self._rate += f"  GPU {100 * record['gpu_busy']:.0f} %"
        epoch = "" if self._speed_only else f"epoch {record['epoch'] + 1}"
        if self._bar:
            self.advance(step, description=epoch or "measuring", each=each)
        else:
            left = f"{_clock((self._total - step) * each)} left"
            self._plain("  ".join(filter(None, (epoch, self._figures(step), left))))

    def _plain(self, line: str) -> None:
        """Show a line every few seconds, if there is no bar."""
        if time.monotonic() - self._last_line > PLAIN_SECONDS:
            self._last_line = time.monotonic()
            self.console.print(line)

    def evaluating(self, done: int, total: int) -> None:
        """Show the number of samples evaluated so far."""
        figures = f"{done:,}/{total:,} {self.unit}"
        if not self._bar:
            if 0 < done < total:
                self._plain(f"evaluating {figures}")
            return
        if self._evaluation is None:
            self._evaluation = self._add(self._bar, "evaluating", 0, total)
            if self._training is not None:
                self._bar.update(self._training, visible=False)
        piece = self._bar.tasks[-1]
        self._bar.update(
            self._evaluation,
            completed=done,
            moved=time.monotonic(),
            figures=figures,
            each=(piece.elapsed or 0.0) / done if done else None,
            stride=max(1, done - round(piece.completed)),
        )

    def _evaluated(self) -> None:
        """Show the training again, if there is one."""
        if self._bar and self._training is not None and self._evaluation is not None:
            self._bar.remove_task(self._evaluation)
            self._bar.update(self._training, visible=True)
            self._evaluation = None

    def epoch(self, record: Figures, measured: str = "") -> None:
        """Show and record an epoch; ``measured`` are its metrics other than the loss."""
        self._record("epoch", record)
        self._evaluated()
        if self._speed_only:
            return
        tested = (
            f"  test loss {loss_text(record['eval_loss'])}  {measured}".rstrip()
            if record.get("eval_loss") is not None
            else ""
        )
        # None if --on-nan skip skipped every update of the epoch.
        loss = loss_text(record["loss"])
        self.console.print(f"epoch {record['epoch'] + 1} done: loss {loss}{tested}")

    def message(self, text: str) -> None:
        """Show a line; names of files in it may contain escape sequences."""
        self.console.print(escaped(text))

    def stop(self) -> None:
        """Stop updating the bar; further output is written below it."""
        if self._bar:
            self._evaluated()
            self._bar.stop()
            self.console.print()  # rich has moved down to the bar; this is below it
            self._bar = None

    def predictions(self, pieces: Iterable[bytes]) -> None:
        """Write the file of ``--predict``, in ``pieces`` from all ranks."""
        if self._predictions is None:
            for _ in pieces:  # each is a collective
                pass
            return
        with self._predictions.replacing() as file:
            for piece in pieces:
                file.write(piece)
        self._predictions.close()

    def end(self, title: str, rows: list[tuple[str, str]], summary: Summary | None = None) -> None:
        """Show the result, write the summary and close all files."""
        self.stop()
        self.console.print(summary_table(title, rows))
        if self._lines:
            self._lines.close()
        if self._summary and summary is not None:
            with self._summary.replacing() as file:
                file.write(json.dumps(summary.to_json(), indent=1).encode() + b"\n")
            self._summary.close()
        self._trackers.close(summary, self.message)

    def _record(self, kind: str, record: Figures) -> None:
        if self._lines:
            self._lines.append(json.dumps({"kind": kind, **nan_to_null(record)}).encode() + b"\n")
        self._trackers.write(kind, record)


def progress_of(session: Session, training_id: str = "", step: int = 0) -> Progress:
    """Return the progress output of this rank, which opens its files; all ranks must call it.

    A training that is resumed has done ``step`` updates; see ``open_trackers``.

    Raises:
        UsageError: on every rank: a file cannot be written, or a tracker is not installed.
    """
    writes = session.adapter.world.is_writer
    return session.adapter.communicator.together(
        lambda: Progress(
            session.options,
            session.workload.unit,
            speed_only=bool(session.task.speed_only),
            writes=writes,
            trackers=open_trackers(session, training_id, step) if writes else None,
        )
    )


def _output(path: Path | None, option: str) -> Output | None:
    check_writable(path, option)
    return None if path is None else Output(path, option)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
