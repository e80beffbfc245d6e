"""Submit a sweep as jobs, one per size: each runs ``hvdtrain scaling`` on separate nodes.

Each job waits for the end of the previous one: at the same time, on a shared node, they would slow
one another down. They write to separate subdirectories of the sweep's directory, which
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
from hvdtrain.commands.scaling.sweep import Sweep, run_order
from hvdtrain.commands.submit.arguments import Request, add_arguments
from hvdtrain.commands.submit.submission import submit
from hvdtrain.errors import UsageError
from hvdtrain.system.output import Report
from hvdtrain.system.output.text import plural

log = logging.getLogger(__name__)

# Options that are set by the sweep, or make no sense for one of its jobs.
RESERVED = ("nodes", "name", "threads", "array", "ladder", "chain", "once", "follow", "command")


def submit_sizes(sweep: Sweep, options: str, *, dry_run: bool) -> Report:
    """Submit a job for each size that is not complete.

    Args:
        sweep: the sweep; a ``--ppn`` in ``options`` overrides its ``ppn``.
        options: options of ``hvdtrain submit``, as typed.
        dry_run: show the scripts, submit nothing.

    Raises:
        UsageError: an option is wrong.
        HvdtrainError: the batch system refused a job.
    """
    if sweep.hosts or sweep.hostfile:
        raise UsageError("--submit and --hosts: the batch system allocates the hosts")
    template = _parse(options)
    texts: list[str] = []
    jobs: list[dict[str, Any]] = []
    previous = None
    for ranks in sweep.sizes:
        done = {run.repeat for run in read_lines(sweep.folder / f"ranks-{ranks}" / LINES)}
        if all(repeat in done for _, repeat in run_order([ranks], sweep.repeats)):
            log.info("%s: no job needed, all runs are complete", plural(ranks, "rank"))
            continue
        report = submit(_job_request(template, sweep, ranks, dry_run=dry_run), previous)
        previous = next(iter(report.data.get("jobs", ())), None)
        texts.append(report.text)
        jobs.append({"ranks": ranks, **report.data})
    if not dry_run:
        hint = "After the jobs end, report the results" if jobs else "Nothing to submit. To report"
        texts.append(f"{hint}: hvdtrain scaling --out {sweep.folder}")
    return Report("\n\n".join(texts), {"ok": True, "jobs": jobs})


def _parse(options: str) -> Request:
    """Parse the options of the jobs as ``hvdtrain submit`` does.

    Raises:
        UsageError: an option is unknown, or is set by the sweep.
    """
    parser = argparse.ArgumentParser(prog="--submit", allow_abbrev=False, exit_on_error=False)
    add_arguments(parser)
    try:
        arguments, unknown = parser.parse_known_args(shlex.split(options))
    except (argparse.ArgumentError, ValueError) as error:
        raise UsageError(f"--submit {options!r}: {error}") from error
    if unknown:
        raise UsageError(f"--submit {options!r}: hvdtrain submit has no {unknown[0]}")
    for name in RESERVED:
        if getattr(arguments, name) != parser.get_default(name) and getattr(arguments, name):
            raise UsageError(f"--submit {options!r}: --{name} is set by the sweep; remove it")
    return Request.of(arguments)


def _job_request(template: Request, sweep: Sweep, ranks: int, *, dry_run: bool) -> Request:
    """Return the request to ``hvdtrain submit`` for one size."""
    full = template.ppn or sweep.ppn or 1
    ppn = min(full, ranks)
    folder: Path = sweep.folder / f"ranks-{ranks}"
    words = ["hvdtrain", "scaling", "--ranks", str(ranks), "--repeat", str(sweep.repeats)]
    words += ["--strong"] if sweep.scaling == STRONG else []
    # The ranks of a full host determine the threads per rank, also if fewer ranks run.
    words += ["--ppn", str(full), "--out", str(folder)]
    words += ["--threads", str(sweep.threads)] if sweep.threads else []
    words += ["--timeout", f"{sweep.timeout:g}"] if sweep.timeout else []
    return replace(
        template,
        nodes=math.ceil(ranks / ppn),
        ppn=ppn,
        threads=sweep.threads,
        name=f"scaling-{ranks}",
        once=True,
        dry_run=dry_run,
        command=(*words, "--", *sweep.words),
    )
