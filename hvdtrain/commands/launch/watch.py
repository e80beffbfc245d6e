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
from typing import IO, Self

import psutil

from hvdtrain.commands.launch.layout import Layout
from hvdtrain.commands.launch.mpirun import OPEN_MPI
from hvdtrain.commands.launch.outcome import Outcome
from hvdtrain.commands.launch.prepare import Launch
from hvdtrain.errors import EXIT_PREEMPTED, HvdtrainError
from hvdtrain.system.runtime.command import TIMED_OUT, Command, start
from hvdtrain.system.runtime.processes import STOP_SIGNALS

log = logging.getLogger(__name__)

# The signals that make a launcher end its ranks, and the seconds that it has before the next one.
# Hydra and srun hand on a first INT, and obey a second one soon after it.
END_SIGNALS = dict.fromkeys(OPEN_MPI, ((signal.SIGINT, 10.0),))
OTHERS = ((signal.SIGTERM, 5.0), (signal.SIGINT, 0.5), (signal.SIGINT, 5.0))
STEP = re.compile(rb"\bstep (\d+)")
CHUNK = 65_536  # bytes
POLL = 0.2  # seconds between two looks at the time and at the signals that came
MOMENT = 0.2  # seconds for mpirun to write the rest of what it says between two rules
# Exit codes of ranks without a handler for a signal.
UNHEARD = tuple(128 + number for number in STOP_SIGNALS)
DRAIN = 5.0  # seconds for the last output after the launcher has ended
# The mark of each dialect; its first group is the rank. Open MPI and Hydra put one before every
# piece they get hold of, so also into the middle of a line: "<rank 0> par<rank 1> other\n<rank 0>
# tial". The others write whole lines, and a mark counts at their beginning only.
MARKS = {
    "openmpi4": re.compile(rb"\[\d+,(\d+)\]<std(?:out|err|diag)>:"),
    "openmpi5": re.compile(rb"\[[^\]\s]*,(\d+)\]<std(?:out|err|diag)>: ?"),
    "mpich": re.compile(rb"<rank (\d+)> "),
    "intel": re.compile(rb"\A\[(\d+)\] ?"),
    "pals": re.compile(rb"\A\S+ (\d+): ?"),
    "srun": re.compile(rb"\A *(\d+): ?"),
}
# What Open MPI's mpirun itself has to say stands between two rules.
RULE = b"-" * 74 + b"\n"
BLOCK = re.compile(rb"^%b.*?^%b" % (RULE, RULE), re.MULTILINE | re.DOTALL)
ENDING = re.compile(rb"non-zero (?:status|exit\s+code)|exited\s+on\s+signal")  # of some rank
LONGEST_BLOCK = 4096  # bytes of a block


def take_out_endings(text: bytes) -> tuple[bytes, bytes]:
    """Split ``text`` into what is not about how ranks ended, and mpirun's blocks that are."""
    endings = []

    def take(block: re.Match[bytes]) -> bytes:
        about = ENDING.search(block[0])
        endings.append(block[0] if about else b"")
        return b"" if about else block[0]

    return BLOCK.sub(take, text), b"".join(endings)


def cut_block(text: bytes) -> tuple[bytes, bytes]:
    """Split ``text`` before a block of mpirun's that has only begun."""
    whole = text.count(RULE) % 2 == 0
    end = text.rfind(b"\n") + 1 if whole else text.rfind(RULE)
    begun = text[end:]
    if (whole and not RULE.startswith(begun)) or len(begun) > LONGEST_BLOCK:
        return text, b""
    return text[:end], begun


@dataclass
class RankOutput:
    """Joins the pieces of one stream again, line by line and rank by rank."""

    dialect: str  # whose marks to look for
    _raw: bytes = b""
    _begun: dict[int | None, bytes] = field(default_factory=dict)

    def feed(self, data: bytes) -> list[tuple[int | None, bytes]]:
        """Return the lines that ``data`` completes, with their rank; None: the launcher's own."""
        *whole, self._raw = (self._raw + data).split(b"\n")
        lines: list[tuple[int | None, bytes]] = []
        for line in whole:
            lines += self._line(line)
        return lines

    def end(self) -> list[tuple[int | None, bytes]]:
        """Return the unfinished lines when the stream closes."""
        lines = self._line(self._raw) if self._raw else []
        self._raw = b""
        return [*lines, *((rank, text) for rank, text in self._begun.items() if text)]

    def _line(self, line: bytes) -> list[tuple[int | None, bytes]]:
        """Return the piece that the end of ``line`` completes: its last; keep the others."""
        before, *marked = MARKS[self.dialect].split(line)
        pieces: list[tuple[int | None, bytes]] = [(None, before)] if before or not marked else []
        pieces += [(int(rank), text) for rank, text in zip(marked[::2], marked[1::2], strict=True)]
        for rank, text in pieces:
            self._begun[rank] = self._begun.get(rank, b"") + text
        last = pieces[-1][0]
        return [(last, self._begun.pop(last))]


