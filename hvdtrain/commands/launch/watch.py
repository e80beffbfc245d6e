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
from hvdtrain.commands.launch.outcome import JobOutcome
from hvdtrain.commands.launch.prepare import Launch, checkpoint_dir
from hvdtrain.commands.launch.rank_output import (
    LastOutput,
    RankOutput,
    cut_block,
    holds_output,
    split_endings,
)
from hvdtrain.commands.launch.stop import StopSignals, code_after_stop, report
from hvdtrain.errors import HvdtrainError
from hvdtrain.system.runtime.command import TIMED_OUT, Command, start
from hvdtrain.system.runtime.scratch import CLEAR

# The signals that make a launcher end its ranks, and the seconds before the next one. Hydra and
# srun forward a first INT, and end on a second one soon after it.
END_SIGNALS = dict.fromkeys(OPEN_MPI, ((signal.SIGINT, 10.0),))
DEFAULT_SIGNALS = ((signal.SIGTERM, 5.0), (signal.SIGINT, 0.5), (signal.SIGINT, 5.0))
FORWARDED = b"hvdtrain: SIGUSR1: "
CHUNK = 65_536  # bytes
REPORT_AFTER = 2.0  # seconds for the ranks to stop before the wait is reported
POLL = 0.2  # seconds between two checks of the time and of signals
MOMENT = 0.2  # seconds for mpirun to write the rest of a block between two rules
GRACE = 30.0  # seconds after TERM or HUP, the longest that batch systems wait before they kill
DRAIN = 5.0  # seconds for the last output after the end of the launcher


class WatchedLauncher:
    """A running launcher; its output and signals are forwarded.

    Attributes:
        last: the last output of its ranks, if it is read.
        before_end: ``last`` when silence ended the job, without the output of dying ranks.
        stop: the signal that requested a stop; empty: none.
        forced: whether the ranks were killed before they had stopped.
        endings: mpirun's messages about ranks with an exit code other than 0; not shown.
    """

    def __init__(
        self,
        command: Command,
        dialect: str,
        signals: StopSignals,
        outcome: JobOutcome,
        *,
        tag: bool,
        listen: bool,
    ) -> None:
        """Start ``command``.

        Args:
            command: the launcher's; it marks lines if they are read.
            dialect: of the launcher.
            signals: open, to forward.
            outcome: gets a copy of the output; of standard output only if that is no terminal,
                which ranks check, or if ``listen`` or ``tag`` is set.
            tag: prefix each line with its rank.
            listen: read the output, to detect silence; implied by ``tag``.

        Raises:
            OSError: the launcher cannot be started.
        """
        self.dialect, self.tag, self.reads = dialect, tag, tag or listen
        self.last = LastOutput()
        self.before_end: LastOutput | None = None
        self.signals = signals
        self.outcome = outcome
        self.stop = ""
        self.forced = False
        self._stop_at = self._report_at = float(
            "inf"
        )  # when a stop was requested, when to report it
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
        """Return the launcher's exit code; 128 + N after signal N, 124 if silence ended the job.

        Args:
            timeout: seconds without output after which the job is ended; None: never.
        """
        code = None
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = self.process.wait(POLL)
                self._forward_signals()
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
        """End the launcher and its ranks: first by its signals, then by KILL."""
        # Ranks lead their own groups or sessions: only the process tree contains them all.
        tree = _children(self.process.pid)
        for number, patience in END_SIGNALS.get(self.dialect, DEFAULT_SIGNALS):
            self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
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
        numbers, self.signals.came = self.signals.came, []
        for number in numbers:
            if not self.stop:
                self.stop = signal.Signals(number).name
                self._stop_at = time.monotonic()
                self._report_at = self._stop_at + REPORT_AFTER
                if self.process.returncode is None:
                    # Intel MPI forwards TERM, set by ``argv.INTEL``.
                    intel = self.dialect == "intel"
                    self.process.send_signal(signal.SIGTERM if intel else signal.SIGUSR1)
            elif number == signal.SIGINT and not self.forced:
                self._force()
        if self.process.returncode is not None or self.forced:
            return
        now = time.monotonic()
        if now > self._report_at:
            self._report_at = float("inf")
            report(f"{self.stop}: waiting for the ranks to save and stop; Ctrl-C kills them")
        if self.stop in ("SIGTERM", "SIGHUP") and now > self._stop_at + GRACE:
            self._force()

    def _force(self) -> None:
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
            write_all(target, data)

    def _filter(self, source: IO[bytes], target: int) -> None:
        """Copy ``source`` to ``target``, without mpirun's endings, until it is closed."""
        ranks = RankOutput(self.dialect)
        block = b""
        while True:
            if block and not select.select([source], [], [], MOMENT)[0]:
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
                write_all(target, text)
        if self.reads:
            self._write(ranks.feed(block), b"\n", target)
            self._write(ranks.end(), b"", target)
        else:
            write_all(target, block)

    def _write(self, lines: list[tuple[int | None, bytes]], end: bytes, target: int) -> None:
        text = b""
        for rank, line in lines:
            self.last.note(rank, line)
            mark = b"[%d] " % rank if self.tag and rank is not None else b""
            text += mark + line + end
        write_all(target, text)


def write_all(target: int, text: bytes) -> None:
    """Write ``text``; drop it if the reader is gone, as in ``hvdtrain launch ... | head``."""
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
    outcome: JobOutcome,
    words: Sequence[str],
    *,
    tag: bool,
    timeout: float | None,
) -> int:
    """Run ``launch`` to its end and return its exit code.

    mpirun's messages about exit codes are shown only if no rank has reported why it ended.

    Args:
        launch: the job; its lines are marked if ``tag`` or ``timeout`` is set.
        signals: open, to forward.
        outcome: open; rank 0 leaves its mark in it.
        words: the program of the ranks, and its arguments.
        tag: prefix each line with its rank.
        timeout: seconds without output after which the job is ended; None: never.

    Raises:
        HvdtrainError: the job cannot be started, was ended after the timeout (exit code 124), or is
            incomplete, whatever the launcher returns.
    """
    try:
        dialect, listen = launch.mpi.dialect, timeout is not None
        command = replace(launch.command, env={**launch.command.env, **outcome.mark.environment})
        watched = WatchedLauncher(command, dialect, signals, outcome, tag=tag, listen=listen)
    except OSError as error:
        raise HvdtrainError(f"{launch.command.argv[0]}: {error.strerror}") from error
    code = watched.wait(timeout)
    code = code_after_stop(
        code, watched.stop, words, reported=outcome.reason_reported, forced=watched.forced
    )
    if not outcome.reason_reported and not watched.stop:
        write_all(sys.stderr.fileno(), watched.endings)
    if watched.before_end:
        silence = HvdtrainError(
            f"no output from any rank for {timeout:g} s, so the job was ended: "
            f"{watched.before_end.describe(launch.placement.layout)}"
        )
        silence.exit_code = TIMED_OUT
        raise silence
    return outcome.exit_code(code, checkpoint_dir(words), stop_requested=bool(watched.stop))
