"""``hvdtrain verify``: prove on the user's ranks that each of the eight steps took effect."""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.commands.verify.rows import ALL, FAILED, StepRow, complete, progress, show
from hvdtrain.config.declare import option, optional, switch
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
                                 verify your own script of Horovod or torch.distributed

without -n: all slots of the batch job; outside a batch job, this process only
"""


def update_limit(value: str) -> int | str:
    """Read a number of updates, or ``all``."""
    try:
        return value if value == "all" else positive(value)
    except ValueError as error:
        raise ValueError(f"{error}, nor all") from None


@dataclass(frozen=True)
class VerifyOptions:
    """Options and arguments of ``hvdtrain verify``."""

    ranks: int | None = optional("number of ranks to start", positive, name="-n")
    framework: str | None = optional(
        "framework (default: pytorch if installed)",
        choices=tuple(PACKAGES),
        metavar=f"{{{','.join(PACKAGES)}}}",
    )
    strategy: str | None = optional("strategy, as for the trainers (default: horovod)")
    script: Path | None = optional(
        "script of Horovod or torch.distributed to verify", Path, metavar="FILE"
    )
    updates: int | str | None = optional(
        f"with --script: number of updates before it is ended, or `all` (default: {UPDATES})",
        update_limit,
        metavar="K",
    )
    timeout: float = option(
        TIMEOUT,
        f"time limit for the ranks, in seconds (default: {TIMEOUT:g})",
        above_zero,
        metavar="SECONDS",
    )
    strict: bool = switch("with --script: exit with code 1 also if a step was not seen")
    exact: bool = switch("with --script: replay in fp64, and allow a difference of 1e-9")
    json: bool = switch("print the rows as one JSON object")
    dry_run: bool = switch("print the command without starting it")
    arguments: tuple[str, ...] = option(
        (), "arguments of the --script", metavar="-- ARGUMENT", number="*"
    )


def run_verb(options: VerifyOptions) -> Report:
    """Verify the ranks or the script; exit code 1 if a row failed.

    Raises:
        UsageError: an option is wrong, or does not fit the launcher.
        HvdtrainError: the ranks could not be started.
    """
    if options.arguments and not options.script:
        raise UsageError(f"{options.arguments[0]}: unexpected argument without --script")
    if options.updates and not options.script:
        raise UsageError("--updates needs --script FILE")
    ranks = rank_count(options.ranks, os.environ)
    in_shell = options.ranks and may_be_shell(os.environ)
    if options.script and detect(os.environ).launcher and not in_shell:
        raise UsageError(
            "--script: starts its ranks itself; use -n N instead of starting hvdtrain with mpirun"
        )
    installed = (name for name, package in PACKAGES.items() if is_installed(package))
    framework = options.framework or next(installed, "pytorch")
    if ranks is None and not options.script:
        return _verify_here(framework, options)
    with termination_as_interrupt():  # the ranks must not outlive this process
        if options.script:
            from hvdtrain.commands.verify.script.start import ScriptRun, observe

            updates = None if options.updates == "all" else int(options.updates or UPDATES)
            run = ScriptRun(
                options.script,
                options.arguments,
                ranks or 1,
                updates,
                options.strict,
                options.exact,
            )
            return observe(run, timeout=options.timeout, dry_run=options.dry_run)
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


def _start(ranks: int, framework: str, options: VerifyOptions) -> Report:
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


def _verify_here(framework: str, options: VerifyOptions) -> Report:
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
