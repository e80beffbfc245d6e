"""Supervision of a launcher: forward signals, read the output if required, detect silence.

A batch system that reclaims its nodes sends TERM. Open MPI's mpirun then kills its ranks within
half a second (version 5) or two (4), too soon to save, and no option of version 5 changes that. But
every launcher forwards USR1 to its ranks on all hosts and waits for them to end; the trainers of
``hvdtrain`` save on it and exit with 75. So TERM, INT and HUP are converted to USR1 here. Batch
systems also send TERM to every process at once. Open MPI's mpirun is therefore started with TERM
blocked, which its ranks do not inherit: they receive it, mpirun does not. Nor does its ssh, whose
end would end the job (``deaf_to_term``).
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from typing import IO

import psutil

from hvdtrain.commands.launch.argv import Launch
from hvdtrain.commands.launch.hosts import RankLayout
from hvdtrain.commands.launch.launcher_choice import OPEN_MPI
from hvdtrain.commands.launch.outcome import (
    JobOutcome,
    code_after_stop,
    cut_block,
    report,
    split_endings,
)
from hvdtrain.commands.launch.prepare import checkpoint_dir
from hvdtrain.errors import HvdtrainError
from hvdtrain.system.runtime.command import TIMED_OUT, start
from hvdtrain.system.runtime.scratch import CLEAR
from hvdtrain.system.runtime.spawn import StopSignals, exit_code

# The signals that make a launcher end its ranks, and the seconds before the next one. Hydra and
# srun forward a first INT, and end on a second one soon after it.
END_SIGNALS = dict.fromkeys(OPEN_MPI, ((signal.SIGINT, 10.0),))
DEFAULT_SIGNALS = ((signal.SIGTERM, 5.0), (signal.SIGINT, 0.5), (signal.SIGINT, 5.0))
FORWARDED = b"hvdtrain: SIGUSR1: "
CHUNK = 65_536  # bytes
REPORT_AFTER = 2.0  # seconds for the ranks to stop before the wait is reported
POLL = 0.2  # seconds between two checks of the time and of signals
BLOCK_TIMEOUT = 0.2  # seconds for mpirun to write the rest of a block between two rules
GRACE = 30.0  # seconds after TERM or HUP, the longest that batch systems wait before they kill
DRAIN = 5.0  # seconds for the output to be closed after the end of the launcher

STEP = re.compile(rb"\bstep (\d+)")
# The mark of each dialect; its first group is the rank. Open MPI and Hydra put one before every
# piece that they read, so also into the middle of a line: "<rank 0> par<rank 1> other\n<rank 0>
# tial". The others write whole lines, so that a mark counts only at the beginning.
MARKS = {
    "openmpi4": re.compile(rb"\[\d+,(\d+)\]<std(?:out|err|diag)>:"),
    "openmpi5": re.compile(rb"\[[^\[\]\s]*,(\d+)\]<std(?:out|err|diag)>: ?"),
    "mpich": re.compile(rb"<rank (\d+)> "),
    "intel": re.compile(rb"\A\[(\d+)\] ?"),
    "pals": re.compile(rb"\A\S+ (\d+): ?"),
    "srun": re.compile(rb"\A *(\d+): ?"),
}
# The periodic message of a rank that waits for another one (``waits``): no sign of progress.
WAITING = re.compile(rb"hvdtrain: \d+ s in [^\n]* waiting for ")


def holds_output(data: bytes) -> bool:
    """Return whether ``data`` is a sign of progress, not only of a rank waiting for another one."""
    return any(line and not WAITING.search(line) for line in data.split(b"\n"))


@dataclass
class RankOutput:
    """Joins the pieces of a stream to lines, rank by rank."""

    dialect: str  # of the marks
    _raw: bytes = b""
    _incomplete: dict[int | None, bytes] = field(default_factory=dict)

    def feed(self, data: bytes) -> list[tuple[int | None, bytes]]:
        """Return the lines that ``data`` completes, with their rank; None: the launcher's."""
        *complete, self._raw = (self._raw + data).split(b"\n")
        return [self._line(line) for line in complete]

    def end(self) -> list[tuple[int | None, bytes]]:
        """Return the unfinished lines when the stream closes."""
        lines = [self._line(self._raw)] if self._raw else []
        self._raw = b""
        return [*lines, *((rank, text) for rank, text in self._incomplete.items() if text)]

    def _line(self, line: bytes) -> tuple[int | None, bytes]:
        """Return the last piece of ``line``, which its end completes; keep the others."""
        before, *marked = MARKS[self.dialect].split(line)
        pieces: list[tuple[int | None, bytes]] = [(None, before)] if before or not marked else []
        pieces += [(int(rank), text) for rank, text in zip(marked[::2], marked[1::2], strict=True)]
        for rank, text in pieces:
            self._incomplete[rank] = self._incomplete.get(rank, b"") + text
        last = pieces[-1][0]
        return last, self._incomplete.pop(last)


