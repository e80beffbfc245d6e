"""Errors and exit codes.

    HvdtrainError            1   the run failed
    ├── UsageError           2   wrong option, file or launch; to be corrected by the user
    ├── CheckpointError      1   a checkpoint could not be written
    └── TrainingError        1   the training failed (e.g. loss not finite)

A message is one line: what failed, where, and what to do.

A command of ``hvdtrain`` that runs a job returns the job's exit code: 124 if its time limit was
reached, as in timeout(1) (``runtime/command.TIMED_OUT``), 128 + N after signal N (Ctrl-C: 130).
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: run the same command again
EXIT_INTERRUPTED = 130

MAX_LENGTH = 2000  # characters of a message; what to do is at its end


def escaped(text: str, keep: str = "") -> str:
    """Return ``text`` with its unprintable characters as escapes, except those in ``keep``."""
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


class HvdtrainError(Exception):
    """Error with a message for the user, and the exit code of the process."""

    exit_code = EXIT_FAILURE
    agreed = False  # whether all ranks raise it together, so that only rank 0 prints it

    def __str__(self) -> str:
        """Return the message in one line: names and values in it may be those of any file."""
        line = escaped(super().__str__())
        return (
            line
            if len(line) <= MAX_LENGTH
            else f"{line[: MAX_LENGTH // 2]} ... {line[-MAX_LENGTH // 2 :]}"
        )


class UsageError(HvdtrainError):
    """Wrong use, configuration or input: unknown value, missing or broken data, wrong launch."""

    exit_code = EXIT_USAGE


class CheckpointError(HvdtrainError):
    """A checkpoint could not be written; earlier checkpoints are intact."""


class TrainingError(HvdtrainError):
    """The training failed in a way that must not be ignored, e.g. a loss of NaN."""
