"""When does this job end? Asked once, at its start, so that a training can save in time.

A job script of ours asks before it starts the ranks, by ``python -m`` and this module's name,
and exports the answer, so that no rank has to start another program once MPI runs.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.system.runtime.command import Command, run

ENDS = "HVDTRAIN_WALLTIME_ENDS"
"""Seconds since 1970 at which the job ends; empty: nobody knows, and nobody need ask again."""

PATIENCE = 10.0  # seconds that a batch system has to answer; a busy one must not stop a training

RESERVE = 10.0  # seconds for the job's own last lines, and for a clock that is a little off
FIRST_SAVE = 10.0  # seconds that a save is taken to need until one was timed

_CLOCK = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d{1,2}):(\d{2})")


def parse_clock(text: str) -> int | None:
    """Return seconds in ``M:SS``, ``H:MM:SS`` or ``D-HH:MM:SS``, which PBS and Slurm both write.

    A bare number is None: it is seconds to PBS and minutes to Slurm.
    """
    match = _CLOCK.fullmatch(text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((24 * days + hours) * 60 + minutes) * 60 + seconds


def show_clock(seconds: int) -> str:
    """Return ``seconds`` as HH:MM:SS, which PBS and Slurm both read."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}"


@dataclass
class Walltime:
    """When the job of this process ends, and how long before that a training has to stop."""

    ends: float | None  # seconds since 1970; None: it has no end, or another rank watches it
    longest_save: float = FIRST_SAVE  # seconds of the slowest save so far

    def saved(self, seconds: float) -> None:
        """Take note that a save took ``seconds``."""
        self.longest_save = max(self.longest_save, seconds)

    def is_near(self, longest_step: float) -> bool:
        """Return whether there is time for little more than a step and a save, twice over."""
        if self.ends is None:
            return False
        return time.time() + 2 * (longest_step + self.longest_save) + RESERVE > self.ends


def ends_at(environ: Mapping[str, str] = os.environ) -> float | None:
    """Tell when the job of this process ends, in seconds since 1970.

    What the environment tells counts first; without it the batch system is asked, which takes up
    to 10 s. To be called on one rank only.

    Returns:
        None outside of a job, without a limit, or where the batch system does not answer.
    """
    if ENDS in environ:
        return _number(environ[ENDS])
    if (known := _number(environ.get("SLURM_JOB_END_TIME", ""))) is not None:
        return known
    left = _ask(environ)
    return None if left is None else time.time() + left


def seconds_left(environ: Mapping[str, str] = os.environ) -> float | None:
    """Tell how many seconds the job of this process may still run; see ``ends_at``."""
    end = ends_at(environ)
    return None if end is None else end - time.time()


def question(environ: Mapping[str, str]) -> Command | None:
    """Return the command that asks the batch system about this job; None outside of a job."""
    # A Slurm with PBS wrappers sets both; its qstat does not tell the time that is left.
    if job := environ.get("SLURM_JOB_ID"):
        return Command(("squeue", "-h", "-j", job, "-o", "%L"))
    if job := environ.get("PBS_JOBID"):
        return Command(("qstat", "-f", job))
    return None


def read_answer(text: str) -> int | None:
    """Return seconds left, from the output of squeue or qstat; None without a limit.

    squeue says the time that is left, qstat the limit and the time used.
    """
    if "=" not in text:
        return parse_clock(text)
    values = dict(re.findall(r"^\s*([\w.]+) = (.*?)\s*$", text, re.MULTILINE))
    limit = parse_clock(values.get("Resource_List.walltime", ""))
    used = parse_clock(values.get("resources_used.walltime", "")) or 0
    return None if limit is None else limit - used


def _ask(environ: Mapping[str, str]) -> int | None:
    command = question(environ)
    if command is None:
        return None
    result = run(command, timeout=PATIENCE)
    return read_answer(result.output) if result.ok else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def main(words: list[str]) -> int:
    """Print when the job ends: ``python -m hvdtrain.system.runtime.walltime [H:MM:SS]``.

    The argument is what the job asked for; it counts from now where the batch system does not
    answer. Without an answer and an argument the line is empty.
    """
    end = ends_at()
    asked = parse_clock(words[0]) if words else None
    if end is None and asked is not None:
        end = time.time() + asked
    sys.stdout.write("\n" if end is None else f"{end:.0f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
