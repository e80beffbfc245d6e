"""``hvdtrain verify``: prove on the user's ranks that each of the eight steps took effect."""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import shlex
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.commands.verify.rows import ALL, FAILED, StepRow, complete, progress, show
from hvdtrain.config.strategies import DEFAULT, PACKAGES
from hvdtrain.config.values import above_zero, positive
from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, UsageError
from hvdtrain.system.machine.frameworks import is_installed
from hvdtrain.system.output import Report
from hvdtrain.system.output.tables import message
from hvdtrain.system.output.text import plural
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import Command, termination_as_interrupt
from hvdtrain.system.runtime.detect import detect, may_be_shell
from hvdtrain.system.runtime.exit import USAGE_TIMEOUT, fail, leave

log = logging.getLogger(__name__)

TIMEOUT = 300.0  # seconds; importing TensorFlow from a cold shared disk takes up to 30 s
UPDATES = 5

EPILOG = """example:
  hvdtrain verify -n 4           start 4 ranks and verify the eight steps
  mpirun -n 4 hvdtrain verify    the ranks that mpirun started verify themselves
  hvdtrain verify -n 2 --script train.py -- --epochs 1
                                 verify your own Horovod script

without -n: all slots of the batch job; outside a batch job, this process only
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.epilog = EPILOG
    add = parser.add_argument
    add("-n", dest="ranks", type=positive, metavar="N", help="number of ranks to start")
    add("--framework", choices=tuple(PACKAGES), help="framework (default: pytorch if installed)")
    add("--strategy", metavar="NAME", help="strategy, as for the trainers (default: horovod)")
    add("--script", type=Path, metavar="FILE", help="Horovod script to verify instead")
    updates = f"number of updates before it is ended, or `all` (default: {UPDATES})"
    add("--updates", type=update_limit, metavar="K", help=f"with --script: {updates}")
    limit = f"time limit for the ranks, in seconds (default: {TIMEOUT:g})"
    add("--timeout", type=above_zero, default=TIMEOUT, metavar="SECONDS", help=limit)
    strict = "with --script: exit with code 1 also if a step was not seen"
    add("--strict", action="store_true", help=strict)
    add("--json", action="store_true", help="print the rows as one JSON object")
    add("--dry-run", action="store_true", help="print the command without starting it")
    add("arguments", nargs="*", metavar="-- ARGUMENT", help="arguments of the --script")


def update_limit(value: str) -> int | str:
    """Read a number of updates, or ``all``."""
    try:
        return value if value == "all" else positive(value)
    except ValueError as error:
        raise ValueError(f"{error}, nor all") from None


def run_verb(arguments: argparse.Namespace) -> Report:
    """Run the verb with parsed ``arguments``; exit code 1 if a row failed.

    Raises:
        UsageError: an option is wrong, or does not fit the launcher.
        HvdtrainError: the ranks could not be started.
    """
    if arguments.arguments and not arguments.script:
        raise UsageError(f"{arguments.arguments[0]}: unexpected argument without --script")
    if arguments.updates and not arguments.script:
        raise UsageError("--updates: requires --script FILE")
    ranks = rank_count(arguments.ranks, os.environ)
    installed = (name for name, package in PACKAGES.items() if is_installed(package))
    framework = arguments.framework or next(installed, "pytorch")
    if ranks is None and not arguments.script:
        return _verify_here(framework, arguments)
    with termination_as_interrupt():  # the ranks must not outlive this process
        if arguments.script:
            from hvdtrain.commands.verify.script.start import observe

            arguments.updates = arguments.updates or UPDATES
            return observe(arguments, ranks)
        assert ranks is not None
        return _start(ranks, framework, arguments)


def rank_count(requested: int | None, environ: Mapping[str, str]) -> int | None:
    """Return the number of ranks to start; None if this process is a rank already, or the only one.

    Raises:
        UsageError: another number than the launcher's is requested.
    """
    launch = detect(environ)
    in_shell = may_be_shell(environ) and (requested or 1) > 1
    if launch.launcher and not in_shell:
        if requested not in (None, launch.size):
            raise UsageError(
                f"-n {requested}: {launch.launcher} has already started {launch.size} ranks; "
                "omit -n to verify on them"
            )
        return None
    from hvdtrain.commands.launch.hosts import find_allocation

    return requested or find_allocation(environ).slots or None


def _start(ranks: int, framework: str, arguments: argparse.Namespace) -> Report:
    """Start ranks that verify the steps, and return their report."""
    from hvdtrain.commands.launch.prepare import Request, prepare
    from hvdtrain.commands.verify.ranks import rank_command, start_ranks

    def build(steps: Sequence[int]) -> Command:
        return prepare(Request(ranks, rank_command(framework, arguments.strategy, steps))).command

    first = build(ALL)
    if arguments.dry_run:
        return Report(first.show(), {"ok": True, "commands": [first.show()]})
    log.info("%s", first.show())
    with terminal.working(f"starting {plural(ranks, 'rank')} and {framework}"):
        rows = start_ranks(build, arguments.timeout)
    return report(rows, framework, arguments.strategy, ranks)


def _verify_here(framework: str, arguments: argparse.Namespace) -> Report:
    """Verify in this process, a rank of a launcher or the only one; rank 0 returns the report."""
    from hvdtrain.commands.verify.ranks import rank_command, verify

    if arguments.dry_run:
        command = shlex.join(rank_command(framework, arguments.strategy, ALL))
        return Report(command, {"ok": True, "commands": [command]})
    launch = detect(os.environ)
    rows: list[StepRow] = []
    failures: list[Exception] = []

    def add_row(row: StepRow) -> None:
        rows.append(row)
        terminal.status(progress(row))

    def run_checks() -> None:
        try:
            verify(framework, arguments.strategy, add_row)
        except Exception as error:
            failures.append(error)

    worker = threading.Thread(target=run_checks, name="verify", daemon=True)
    with terminal.working(f"starting {framework}"):
        worker.start()
        worker.join(arguments.timeout)
    if worker.is_alive():
        cause = f"no answer after {arguments.timeout:g} s: a rank hangs, or --timeout is too short"
        rows.append(StepRow(len(rows) + 1, FAILED, cause))
        atexit.register(leave, EXIT_FAILURE)  # before the finalizers, which would hang too
    if launch.rank and (failures or worker.is_alive()):
        # Rank 0 reports first: mpirun kills all ranks when one exits with a code other than 0.
        code = getattr(failures[0], "exit_code", EXIT_FAILURE) if failures else EXIT_FAILURE
        fail(str(failures), code=code, wait=USAGE_TIMEOUT, agreed=True)
    if failures:
        raise failures[0]
    if launch.rank:
        sys.exit(EXIT_OK)
    return report(rows, framework, arguments.strategy, launch.size)


def report(rows: Sequence[StepRow], framework: str, strategy: str | None, ranks: int) -> Report:
    """Return the eight rows as a table and as data; missing rows count as not seen."""
    failure = f"step {rows[-1].step}" if rows else "the start"
    all_rows = complete(rows, f"not reached: see {failure}")
    failed = sum(row.state == FAILED for row in all_rows)
    hosts = all_rows[0].facts.get("hosts", 1)
    strategy = all_rows[0].facts.get("strategy", strategy or DEFAULT.name)
    headline = f"{framework} over {strategy}, {plural(ranks, 'rank')} on {plural(hosts, 'host')}"
    end = f"{failed} of {len(all_rows)} steps failed" if failed else "all steps took effect"
    if ranks == 1:
        end += "; for checks between ranks: hvdtrain verify -n 2"
    data = {
        "ok": not failed,
        "framework": framework,
        "strategy": strategy,
        "ranks": ranks,
        "hosts": hosts,
        "rows": [row.data() for row in all_rows],
    }
    text = f"{show(f'hvdtrain verify: {headline}', all_rows)}\n{message(end)}"
    return Report(text, data, EXIT_FAILURE if failed else EXIT_OK)
