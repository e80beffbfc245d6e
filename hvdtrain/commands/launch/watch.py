"""Watching over a launcher: signals handed on, output read where it must be, silence noticed.

A batch system that wants its nodes back sends TERM. Open MPI's mpirun then kills its ranks within
half a second (5) or two (4), too soon to save anything, and no option of version 5 changes that.
But every launcher hands USR1 on to its ranks, on all hosts, and waits for them to end; and
``hvdtrain``'s trainers save on it and leave with 75. So TERM, INT and HUP become USR1 here. Batch
systems also send TERM to every process at once. Open MPI's mpirun is therefore started with TERM
blocked, which its ranks do not inherit: they hear it, it does not. Nor does its ssh, which it would
miss (``deaf_to_term``).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import IO

import psutil

from hvdtrain.commands.launch.mpirun import OPEN_MPI
from hvdtrain.commands.launch.outcome import Outcome
from hvdtrain.commands.launch.prepare import Launch, checkpoint_dir
from hvdtrain.commands.launch.rank_output import (
    LastOutput,
    RankOutput,
    cut_block,
    holds_output,
    take_out_endings,
)
from hvdtrain.commands.launch.stop import StopSignals, code_after_stop, report
from hvdtrain.errors import HvdtrainError
from hvdtrain.system.runtime.command import TIMED_OUT, Command, start
from hvdtrain.system.runtime.scratch import CLEAR

# The signals that make a launcher end its ranks, and the seconds that it has before the next one.
# Hydra and srun hand on a first INT, and obey a second one soon after it.
END_SIGNALS = dict.fromkeys(OPEN_MPI, ((signal.SIGINT, 10.0),))
OTHERS = ((signal.SIGTERM, 5.0), (signal.SIGINT, 0.5), (signal.SIGINT, 5.0))
HANDED_ON = b"hvdtrain: SIGUSR1: "
CHUNK = 65_536  # bytes
AT_ONCE = 2.0  # seconds for the ranks to stop before it is reported that they are waited for
POLL = 0.2  # seconds between two looks at the time and at the signals that came
MOMENT = 0.2  # seconds for mpirun to write the rest of what it says between two rules
GRACE = 30.0  # seconds after TERM or HUP, as a batch system gives them at most before it kills
DRAIN = 5.0  # seconds for the last output after the launcher has ended


class WatchedLauncher:
    """A running launcher: the output of its ranks and signals to it are passed on.

    Attributes:
        last: the last output of its ranks, as far as it is read.
        before_end: ``last`` when silence ended the job; what dying ranks write comes later.
        stop: the signal by which the ranks have been asked to stop; empty: they have not.
        forced: whether they were ended before they had stopped by themselves.
        endings: what mpirun wrote about ranks that ended with another code than 0; not shown.
    """

    def __init__(
        self,
        command: Command,
        dialect: str,
        signals: StopSignals,
        outcome: Outcome,
        *,
        tag: bool,
        listen: bool,
    ) -> None:
        """Start ``command``, whose launcher marks lines as ``dialect`` does if they are read.

        Args:
            command: the launcher's.
            dialect: its kind.
            signals: open ones, to hand on.
            outcome: what reads along: on standard output where that is no terminal, which the
                ranks look for, or ``listen`` or ``tag`` is given.
            tag: show each line behind its rank.
            listen: read the output, so that silence is noticed; ``tag`` does so anyway.

        Raises:
            OSError: it cannot be started.
        """
        self.dialect, self.tag, self.reads = dialect, tag, tag or listen
        self.last = LastOutput()
        self.before_end: LastOutput | None = None
        self.signals = signals
        self.outcome = outcome
        self.stop = ""
        self.forced = False
        self._stop_at = self._report_at = float("inf")  # when a stop was requested, and is reported
        self.endings = b""
        blocked = frozenset({signal.SIGTERM} if dialect in OPEN_MPI else ())
        self.process = start(
            command,
            piped=self.reads or (dialect in OPEN_MPI and not sys.stdout.isatty()),
            errors_piped=dialect in OPEN_MPI,
            blocked=blocked,
            dies_with_parent=signal.SIGINT if dialect in OPEN_MPI else signal.SIGTERM,
        )
        self._readers = [
            self._reader(source, target.fileno())
            for source, target in (
                (self.process.stdout, sys.stdout),
                (self.process.stderr, sys.stderr),
            )
            if source
        ]

    def wait(self, timeout: float | None = None) -> int:
        """Return the launcher's exit code; 128 + N after signal N, 124 where silence ended the job.

        Args:
            timeout: seconds without any output after which the job is ended; None never.
        """
        code = None
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = self.process.wait(POLL)
                self._hand_on()
                if code is not None:
                    return code if code >= 0 else 128 - code
                if timeout and time.monotonic() - self.last.at > timeout:
                    self.before_end = replace(self.last)
                    self.end()
                    return TIMED_OUT
        finally:
            for reader in self._readers:
                reader.join(DRAIN)

    def end(self) -> None:
        """End the launcher and its ranks: first by what it understands, then by KILL."""
        # Ranks lead groups or sessions of their own: only the process tree shows whose they are.
        tree = _children(self.process.pid)
        for number, patience in END_SIGNALS.get(self.dialect, OTHERS):
            self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
                break
        self.process.kill()
        for child in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                if CLEAR not in child.cmdline():  # else it clears away once its rank has ended
                    child.kill()

    def _hand_on(self) -> None:
        """Act on the signals that have come since the last look, and on those that had no effect.

        After TERM the ranks are ended if they have not stopped after ``GRACE``: one of them may be
        stopped itself, or hang, and the batch system is about to kill them all.
        """
        numbers, self.signals.came = self.signals.came, []
        for number in numbers:
            if not self.stop:
                self.stop = signal.Signals(number).name
                self._stop_at = time.monotonic()
                self._report_at = self._stop_at + AT_ONCE
                if self.process.returncode is None:
                    # Intel MPI hands TERM on, as ``argv.INTEL`` makes it.
                    intel = self.dialect == "intel"
                    self.process.send_signal(signal.SIGTERM if intel else signal.SIGUSR1)
            elif number == signal.SIGINT and not self.forced:
                self._force()
        if self.process.returncode is not None or self.forced:
            return
        now = time.monotonic()
        if now > self._report_at:
            self._report_at = float("inf")
            report(f"{self.stop}: waiting for the ranks to save and stop; Ctrl-C ends them")
        if self.stop in ("SIGTERM", "SIGHUP") and now > self._stop_at + GRACE:
            self._force()

    def _force(self) -> None:
        self.forced = True
        self.end()

    def _reader(self, source: IO[bytes], target: int) -> threading.Thread:
        work = self._pass_on if self.reads or source is self.process.stderr else self._copy
        reader = threading.Thread(target=work, args=(source, target), daemon=True)
        reader.start()
        return reader

    def _copy(self, source: IO[bytes], target: int) -> None:
        """Write what comes from ``source`` to ``target`` as it is, until it is closed."""
        while data := os.read(source.fileno(), CHUNK):
            self.outcome.read(target, data)
            write_all(target, data)

    def _pass_on(self, source: IO[bytes], target: int) -> None:
        """Write what comes from ``source`` to ``target``, line by line, until it is closed."""
        ranks = RankOutput(self.dialect)
        begun = b""
        while True:
            if begun and not select.select([source], [], [], MOMENT)[0]:
                text, begun = begun, b""
            elif data := os.read(source.fileno(), CHUNK):
                if holds_output(data):
                    self.last.at = time.monotonic()
                self.outcome.read(target, data)
                text, begun = cut_block(begun + data)
            else:
                break
            text, endings = take_out_endings(text)
            self.endings += endings
            if self.stop:  # the ranks name the signal that they got; the user sent another one
                text = text.replace(HANDED_ON, b"hvdtrain: %b: " % self.stop.encode())
            if self.reads:
                self._write(ranks.feed(text), b"\n", target)
            else:
                write_all(target, text)
        if self.reads:
            self._write(ranks.feed(begun), b"\n", target)
            self._write(ranks.end(), b"", target)
        else:
            write_all(target, begun)

    def _write(self, lines: list[tuple[int | None, bytes]], end: bytes, target: int) -> None:
        text = b""
        for rank, line in lines:
            self.last.note(rank, line)
            mark = b"[%d] " % rank if self.tag and rank is not None else b""
            text += mark + line + end
        write_all(target, text)


def write_all(target: int, text: bytes) -> None:
    """Write ``text``; where nobody reads, as in ``hvdtrain launch ... | head``, it is dropped."""
    with contextlib.suppress(OSError):
        while text:
            text = text[os.write(target, text) :]


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def watch(
    launch: Launch,
    signals: StopSignals,
    outcome: Outcome,
    words: Sequence[str],
    *,
    tag: bool,
    timeout: float | None,
) -> int:
    """Run ``launch`` to its end and return its exit code.

    What mpirun says about how ranks ended is shown only if no rank has said why it ended.

    Args:
        launch: its lines are marked if ``tag`` or ``timeout`` is given.
        signals: open ones, to hand on.
        outcome: an open one, which the ranks leave their mark in.
        words: the program of the ranks, and its arguments.
        tag: show each line behind its rank.
        timeout: seconds without any output after which the job is ended; None never.

    Raises:
        HvdtrainError: it cannot be started, was ended for its silence (exit code 124), or has not
            come to its end, whatever the launcher returns.
    """
    try:
        dialect, listen = launch.mpi.dialect, timeout is not None
        command = replace(launch.command, env={**launch.command.env, **outcome.mark.environment})
        watched = WatchedLauncher(command, dialect, signals, outcome, tag=tag, listen=listen)
    except OSError as error:
        raise HvdtrainError(f"{launch.command.argv[0]}: {error.strerror}") from error
    code = watched.wait(timeout)
    code = code_after_stop(
        code, watched.stop, words, reported=outcome.reason_given, forced=watched.forced
    )
    if not outcome.reason_given and not watched.stop:
        write_all(sys.stderr.fileno(), watched.endings)
    if watched.before_end:
        silence = HvdtrainError(
            f"no output from any rank for {timeout:g} s, so the job was ended: "
            f"{watched.before_end.describe(launch.placed.layout)}"
        )
        silence.exit_code = TIMED_OUT
        raise silence
    return outcome.exit_code(code, checkpoint_dir(words), stop_asked=bool(watched.stop))
