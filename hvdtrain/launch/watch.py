"""Watching over a launcher: signals handed on, output read where it must be, silence noticed.

A batch system that wants its nodes back sends TERM. Open MPI's mpirun then kills its ranks within
half a second (5) or two (4), too soon to save anything, and no option of version 5 changes that.
But every launcher hands USR1 on to its ranks, on all hosts, and waits for them to end; and
``hvdtrain``'s trainers save on it and leave with 75. So TERM, INT and HUP become USR1 here. Batch
systems also send TERM to every process at once. Open MPI's mpirun is therefore started with TERM
blocked, which its ranks do not inherit: they hear it, it does not. Nor does its ssh, which it would
miss (``mpirun.ssh_agent``).
"""

from __future__ import annotations

import contextlib
import logging
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
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from hvdtrain.errors import EXIT_PREEMPTED, HvdtrainError
from hvdtrain.launch.layout import Layout
from hvdtrain.launch.mpirun import OPEN_MPI
from hvdtrain.launch.run import TIMED_OUT, Command, start
from hvdtrain.launch.tags import Untangler, cut_block, take_out_endings

log = logging.getLogger(__name__)

STOP_SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
# What makes a launcher end its ranks for good, and the seconds that it has before the next word.
# Hydra and srun hand on a first INT, and take a second one soon after it seriously.
LAST_WORDS = dict.fromkeys(OPEN_MPI, ((signal.SIGINT, 10.0),))
OTHERS = ((signal.SIGTERM, 5.0), (signal.SIGINT, 0.5), (signal.SIGINT, 5.0))
STEP = re.compile(rb"\bstep (\d+)")
CHUNK = 65_536  # bytes
POLL = 0.2  # seconds between two looks at the time and at the signals that came
MOMENT = 0.2  # seconds for mpirun to write the rest of what it says between two rules
# Codes by which ranks end that do not listen to a signal: at once, or when it is handed on.
UNHEARD = tuple(128 + number for number in STOP_SIGNALS)
DRAIN = 5.0  # seconds for the last output after the launcher has ended


@dataclass
class Heard:
    """What was heard of the ranks so far."""

    at: float = field(default_factory=time.monotonic)
    """When anything was heard last, in seconds of the monotonic clock."""
    rank: int | None = None
    """Who spoke last, as far as the output tells."""
    text: bytes = b""
    """Its last line."""
    steps: dict[int | None, int] = field(default_factory=dict)
    """The last step that each rank spoke of."""

    def note(self, rank: int | None, line: bytes) -> None:
        """Remember that ``rank`` wrote ``line``."""
        if rank is None:
            return
        self.rank, self.text = rank, line
        found = STEP.findall(line)
        if found:
            self.steps[rank] = int(found[-1])

    def describe(self, layout: Layout) -> str:
        """Who spoke last, where, and at which step."""
        if self.rank is None:
            return "no rank had said a word"
        host = layout.host_of(self.rank) or socket.gethostname()
        step = self.steps.get(self.rank, max(self.steps.values(), default=None))
        # A line without a step may be of any later one: progress is told only now and then.
        where = "at" if STEP.search(self.text) else "after"
        where = "" if step is None else f", {where} step {step}"
        said = self.text.decode(errors="replace").strip()
        shown = said if len(said) <= 100 else said[:97] + "..."
        return f"rank {self.rank} on {host} spoke last{where}: {shown!r}"


