"""A chain of jobs, each of which resumes where the previous one stopped.

``submit --chain`` submits all of them at once, each waiting for the end of the previous one
(``afterany``), because compute nodes often may not submit, and because a job that is killed has no
time to. Every job first checks here whether there is anything left to do. They communicate through
a file with a line of JSON per event:

    {"event": "link", "job": "12"}                           submitted
    {"event": "begin", "job": "12", "progress": "..."}       with the newest checkpoint
    {"event": "end", "job": "12", "code": 75}                exit code of the command
    {"event": "over", "job": "12", "why": "..."}             the last job of the chain

A job that is killed writes no ``end``. It is still followed by another if a checkpoint has been
saved since it began; and once if not, as after a failure: the loss of a host does not recur.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.errors import EXIT_OK, EXIT_PREEMPTED, EXIT_USAGE
from hvdtrain.system.files import read_regular
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import Command, run

log = logging.getLogger(__name__)

Event = Mapping[str, Any]
GO, OVER, STUCK = "go", "over", "stuck"  # what a job script reads


def read(file: Path) -> list[Event]:
    """Return the events so far, without incomplete lines of killed jobs."""
    events = []
    for line in file.read_bytes().splitlines() if file.is_file() else []:
        with contextlib.suppress(ValueError):
            events.append(json.loads(line))
    return events


def write(file: Path, **event: Any) -> None:
    """Append an event."""
    with file.open("a") as lines:
        lines.write(json.dumps(event) + "\n")


def progress_of(directory: Path) -> str:
    """Return a text that changes with every save in ``directory``: its newest entry."""
    complete = directory.glob("[!.]*")
    entries = []
    for entry in complete:
        with contextlib.suppress(OSError):  # e.g. a link to a checkpoint that has been deleted
            entries.append((entry.stat().st_mtime_ns, entry.name))
    return "{1} {0}".format(*max(entries)) if entries else "nothing"


def decide(events: Sequence[Event], progress: str) -> tuple[str, str]:
    """Return whether the job that begins now has anything to do, for the script, and the reason."""
    if over := last(events, "over"):
        return OVER, over["why"]
    began = last(events, "begin")
    if began is None:
        return GO, "the first job of the chain"
    if began["progress"] != progress:
        return GO, f"resuming after job {began['job']}, from {progress.split()[0]}"
    reason, ended = f"job {began['job']} saved no new checkpoint", last(events, "end")
    tries = sum(event.get("progress") == progress for event in events)
    in_order = ended and (ended["job"], ended["code"]) == (began["job"], EXIT_PREEMPTED)
    if tries > 1 or in_order:
        return STUCK, f"{reason}: another job would make no progress"
    return GO, f"{reason}, but failed or was killed, perhaps with its host: one more try"


def last(events: Sequence[Event], kind: str) -> Event | None:
    """Return the newest event of a kind."""
    return next((event for event in reversed(events) if event["event"] == kind), None)


def links(events: Sequence[Event]) -> list[str]:
    """Return the jobs of the chain, in order."""
    return [event["job"] for event in events if event["event"] == "link"]


def is_last(events: Sequence[Event], job: str) -> bool:
    """Return whether the chain ended with ``job``."""
    over = last(events, "over")
    return over is not None and number(over["job"]) == number(job)


def begin(file: Path, directory: Path, job: str) -> str:
    """Return the decision for this job, and record that it begins."""
    progress = progress_of(directory)
    # A job that is rerun, e.g. after the loss of a node, is not compared with itself.
    earlier = [
        event
        for event in read(file)
        if event["event"] != "begin" or number(event["job"]) != number(job)
    ]
    word, reason = decide(earlier, progress)
    if word == GO:
        write(file, event="begin", job=job, progress=progress)
    elif word == STUCK:
        _end_chain(file, job, reason)
    log.info("chain: %s", reason)
    return word


def unfinished(directory: Path) -> str:
    """Return the newest checkpoint in ``directory`` if its training is not finished.

    Empty if it is finished, or unknown: checkpoints of another program.
    """
    from hvdtrain.steps.checkpoint import newest_name
    from hvdtrain.steps.checkpoint_files import STATE_FILE

    newest = newest_name(directory)
    if newest is None:
        return ""
    try:
        state = json.loads(read_regular(directory / newest / STATE_FILE))
        return newest if state.get("stopped", "unknown") is None else ""
    except (OSError, ValueError, AttributeError):
        return ""


def end(file: Path, directory: Path, job: str, code: int) -> None:
    """Record the exit code of the command; delete the waiting jobs if nothing is left to do."""
    write(file, event="end", job=job, code=code)
    newest = unfinished(directory) if code == EXIT_OK else ""
    if newest:
        log.info("chain: exit code 0, but %s is not the end of the training", newest)
    if code == EXIT_OK and not newest:
        _end_chain(file, job, f"job {job} finished the training")
    elif code == EXIT_USAGE:
        _end_chain(file, job, f"job {job} ended with a usage error, as another job would")
    elif not _after(read(file), job):
        log.info("chain: this was its last job; submit it again to continue")


def _end_chain(file: Path, job: str, reason: str) -> None:
    write(file, event="over", job=job, why=reason)
    # On a compute node that may not delete jobs, each begins, has nothing to do, and ends.
    if rest := _after(read(file), job):
        # The last first: PBS also deletes jobs that wait for a deleted one.
        command = ("scancel" if "SLURM_JOB_ID" in os.environ else "qdel", *reversed(rest))
        run(Command(command), timeout=30)


def _after(events: Sequence[Event], job: str) -> list[str]:
    """Return the jobs of the chain after ``job``."""
    jobs = links(events)
    numbers = [number(link) for link in jobs]
    return jobs[numbers.index(number(job)) + 1 :] if number(job) in numbers else []


def number(job: str) -> str:
    """Return the id of a job without the PBS server, whose name varies."""
    return job.partition(".")[0]


def main(words: Sequence[str]) -> int:
    """Run the event of a job script: ``begin`` before its command, ``end`` after it."""
    parser = argparse.ArgumentParser(
        prog="python -m hvdtrain.commands.submit.chain", allow_abbrev=False
    )
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--progress", type=Path, required=True)
    parser.add_argument("event", choices=("begin", "end"))
    parser.add_argument("code", type=int, nargs="?", default=0)
    arguments = parser.parse_args(words)
    handler = terminal.Handler(sys.stderr)
    logging.basicConfig(level=logging.INFO, format="hvdtrain: %(message)s", handlers=[handler])
    # The id as reported at the submission of the job.
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID") or "?"
    if arguments.event == "end":
        end(arguments.file, arguments.progress, job, arguments.code)
    else:
        sys.stdout.write(begin(arguments.file, arguments.progress, job) + "\n")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
