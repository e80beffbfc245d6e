"""``hvdtrain verify``: prove on the user's own ranks that each of the eight steps took effect."""

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

from hvdtrain.commands.verify.rows import ALL, FAILED, Row, coming, complete, show
from hvdtrain.config.strategies import DEFAULT, PACKAGES, STRATEGIES
from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, UsageError
from hvdtrain.system.machine.frameworks import is_installed
from hvdtrain.system.output.result import Report
from hvdtrain.system.output.tables import message
from hvdtrain.system.output.text import plural
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import Command, termination_as_interrupt
from hvdtrain.system.runtime.detect import detect
from hvdtrain.system.runtime.exit import WAIT_USAGE, fail, leave

log = logging.getLogger(__name__)

FRAMEWORKS = ("pytorch", "tensorflow")
TIMEOUT = 300.0  # seconds; a cold shared disk takes half a minute for TensorFlow alone
UPDATES = 5

EPILOG = """example:
  hvdtrain verify -n 4                             start 4 ranks and verify the eight steps
  mpirun -n 4 hvdtrain verify                      the ranks that mpirun started verify themselves
  hvdtrain verify -n 2 --script train.py -- --epochs 1
                                                   watch a Horovod script of your own

without -n: all slots of the batch job; outside of one, this process alone
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.epilog = EPILOG
    add = parser.add_argument
    add("-n", dest="ranks", type=int, metavar="N", help="ranks to start")
    add("--framework", choices=FRAMEWORKS, help="default: pytorch where it is installed")
    add("--strategy", metavar="NAME", help="as of the trainers; default: horovod")
    add("--script", type=Path, metavar="FILE", help="watch this Horovod script instead")
    updates = f"end it after K updates, or `all`: at its own end (default {UPDATES})"
    add("--updates", metavar="K", help=f"with --script: {updates}")
    limit = f"end ranks that do not answer (default {TIMEOUT:g})"
    add("--timeout", type=float, default=TIMEOUT, metavar="SECONDS", help=limit)
    add("--strict", action="store_true", help="exit code 1 where a step was not seen, too")
    add("--json", action="store_true", help="print the rows as one JSON object")
    add("--dry-run", action="store_true", help="print what would be started")
    add("arguments", nargs="*", metavar="-- ARGUMENT", help="with --script: its arguments")


def run_verb(arguments: argparse.Namespace) -> Report:
    """Carry the verb out with parsed ``arguments``; exit code 1 where a row failed.

    Raises:
        UsageError: an option is wrong, or does not fit the launcher.
        HvdtrainError: the ranks could not be started.
    """
    if arguments.arguments and not arguments.script:
        raise UsageError(f"{arguments.arguments[0]}: arguments belong to a --script")
    if arguments.updates and not arguments.script:
        raise UsageError("--updates counts those of a --script: name one")
    if arguments.timeout <= 0:
        raise UsageError(f"--timeout {arguments.timeout:g}: give a number of seconds above 0")
    _check_strategy(arguments.strategy)
    ranks = how_many(arguments.ranks, os.environ)
    framework = arguments.framework or installed_framework()
    if ranks is None and not arguments.script:
        return _here(framework, arguments)
    with termination_as_interrupt():  # the ranks must not outlive this process
        if arguments.script:
            from hvdtrain.commands.verify.script.start import observe

            arguments.updates = arguments.updates or str(UPDATES)
            return observe(arguments, ranks)
        assert ranks is not None
        return _start(ranks, framework, arguments)


def _check_strategy(name: str | None) -> None:
    """Raise ``UsageError`` where a rank holds no whole model to verify the steps by."""
    record = STRATEGIES.get(name or DEFAULT.name)
    if record and record.splits_model:
        raise UsageError(
            f"--strategy {name} cannot be verified: a rank holds some layers of a model, and the "
            "steps are tried on a whole one; --strategy ddp is started in the same way"
        )


def how_many(asked: int | None, environ: Mapping[str, str]) -> int | None:
    """Return how many ranks to start; None: this process is a rank already, or the only one.

    Raises:
        UsageError: ranks were asked for inside a launcher's, or fewer than one.
    """
    place = detect(environ)
    if place.launcher:
        if asked not in (None, place.size):
            raise UsageError(
                f"-n {asked}: {place.launcher} has started {place.size} ranks already; leave -n "
                "out and they verify themselves"
            )
        return None
    if asked is not None and asked < 1:
        raise UsageError(f"-n {asked}: give a number of at least 1")
    from hvdtrain.commands.launch.hosts import find_allocation

    return asked or find_allocation(environ).slots or None


def installed_framework() -> str:
    """Return ``pytorch``, or ``tensorflow`` where that alone is installed."""
    return next((name for name in FRAMEWORKS if is_installed(PACKAGES[name])), FRAMEWORKS[0])


def _start(ranks: int, framework: str, arguments: argparse.Namespace) -> Report:
    """Start ranks that verify, and report what they found."""
    from hvdtrain.commands.launch.prepare import Request, prepare
    from hvdtrain.commands.verify.ranks import rank_words, start_ranks

    def build(steps: Sequence[int]) -> Command:
        return prepare(Request(ranks, rank_words(framework, arguments.strategy, steps))).command

    first = build(ALL)
    if arguments.dry_run:
        return Report(first.show(), {"ok": True, "commands": [first.show()]})
    log.info("%s", first.show())
    with terminal.working(f"starting {plural(ranks, 'rank')} and {framework}"):
        rows = start_ranks(build, arguments.timeout)
    return report(rows, framework, arguments.strategy, ranks)


def _here(framework: str, arguments: argparse.Namespace) -> Report:
    """Verify in this process, one rank of a launcher's or the only one; rank 0 reports."""
    from hvdtrain.commands.verify.ranks import rank_words, verify

    if arguments.dry_run:
        words = shlex.join(rank_words(framework, arguments.strategy, ALL))
        return Report(words, {"ok": True, "commands": [words]})
    place = detect(os.environ)
    rows: list[Row] = []
    failures: list[Exception] = []

    def take(row: Row) -> None:
        rows.append(row)
        terminal.status(coming(row))

    def work() -> None:
        try:
            verify(framework, arguments.strategy, take)
        except Exception as error:
            failures.append(error)

    worker = threading.Thread(target=work, name="verify", daemon=True)
    with terminal.working(f"starting {framework}"):
        worker.start()
        worker.join(arguments.timeout)
    if worker.is_alive():
        due = f"no answer after {arguments.timeout:g} s: a rank hangs, or --timeout is too short"
        rows.append(Row(len(rows) + 1, FAILED, due))
        atexit.register(leave, EXIT_FAILURE)  # before the finalizers, which would hang too
    if place.rank and (failures or worker.is_alive()):
        # Rank 0 reports first: mpirun kills all ranks when one leaves with another code than 0.
        code = getattr(failures[0], "exit_code", EXIT_FAILURE) if failures else EXIT_FAILURE
        fail(str(failures), code=code, wait=WAIT_USAGE, agreed=True)
    if failures:
        raise failures[0]
    if place.rank:
        sys.exit(EXIT_OK)
    return report(rows, framework, arguments.strategy, place.size)


def report(rows: Sequence[Row], framework: str, strategy: str | None, ranks: int) -> Report:
    """Return the eight rows as a table and as data; those that are missing count as not seen."""
    broken = f"step {rows[-1].step}" if rows else "the start"
    eight = complete(rows, f"not reached: see {broken}")
    failed = sum(row.state == FAILED for row in eight)
    hosts = eight[0].facts.get("hosts", 1)
    strategy = eight[0].facts.get("strategy", strategy or DEFAULT.name)
    headline = f"{framework} over {strategy}, {plural(ranks, 'rank')} on {plural(hosts, 'host')}"
    end = f"{failed} of {len(eight)} steps failed" if failed else "all steps took effect"
    if ranks == 1:
        end += "; between ranks nothing was tried: hvdtrain verify -n 2"
    data = {
        "ok": not failed,
        "framework": framework,
        "strategy": strategy,
        "ranks": ranks,
        "hosts": hosts,
        "rows": [row.data() for row in eight],
    }
    text = f"{show(f'hvdtrain verify: {headline}', eight)}\n{message(end)}"
    return Report(text, data, EXIT_FAILURE if failed else EXIT_OK)
