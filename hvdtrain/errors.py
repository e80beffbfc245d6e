"""What can go wrong, and the exit code that each kind of it has.

    HvdtrainError            1   the run failed
    ├── UsageError           2   an option, a file or a launch that the user has to change
    ├── CheckpointError      1   a checkpoint could not be written
    └── TrainingError        1   the training itself went wrong (a loss that is not finite)

A message is one line that tells what is wrong, where, and what to do.

A command of ``hvdtrain`` that runs a job ends with the job's exit code: 124 where its time ran out,
as with timeout(1) (``runtime/command.TIMED_OUT``), 128 + N after signal N (Ctrl-C: 130).
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: run the same command again
EXIT_INTERRUPTED = 130


class HvdtrainError(Exception):
    """An error with a message meant for the user; carries the exit code of the process."""

    exit_code = EXIT_FAILURE


class UsageError(HvdtrainError):
    """Wrong use, configuration or input: unknown value, missing or broken data, wrong launch."""

    exit_code = EXIT_USAGE


class CheckpointError(HvdtrainError):
    """A checkpoint could not be written; the ones before it are untouched."""


class TrainingError(HvdtrainError):
    """The training went wrong in a way that going on would hide, such as a loss of nan."""