class Watch:
    """A launcher at work: what its ranks say is passed on, and what it is told is handed on.

    Attributes:
        heard: what its ranks have said, as far as it is read.
        last_word: what ``heard`` was when silence ended the job; later comes what dying ranks say.
        asked: the signal by which the ranks have been asked to stop.
        endings: what mpirun has said about ranks that ended with another code than 0; not shown.
    """

    def __init__(self, command: Command, dialect: str, *, tag: bool, listen: bool) -> None:
        """Start ``command``, whose launcher marks lines as ``dialect`` does if they are read.

        Args:
            command: the launcher's.
            dialect: its kind.
            tag: show each line behind its rank.
            listen: read the output, so that silence is noticed; ``tag`` does so anyway.

        Raises:
            OSError: it cannot be started.
        """
        self.dialect, self.tag, self.reads = dialect, tag, tag or listen
        self.heard = Heard()
        self.last_word: Heard | None = None
        self._signals: list[int] = []  # that came and are not yet handed on
        self.asked = ""
        self.endings = b""
        # What the caller turned off stays off: nohup ignores HUP, a shell INT in the background.
        self._before = {
            number: signal.signal(number, self._note)
            for number in STOP_SIGNALS
            if signal.getsignal(number) != signal.SIG_IGN
        }
        blocked = frozenset({signal.SIGTERM} if dialect in OPEN_MPI else ())
        self.process = start(
            command, piped=self.reads, errors_piped=dialect in OPEN_MPI, blocked=blocked
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
        """The launcher's exit code; 128 + N after signal N, 124 where silence ended the job.

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
                if timeout and time.monotonic() - self.heard.at > timeout:
                    self.last_word = replace(self.heard)
                    self.end()
                    return TIMED_OUT
        finally:
            for reader in self._readers:
                reader.join(DRAIN)
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def end(self) -> None:
        """End the launcher and its ranks: by what it understands first, then for certain."""
        # Ranks lead groups or sessions of their own: only the tree tells whose they are.
        tree = _children(self.process.pid)
        for number, patience in LAST_WORDS.get(self.dialect, OTHERS):
            self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
                break
        self.process.kill()
        for child in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    def _note(self, number: int, _: FrameType | None) -> None:
        self._signals.append(number)

    def _hand_on(self) -> None:
        """Do what the signals ask for that have come since the last look."""
        numbers, self._signals = self._signals, []
        for number in numbers:
            if not self.asked:
                self.asked = name = signal.Signals(number).name
                if self.process.returncode is not None:
                    # They heard it too, and were faster than this process's next look.
                    log.info("hvdtrain: %s: the ranks have ended", name)
                    return
                log.info("hvdtrain: %s: the ranks are asked to save and stop", name)
                # Intel MPI hands TERM on, told to (``dialects``).
                intel = self.dialect == "intel"
                self.process.send_signal(signal.SIGTERM if intel else signal.SIGUSR1)
            elif number == signal.SIGINT:
                log.info("hvdtrain: SIGINT again: the ranks are ended")
                self.end()

    def _reader(self, source: IO[bytes], target: int) -> threading.Thread:
        reader = threading.Thread(target=self._pass_on, args=(source, target), daemon=True)
        reader.start()
        return reader

    def _pass_on(self, source: IO[bytes], target: int) -> None:
        """Write what comes from ``source`` to ``target``, line by line, until it is closed."""
        untangler = Untangler(self.dialect)
        begun = b""
        while True:
            if begun and not select.select([source], [], [], MOMENT)[0]:
                text, begun = begun, b""
            elif data := os.read(source.fileno(), CHUNK):
                self.heard.at = time.monotonic()
                text, begun = cut_block(begun + data)
            else:
                break
            text, endings = take_out_endings(text)
            self.endings += endings
            if self.reads:
                self._write(untangler.feed(text), b"\n", target)
            else:
                write_all(target, text)
        if self.reads:
            self._write(untangler.feed(begun), b"\n", target)
            self._write(untangler.end(), b"", target)
        else:
            write_all(target, begun)

    def _write(self, lines: list[tuple[int | None, bytes]], end: bytes, target: int) -> None:
        text = b""
        for rank, line in lines:
            self.heard.note(rank, line)
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
    command: Command,
    dialect: str,
    layout: Layout,
    *,
    tag: bool,
    timeout: float | None,
    checkpoints: Path | None = None,
) -> int:
    """Run ``command`` to its end and return its exit code.

    Args:
        command: the launcher's, its lines marked if ``tag`` or ``timeout`` is given.
        dialect: its kind.
        layout: which rank is on which host, for the message.
        tag: show each line behind its rank.
        timeout: seconds without any output after which the job is ended; None never.
        checkpoints: the directory from which the same command would go on.

    Raises:
        HvdtrainError: it cannot be started, or was ended for its silence (exit code 124).
    """
    try:
        watched = Watch(command, dialect, tag=tag, listen=timeout is not None)
    except OSError as error:
        raise HvdtrainError(f"{command.argv[0]}: {error.strerror}") from error
    code = watched.wait(timeout)
    if watched.asked and code in UNHEARD and checkpoints:
        # The trainers listen as soon as they have read their options; this was before.
        from hvdtrain.steps.checkpoint import newest_name

        if found := newest_name(checkpoints):
            where = checkpoints / found
            log.info(
                "hvdtrain: %s: stopped before the first step; %s is there: run the same command "
                "again to go on",
                watched.asked,
                where,
            )
            code = EXIT_PREEMPTED
    if code != EXIT_PREEMPTED:
        write_all(sys.stderr.fileno(), watched.endings)
    if watched.last_word:
        silence = HvdtrainError(
            f"no output from any rank for {timeout:g} s, so the job was ended: "
            f"{watched.last_word.describe(layout)}"
        )
        silence.exit_code = TIMED_OUT
        raise silence
    return code
