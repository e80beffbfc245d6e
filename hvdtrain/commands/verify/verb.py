"""``hvdtrain verify``: prove on the user's ranks that each of the eight steps took effect."""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import sys
import threading
from collections.abc import Mapping, Sequence

from hvdtrain.commands.verify.options import Options
from hvdtrain.commands.verify.rows import ALL, FAILED, StepRow, complete, progress, show
from hvdtrain.config.strategies import DEFAULT, PACKAGES
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

EPILOG = """example:
  hvdtrain verify -n 4           start 4 ranks and verify the eight steps
  mpirun -n 4 hvdtrain verify    the ranks that mpirun started verify themselves
  hvdtrain verify -n 2 --script train.py -- --epochs 1
                                 verify your own Horovod script

without -n: all slots of the batch job; outside a batch job, this process only
"""


def run_verb(options: Options) -> Report:
    """Verify the ranks or the script; exit code 1 if a row failed.

    Raises:
        UsageError: an option is wrong, or does not fit the launcher.
        HvdtrainError: the ranks could not be started.
    """
    if options.arguments and not options.script:
        raise UsageError(f"{options.arguments[0]}: unexpected argument without --script")
    if options.updates and not options.script:
        raise UsageError("--updates: requires --script FILE")
    ranks = rank_count(options.ranks, os.environ)
    installed = (name for name, package in PACKAGES.items() if is_installed(package))
    framework = options.framework or next(installed, "pytorch")
    if ranks is None and not options.script:
        return _verify_here(framework, options)
    with termination_as_interrupt():  # the ranks must not outlive this process
        if options.script:
            from hvdtrain.commands.verify.script.start import observe

            return observe(options, ranks)
        assert ranks is not None
        return _start(ranks, framework, options)


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


def _start(ranks: int, framework: str, options: Options) -> Report:
    """Start ranks that verify the steps, and return their report."""
    from hvdtrain.commands.launch.prepare import Request, prepare
    from hvdtrain.commands.verify.ranks import rank_command, start_ranks

    def build(steps: Sequence[int]) -> Command:
        return prepare(Request(ranks, rank_command(framework, options.strategy, steps))).command

    first = build(ALL)
    if options.dry_run:
        return Report(first.show(), {"ok": True, "commands": [first.show()]})
    log.info("%s", first.show())
    with terminal.working(f"starting {plural(ranks, 'rank')} and {framework}"):
        rows = start_ranks(build, options.timeout)
    return report(rows, framework, options.strategy, ranks)


def _verify_here(framework: str, options: Options) -> Report:
    """Verify in this process, a rank of a launcher or the only one; rank 0 returns the report."""
    from hvdtrain.commands.verify.ranks import rank_command, verify

    if options.dry_run:
        command = shlex.join(rank_command(framework, options.strategy, ALL))
        return Report(command, {"ok": True, "commands": [command]})
    launch = detect(os.environ)
    rows: list[StepRow] = []
    failures: list[Exception] = []

    def add_row(row: StepRow) -> None:
        rows.append(row)
        terminal.status(progress(row))

    def run_checks() -> None:
        try:
            verify(framework, options.strategy, add_row)
        except Exception as error:
            failures.append(error)

    worker = threading.Thread(target=run_checks, name="verify", daemon=True)
    with terminal.working(f"starting {framework}"):
        worker.start()
        worker.join(options.timeout)
    if worker.is_alive():
        cause = f"no answer after {options.timeout:g} s: a rank hangs, or --timeout is too short"
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
    return report(rows, framework, options.strategy, launch.size)


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
