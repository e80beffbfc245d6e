"""A ladder as jobs, one a size: each runs ``hvdtrain scaling`` for its size on nodes of its own.

Each job waits for the end of the one before: at the same time, on a node that they share, they
would slow one another down. They write to directories of their own below that of the ladder, which
``hvdtrain scaling --out DIR`` then reads together.
"""

from __future__ import annotations

import argparse
import logging
import math
import shlex
from pathlib import Path
from typing import Any

from hvdtrain.batch import submit
from hvdtrain.errors import UsageError
from hvdtrain.measure.ladder import Plan, order
from hvdtrain.measure.records import LINES, STRONG, read_lines
from hvdtrain.verb import Report

log = logging.getLogger(__name__)

# What the ladder decides itself, or what makes no sense for one of its jobs.
OURS = ("nodes", "name", "threads", "array", "ladder", "chain", "once", "follow", "command")


def submit_sizes(plan: Plan, options: str, *, dry_run: bool) -> Report:
    """Submit a job for each size that is not complete.

    Args:
        plan: the ladder; its ``ppn`` gives way to that in ``options``.
        options: of ``hvdtrain submit``, as typed.
        dry_run: show the scripts, submit nothing.

    Raises:
        UsageError: an option is wrong.
        HvdtrainError: the batch system refused a job.
    """
    if plan.hosts or plan.hostfile:
        raise UsageError("--submit and --hosts: the batch system gives the hosts")
    given = _read(options)
    texts: list[str] = []
    jobs: list[dict[str, Any]] = []
    previous = None
    for ranks in plan.sizes:
        done = {run.repeat for run in read_lines(plan.folder / f"ranks-{ranks}" / LINES)}
        if all(repeat in done for _, repeat in order([ranks], plan.repeats)):
            log.info("%d rank%s: no job, its runs are there", ranks, "s" if ranks > 1 else "")
            continue
        report = submit.run_verb(_one(given, plan, ranks, dry_run=dry_run), previous)
        previous = next(iter(report.data.get("jobs", ())), None)
        texts.append(report.text)
        jobs.append({"ranks": ranks, **report.data})
    if not dry_run:
        when = "When they have ended" if jobs else "Nothing to submit. To see what the runs say"
        texts.append(f"{when}: hvdtrain scaling --out {plan.folder}")
    return Report("\n\n".join(texts), {"ok": True, "jobs": jobs})


def _read(options: str) -> argparse.Namespace:
    """The options of the jobs, parsed as ``hvdtrain submit`` does.

    Raises:
        UsageError: one is unknown, or is the ladder's own.
    """
    parser = argparse.ArgumentParser(prog="--submit", allow_abbrev=False, exit_on_error=False)
    submit.add_arguments(parser)
    try:
        given, unknown = parser.parse_known_args(shlex.split(options))
    except (argparse.ArgumentError, ValueError) as error:
        raise UsageError(f"--submit {options!r}: {error}") from error
    if unknown:
        raise UsageError(f"--submit {options!r}: hvdtrain submit has no {unknown[0]}")
    for name in OURS:
        if getattr(given, name) != parser.get_default(name) and getattr(given, name):
            raise UsageError(f"--submit {options!r}: --{name} is for the ladder to decide")
    return given


def _one(given: argparse.Namespace, plan: Plan, ranks: int, *, dry_run: bool) -> argparse.Namespace:
    """What ``hvdtrain submit`` is asked for one size."""
    full = given.ppn or plan.ppn or 1
    ppn = min(full, ranks)
    folder: Path = plan.folder / f"ranks-{ranks}"
    words = ["hvdtrain", "scaling", "--ranks", str(ranks), "--repeat", str(plan.repeats)]
    words += ["--strong"] if plan.scaling == STRONG else []
    # The ranks of a full host decide how many threads each has, also where there are fewer.
    words += ["--ppn", str(full), "--out", str(folder)]
    words += ["--threads", str(plan.threads)] if plan.threads else []
    words += ["--timeout", f"{plan.timeout:g}"] if plan.timeout else []
    changed = {
        "nodes": math.ceil(ranks / ppn),
        "ppn": ppn,
        "threads": plan.threads,
        "name": f"scaling-{ranks}",
        "once": True,
        "dry_run": dry_run,
        "command": [*words, "--", *plan.words],
    }
    return argparse.Namespace(**{**vars(given), **changed})
