"""Submit a ladder as jobs, one per size: each runs ``hvdtrain scaling`` on nodes of its own.

Each job waits for the end of the one before: at the same time, on a node that they share, they
would slow one another down. They write to directories of their own below that of the ladder, which
``hvdtrain scaling --out DIR`` then reads together.
"""

from __future__ import annotations

import argparse
import logging
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvdtrain.commands.runs.records import LINES, STRONG, read_lines
from hvdtrain.commands.scaling.ladder import Ladder, order
from hvdtrain.commands.submit.arguments import Request, add_arguments
from hvdtrain.commands.submit.submission import submit
from hvdtrain.errors import UsageError
from hvdtrain.system.output.result import Report
from hvdtrain.system.output.text import plural

log = logging.getLogger(__name__)

# What the ladder decides itself, or what makes no sense for one of its jobs.
OURS = ("nodes", "name", "threads", "array", "ladder", "chain", "once", "follow", "command")


def submit_sizes(ladder: Ladder, options: str, *, dry_run: bool) -> Report:
    """Submit a job for each size that is not complete.

    Args:
        ladder: its ``ppn`` gives way to that in ``options``.
        options: of ``hvdtrain submit``, as typed.
        dry_run: show the scripts, submit nothing.

    Raises:
        UsageError: an option is wrong.
        HvdtrainError: the batch system refused a job.
    """
    if ladder.hosts or ladder.hostfile:
        raise UsageError("--submit and --hosts: the batch system gives the hosts")
    given = _read(options)
    texts: list[str] = []
    jobs: list[dict[str, Any]] = []
    previous = None
    for ranks in ladder.sizes:
        done = {run.repeat for run in read_lines(ladder.folder / f"ranks-{ranks}" / LINES)}
        if all(repeat in done for _, repeat in order([ranks], ladder.repeats)):
            log.info("%s: no job, its runs are there", plural(ranks, "rank"))
            continue
        report = submit(_one(given, ladder, ranks, dry_run=dry_run), previous)
        previous = next(iter(report.data.get("jobs", ())), None)
        texts.append(report.text)
        jobs.append({"ranks": ranks, **report.data})
    if not dry_run:
        when = "When they have ended" if jobs else "Nothing to submit. To see what the runs say"
        texts.append(f"{when}: hvdtrain scaling --out {ladder.folder}")
    return Report("\n\n".join(texts), {"ok": True, "jobs": jobs})


def _read(options: str) -> Request:
    """Parse the options of the jobs as ``hvdtrain submit`` does.

    Raises:
        UsageError: one is unknown, or is the ladder's own.
    """
    parser = argparse.ArgumentParser(prog="--submit", allow_abbrev=False, exit_on_error=False)
    add_arguments(parser)
    try:
        given, unknown = parser.parse_known_args(shlex.split(options))
    except (argparse.ArgumentError, ValueError) as error:
        raise UsageError(f"--submit {options!r}: {error}") from error
    if unknown:
        raise UsageError(f"--submit {options!r}: hvdtrain submit has no {unknown[0]}")
    for name in OURS:
        if getattr(given, name) != parser.get_default(name) and getattr(given, name):
            raise UsageError(f"--submit {options!r}: --{name} is for the ladder to decide")
    return Request.of(given)


def _one(given: Request, ladder: Ladder, ranks: int, *, dry_run: bool) -> Request:
    """Return what ``hvdtrain submit`` is asked for one size."""
    full = given.ppn or ladder.ppn or 1
    ppn = min(full, ranks)
    folder: Path = ladder.folder / f"ranks-{ranks}"
    words = ["hvdtrain", "scaling", "--ranks", str(ranks), "--repeat", str(ladder.repeats)]
    words += ["--strong"] if ladder.scaling == STRONG else []
    # The ranks of a full host decide how many threads each has, also where there are fewer.
    words += ["--ppn", str(full), "--out", str(folder)]
    words += ["--threads", str(ladder.threads)] if ladder.threads else []
    words += ["--timeout", f"{ladder.timeout:g}"] if ladder.timeout else []
    return replace(
        given,
        nodes=math.ceil(ranks / ppn),
        ppn=ppn,
        threads=ladder.threads,
        name=f"scaling-{ranks}",
        once=True,
        dry_run=dry_run,
        command=(*words, "--", *ladder.words),
    )
