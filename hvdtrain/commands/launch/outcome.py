"""The outcome of a job: the launcher's exit code, evidence against it, and a line for the user.

If a host dies while its network stays up (a reboot, the end of a virtual machine, of Open MPI's
daemon there or of the ssh to it), the mpirun of Open MPI 5 reports the lost host, ends its ranks in
the middle of the job, and returns 0, sometimes 255. So a code of 0 counts only if mpirun has
reported no lost host, and rank 0 of a training of hvdtrain has left the mark of an orderly end.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from hvdtrain.commands.launch.prepare import checkpoint_dir
from hvdtrain.errors import EXIT_OK, EXIT_PREEMPTED, HvdtrainError, UsageError
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.exit import END_MARK, MARK_NAME, ProcessStatus
from hvdtrain.system.runtime.outlive import STOP_SIGNALS

log = logging.getLogger(__name__)

# Messages of mpirun: the first on standard error, the second on standard output.
LOSS = re.compile(rb"has lost communication with a remote daemon|daemon failed to report back")
HOST = re.compile(rb"Remote daemon: .* on node (\S+)|Remote host: +(\S+)")
UNRESOLVED = re.compile(rb"Could not resolve hostname ([^\s:]+)")  # ssh's message
NOTICE = 1000  # bytes of a message about a lost host, enough for its name
# Messages of Open MPI's mpirun are between two rules.
RULE = b"-" * 74 + b"\n"
BLOCK = re.compile(rb"^%b.*?^%b" % (RULE, RULE), re.MULTILINE | re.DOTALL)
ENDING = re.compile(rb"non-zero (?:status|exit\s+code)|exited\s+on\s+signal")  # of a rank
MAX_BLOCK = 4096  # bytes of a block
# Messages with the reason why a rank ends: those of hvdtrain (``exit.print_error``, ``announce``),
# a traceback, an error of the interpreter, an error of a command line.
REASON = re.compile(
    rb"hvdtrain: (?:error|failed|interrupted|rank \d+ on|SIG[A-Z]+\d?:)"
    rb"|Traceback \(most recent call last\)|[\w.-]+: error: "
    rb"|python[\d.]*: (?:can't open file|No module named)"
)
UNRELIABLE = (EXIT_OK, 255)  # exit codes of mpirun then
MAX_MARK = 16  # bytes
# Exit codes of ranks without a handler for a signal.
UNHANDLED = tuple(128 + number for number in STOP_SIGNALS)


class JobOutcome:
    """Evidence on a job's end besides its launcher's exit code; open while the launcher runs."""

    def __init__(self) -> None:
        # By stream: the end of the output, or mpirun's message about a lost host.
        self._notices: dict[int, bytes] = {}
        self._last = b"\n"  # the last byte of output
        self.reason_reported = False  # whether a rank has reported why it ends

    def __enter__(self) -> Self:
        self._mark = os.memfd_create(MARK_NAME)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._mark)

    @property
    def environment(self) -> dict[str, str]:
        """The variables to pass to the launcher."""
        return {END_MARK: f"/proc/{os.getpid()}/fd/{self._mark}"}

    @property
    def mark(self) -> int | None:
        """The exit code that rank 0 has left so far (``exit.write_end_mark``); None: none."""
        content = os.pread(self._mark, MAX_MARK, 0).strip()
        return int(content) if content.isdigit() else None

    def read(self, stream: int, data: bytes) -> None:
        """Search the next piece of one of the launcher's streams for a lost host or a reason."""
        self._last = data[-1:]
        text = self._notices.get(stream, b"") + data
        self.reason_reported = self.reason_reported or bool(REASON.search(text))
        loss = LOSS.search(text)
        self._notices[stream] = text[loss.start() :][:NOTICE] if loss else text[-NOTICE:]

    @property
    def lost_host(self) -> str | None:
        """The host that mpirun reports as lost; empty: it does not name it; None: none is lost."""
        for notice in self._notices.values():
            if LOSS.search(notice):
                host = HOST.search(notice)
                return (host[1] or host[2]).decode(errors="replace") if host else ""
        return None

    def exit_code(self, code: int, checkpoints: Path | None, *, stop_requested: bool) -> int:
        """Return the job's exit code; ``code`` is the launcher's.

        ``stop_requested``: the ranks were to save and stop. The same command would resume from the
        directory ``checkpoints``.

        Raises:
            HvdtrainError: the job is incomplete, whatever ``code`` is, or a host does not exist.
        """
        mark, lost = self.mark, self.lost_host
        if not (lost is not None and code in UNRELIABLE) and (code or mark in (None, EXIT_OK)):
            return code
        # Ranks that mpirun itself ends may have saved in time, but are not finished.
        if mark == EXIT_PREEMPTED and stop_requested:
            return mark
        unknown = {host for notice in self._notices.values() for host in UNRESOLVED.findall(notice)}
        if unknown and lost is not None:
            raise UsageError(
                f"{b', '.join(sorted(unknown)).decode(errors='replace')}: no such host"
            )
        failure = "rank 0 ended early"
        if lost is not None:
            failure = f"host {lost} was lost" if lost else "a host was lost"
        if self._last != b"\n":  # mpirun's message ends with a blank
            sys.stderr.write("\n")
        hint = ProcessStatus(checkpoint=newest_checkpoint(checkpoints)).resume_hint()
        raise HvdtrainError(f"{failure} (exit code of mpirun: {code}). {hint}")