@dataclass
class LastOutput:
    """The last output of the ranks."""

    at: float = field(default_factory=time.monotonic)  # time of the last output
    rank: int | None = None  # the rank that wrote last, if known
    text: bytes = b""  # its last line
    steps: dict[int | None, int] = field(default_factory=dict)  # by rank

    def note(self, rank: int | None, line: bytes) -> None:
        """Record that ``rank`` wrote ``line``."""
        if rank is None or not holds_output(line):
            return
        self.rank, self.text = rank, line
        if steps := STEP.findall(line):
            self.steps[rank] = int(steps[-1])

    def describe(self, layout: RankLayout) -> str:
        """Return a description of the last output: its rank, host and step."""
        if self.rank is None:
            return "no rank has produced output"
        host = layout.host_of(self.rank) or socket.gethostname()
        step = self.steps.get(self.rank, max(self.steps.values(), default=None))
        # A line without a step may be from any later one: progress is reported at intervals.
        relation = "at" if STEP.search(self.text) else "after"
        position = "" if step is None else f", {relation} step {step}"
        line = self.text.decode(errors="replace").strip()
        shown = line if len(line) <= 100 else line[:97] + "..."
        return f"last output from rank {self.rank} on {host}{position}: {shown!r}"


@dataclass
class WatchedLauncher:
    """A running launcher; its output and signals are forwarded."""

    launch: Launch  # its lines are marked if ``tag`` or ``timeout`` is set
    signals: StopSignals  # open
    # Open; rank 0 leaves its mark in it. It gets a copy of the output; of standard output only if
    # that is no terminal, which ranks check, or if it is read anyway.
    outcome: JobOutcome
    tag: bool  # whether to prefix each line with its rank
    timeout: float | None  # seconds without output after which the job is ended; None: never
    last: LastOutput = field(default_factory=LastOutput)  # of its ranks, if it is read
    # ``last`` when silence ended the job, without the output of dying ranks:
    before_end: LastOutput | None = None
    stop: str = ""  # the signal that requested a stop; empty: none
    forced: bool = False  # whether the ranks were killed before they had stopped
    cut: int = 0  # the exit code of the stop that cut the end of the output; 0: all was written
    endings: bytes = b""  # mpirun's messages about ranks with an exit code other than 0; not shown
    _stop_at: float = float("inf")  # when the stop was requested
    _report_at: float = float("inf")  # when to report it
    _writing: set[int] = field(default_factory=set)  # files whose readers are being waited for

    def __post_init__(self) -> None:
        """Start the launcher.

        Raises:
            HvdtrainError: it cannot be started.
        """
        self.dialect = self.launch.mpi.dialect
        self.reads = self.tag or self.timeout is not None
        command, open_mpi = self.launch.command, self.dialect in OPEN_MPI
        try:
            self.process = start(
                replace(command, env={**command.env, **self.outcome.environment}),
                piped=self.reads or (open_mpi and not sys.stdout.isatty()),
                errors_piped=open_mpi,
                blocked=frozenset({signal.SIGTERM} if open_mpi else ()),
                dies_with_parent=signal.SIGINT if open_mpi else signal.SIGTERM,
            )
        except OSError as error:
            raise HvdtrainError(f"{command.argv[0]}: {error.strerror}") from error
        streams = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        self._readers = [
            self._reader(source, target.fileno()) for source, target in streams if source
        ]

    def wait(self) -> int:
        """Return the launcher's exit code; 128 + N after signal N, 124 if silence ended the job."""
        code = None
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = self.process.wait(POLL)
                self._forward_signals()
                if code is not None:
                    return exit_code(code)
                if self.timeout and time.monotonic() - self.last.at > self.timeout:
                    self.before_end = replace(self.last)
                    self.end()
                    return TIMED_OUT
        finally:
            self._drain()

    def _drain(self) -> None:
        """Wait for the end of the output.

        A daemon may keep it open, for which ``DRAIN`` is the limit. For a reader that does not read
        there is none, until the user or the time limit requests a stop.
        """
        remaining = DRAIN
        for reader in self._readers:
            while reader.is_alive() and remaining > 0:
                reader.join(POLL)
                if self.stop or self.before_end or not self._writing:
                    remaining -= POLL
                if numbers := self.signals.take():
                    self.stop, remaining = self.stop or numbers[0].name, 0
        if self.stop and self._writing:
            self.cut = 128 + signal.Signals[self.stop]

    def end(self) -> None:
        """End the launcher and its ranks: first by its signals, then by KILL."""
        # Ranks lead their own groups or sessions: only the process tree contains them all.
        tree: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self.process.pid).children(recursive=True)
        for number, timeout in END_SIGNALS.get(self.dialect, DEFAULT_SIGNALS):
            self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout)
                break
        self.process.kill()
        for child in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                if CLEAR not in child.cmdline():  # it cleans up once its rank has ended
                    child.kill()

    def _forward_signals(self) -> None:
        """Forward signals received since the last check; kill ranks that ignore them.

        After TERM the ranks are killed if they have not stopped after ``GRACE``: one of them may be
        suspended, or hang, and the batch system is about to kill all of them.
        """
        for number in self.signals.take():
            if not self.stop:
                self.stop = number.name
                self._stop_at = time.monotonic()
                self._report_at = self._stop_at + REPORT_AFTER
                if self.process.returncode is None:
                    # Intel MPI forwards TERM, set by ``argv.INTEL``.
                    intel = self.dialect == "intel"
                    self.process.send_signal(signal.SIGTERM if intel else signal.SIGUSR1)
            elif number == signal.SIGINT and not self.forced:
                self.forced = True
                self.end()
        if self.process.returncode is not None or self.forced:
            return
        now = time.monotonic()
        if now > self._report_at:
            self._report_at = float("inf")
            report(f"{self.stop}: waiting for the ranks to stop; press Ctrl-C again to kill them")
        if self.stop in ("SIGTERM", "SIGHUP") and now > self._stop_at + GRACE:
            self.forced = True
            self.end()

    def _reader(self, source: IO[bytes], target: int) -> threading.Thread:
        work = self._filter if self.reads or source is self.process.stderr else self._copy
        reader = threading.Thread(target=work, args=(source, target), daemon=True)
        reader.start()
        return reader

    def _copy(self, source: IO[bytes], target: int) -> None:
        """Copy ``source`` to ``target`` unchanged, until it is closed."""
        while data := os.read(source.fileno(), CHUNK):
            self.outcome.read(target, data)
            self._put(target, data)

    def _filter(self, source: IO[bytes], target: int) -> None:
        """Copy ``source`` to ``target``, without mpirun's endings, until it is closed."""
        ranks = RankOutput(self.dialect)
        block = b""
        while True:
            if block and not select.select([source], [], [], BLOCK_TIMEOUT)[0]:
                text, block = block, b""
            elif data := os.read(source.fileno(), CHUNK):
                if holds_output(data):
                    self.last.at = time.monotonic()
                self.outcome.read(target, data)
                text, block = cut_block(block + data)
            else:
                break
            text, endings = split_endings(text)
            self.endings += endings
            if self.stop:  # the ranks report the forwarded signal, not the one that the user sent
                text = text.replace(FORWARDED, b"hvdtrain: %b: " % self.stop.encode())
            if self.reads:
                self._write(ranks.feed(text), b"\n", target)
            else:
                self._put(target, text)
        if self.reads:
            self._write(ranks.feed(block), b"\n", target)
            self._write(ranks.end(), b"", target)
        else:
            self._put(target, block)

    def _write(self, lines: list[tuple[int | None, bytes]], end: bytes, target: int) -> None:
        text = b""
        for rank, line in lines:
            self.last.note(rank, line)
            mark = b"[%d] " % rank if self.tag and rank is not None else b""
            text += mark + line + end
        self._put(target, text)

    def _put(self, target: int, text: bytes) -> None:
        self._writing.add(target)
        write_all(target, text)
        self._writing.discard(target)


