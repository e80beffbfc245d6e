"""Requests to stop a job, and its end then: its exit code, and a line for the user."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Self

from hvdtrain.commands.launch.prepare import checkpoint_dir
from hvdtrain.errors import EXIT_PREEMPTED
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.processes import STOP_SIGNALS

log = logging.getLogger(__name__)

# Exit codes of ranks without a handler for a signal.
UNHANDLED = tuple(128 + number for number in STOP_SIGNALS)


class StopSignals:
    """Records signals that request a stop, while it is open, instead of ending this process.

    Open it before the launcher starts: signals during the start are forwarded after it.
    """

    def __init__(self) -> None:
        self.came: list[int] = []  # and are not yet forwarded

    def __enter__(self) -> Self:
        # Ignored signals stay ignored: nohup ignores HUP, a shell INT in the background.
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
    from hvdtrain.steps.checkpoint import newest_name

    ended = "interrupted" if stop == "SIGINT" else f"{stop}: stopped"
    directory = checkpoint_dir(words)
    newest = directory and newest_name(directory)
    if directory and newest and not forced:
        report(
            f"{stop}: stopped before the first step; run the same command again to resume from "
            f"{directory / newest}"
        )
        return EXIT_PREEMPTED
    if directory and newest:
        report(
            f"{ended} before the ranks had saved; run the same command again to resume from "
            f"{directory / newest}"
        )
    elif not reported or forced:
        is_trainer = any(word.startswith("hvdtrain.") for word in words)
        reason = "there is no checkpoint yet" if directory else "no --checkpoint-dir"
        report(f"{ended}; nothing was saved ({reason})" if is_trainer or directory else ended)
    return 128 + signal.Signals[stop]