@dataclass
class LastOutput:
    """What the ranks have written last."""

    at: float = field(default_factory=time.monotonic)  # when it came
    rank: int | None = None  # the rank that wrote last, as far as the output tells
    text: bytes = b""  # its last line
    steps: dict[int | None, int] = field(default_factory=dict)  # by rank

    def note(self, rank: int | None, line: bytes) -> None:
        """Remember that ``rank`` wrote ``line``."""
        if rank is None:
            return
        self.rank, self.text = rank, line
        found = STEP.findall(line)
        if found:
            self.steps[rank] = int(found[-1])

    def describe(self, layout: Layout) -> str:
        """Say which rank wrote last, where, and at which step."""
        if self.rank is None:
            return "no rank had said a word"
        host = layout.host_of(self.rank) or socket.gethostname()
        step = self.steps.get(self.rank, max(self.steps.values(), default=None))
        # A line without a step may be of any later one: progress is reported only now and then.
        where = "at" if STEP.search(self.text) else "after"
        where = "" if step is None else f", {where} step {step}"
        said = self.text.decode(errors="replace").strip()
        shown = said if len(said) <= 100 else said[:97] + "..."
        return f"rank {self.rank} on {host} spoke last{where}: {shown!r}"


class StopSignals:
    """Notes signals that ask for a stop, while it is open, in place of ending this process.

    Open it before the launcher starts: what comes during the start is handed on after it.
    """

    def __init__(self) -> None:
        self.came: list[int] = []  # and are not yet handed on

    def __enter__(self) -> Self:
        # What the caller turned off stays off: nohup ignores HUP, a shell INT in the background.
        self._before = {
            number: signal.signal(number, self._note)
            for number in STOP_SIGNALS
            if signal.getsignal(number) != signal.SIG_IGN
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.came.append(number)


class WatchedLauncher:
    """A running launcher: the output of its ranks and signals to it are passed on.

    Attributes:
        last: the last output of its ranks, as far as it is read.
        before_end: ``last`` when silence ended the job; what dying ranks write comes later.
        asked: the signal by which the ranks have been asked to stop.
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
        self.asked = ""
        self.endings = b""
        blocked = frozenset({signal.SIGTERM} if dialect in OPEN_MPI else ())
        self.process = start(
            command,
            piped=self.reads or (dialect in OPEN_MPI and not sys.stdout.isatty()),
            errors_piped=dialect in OPEN_MPI,
            blocked=blocked,
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
                child.kill()

    def _hand_on(self) -> None:
        """Act on the signals that have come since the last look."""
        numbers, self.signals.came = self.signals.came, []
        for number in numbers:
            if not self.asked:
                self.asked = name = signal.Signals(number).name
                if self.process.returncode is not None:
                    # They heard it too, and were faster than this process's next look.
                    log.info("hvdtrain: %s: the ranks have ended", name)
                    return
                log.info("hvdtrain: %s: the ranks are asked to save and stop", name)
                # Intel MPI hands TERM on, as ``argv.INTEL`` makes it.
                intel = self.dialect == "intel"
                self.process.send_signal(signal.SIGTERM if intel else signal.SIGUSR1)
            elif number == signal.SIGINT:
                log.info("hvdtrain: SIGINT again: the ranks are ended")
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
                self.last.at = time.monotonic()
                self.outcome.read(target, data)
                text, begun = cut_block(begun + data)
            else:
                break
            text, endings = take_out_endings(text)
            self.endings += endings
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
    *,
    tag: bool,
    timeout: float | None,
    checkpoints: Path | None = None,
) -> int:
    """Run ``launch`` to its end and return its exit code.

    Args:
        launch: its lines are marked if ``tag`` or ``timeout`` is given.
        signals: open ones, to hand on.
        outcome: an open one, which the ranks leave their mark in.
        tag: show each line behind its rank.
        timeout: seconds without any output after which the job is ended; None never.
        checkpoints: the directory from which the same command would go on.

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
    code = code_after_stop(code, watched.asked, checkpoints)
    if code != EXIT_PREEMPTED:
        write_all(sys.stderr.fileno(), watched.endings)
    if watched.before_end:
        silence = HvdtrainError(
            f"no output from any rank for {timeout:g} s, so the job was ended: "
            f"{watched.before_end.describe(launch.placed.layout)}"
        )
        silence.exit_code = TIMED_OUT
        raise silence
    return outcome.exit_code(code, checkpoints, stop_asked=bool(watched.asked))


def code_after_stop(code: int, asked: str, checkpoints: Path | None) -> int:
    """Return 75 where the same command would go on from a checkpoint, else ``code``.

    The trainers listen as soon as they have read their options; the signal came before.

    Args:
        code: the launcher's.
        asked: the signal by which the ranks were asked to stop; empty: they were not.
        checkpoints: the directory from which the same command would go on.
    """
    if not asked or code not in UNHEARD or checkpoints is None:
        return code
    from hvdtrain.steps.checkpoint import newest_name

    found = newest_name(checkpoints)
    if found is None:
        return code
    log.info(
        "hvdtrain: %s: stopped before the first step; %s is there: run the same command again to "
        "go on",
        *(asked, checkpoints / found),
    )
    return EXIT_PREEMPTED