def split_endings(text: bytes) -> tuple[bytes, bytes]:
    """Split ``text`` into all other text, and mpirun's blocks about exit codes of ranks."""
    endings = [block for block in BLOCK.findall(text) if ENDING.search(block)]
    others = BLOCK.sub(lambda block: b"" if ENDING.search(block[0]) else block[0], text)
    return others, b"".join(endings)


def cut_block(text: bytes) -> tuple[bytes, bytes]:
    """Split ``text`` before an incomplete block of mpirun's."""
    complete = text.count(RULE) % 2 == 0
    end = text.rfind(b"\n") + 1 if complete else text.rfind(RULE)
    block = text[end:]
    if (complete and not RULE.startswith(block)) or len(block) > MAX_BLOCK:
        return text, b""
    return text[:end], block


def newest_checkpoint(directory: Path | None) -> str:
    """Return the checkpoint in ``directory`` from which the same command would resume, or ""."""
    from hvdtrain.steps.checkpoint import newest_name

    newest = directory and newest_name(directory)
    return str(directory / newest) if directory and newest else ""


def report(text: str) -> None:
    """Write a line for the user, over a progress bar that ranks may have left on the terminal."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        sys.stderr.write(terminal.ERASE)
    log.info("hvdtrain: %s", text)


def code_after_stop(
    code: int, stop: str, words: Sequence[str], *, reported: bool = False, forced: bool = False
) -> int:
    """Return the exit code of a job that was requested to stop, and report the checkpoint.

    It is 75 if the same command would resume from a checkpoint: the trainers handle signals as soon
    as they have read their options, and the signal may have come before. If nothing was saved, it
    is that of the signal that the user sent, e.g. 130 after Ctrl-C.

    Args:
        code: the launcher's.
        stop: the signal that requested the stop; empty: none.
        words: the program of the ranks, and its arguments.
        reported: whether a rank has reported why it ended.
        forced: whether the ranks were killed before they had stopped.
    """
    if not stop or not (forced or code in UNHANDLED):
        return code
    directory = checkpoint_dir(words)
    newest = newest_checkpoint(directory)
    again = f"run the same command again to resume from {newest}"
    ended = "interrupted" if stop == "SIGINT" else f"{stop}: stopped"
    if newest and not forced:
        report(f"{stop}: stopped before the first step; {again}")
        return EXIT_PREEMPTED
    if newest:
        report(f"{ended} before the ranks had saved; {again}")
    elif not reported or forced:
        is_trainer = any(word.startswith("hvdtrain.") for word in words)
        reason = "there is no checkpoint yet" if directory else "no --checkpoint-dir"
        report(f"{ended}; nothing was saved ({reason})" if is_trainer or directory else ended)
    return 128 + signal.Signals[stop]