def write_all(target: int, text: bytes) -> None:
    """Write ``text``; drop it if the reader is gone, as in ``hvdtrain launch ... | head``."""
    with contextlib.suppress(OSError):
        while text:
            try:
                text = text[os.write(target, text) :]
            except BlockingIOError:  # e.g. Node.js and asyncio hand on non-blocking pipes
                select.select([], [target], [])


def watch(launch: Launch, signals: StopSignals, *, tag: bool, timeout: float | None) -> int:
    """Run ``launch`` to its end and return its exit code; see ``WatchedLauncher``.

    mpirun's messages about exit codes are shown only if no rank has reported why it ended.

    Raises:
        HvdtrainError: the job cannot be started, was ended after the timeout (exit code 124), or is
            incomplete, whatever the launcher returns.
    """
    with JobOutcome() as outcome:
        watched = WatchedLauncher(launch, signals, outcome, tag, timeout)
        code, words, reported = watched.wait(), launch.words, outcome.reason_reported
        code = code_after_stop(code, watched.stop, words, reported=reported, forced=watched.forced)
        if not reported and not watched.stop:
            write_all(sys.stderr.fileno(), watched.endings)
        if watched.before_end:
            silence = HvdtrainError(
                f"no output from any rank for {timeout:g} s, so the job was ended: "
                f"{watched.before_end.describe(launch.layout)}"
            )
            silence.exit_code = TIMED_OUT
            raise silence
        directory, stopped = checkpoint_dir(words), bool(watched.stop)
        return outcome.exit_code(code, directory, stop_requested=stopped) or watched.cut
