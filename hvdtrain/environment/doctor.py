"""``hvdtrain doctor``: look at everything that keeps a training from running well here.

What it does stands in ``diagnosis.py``, which is imported when the options have been read.
"""

from __future__ import annotations

import argparse
import os

from hvdtrain.errors import UsageError
from hvdtrain.launch.run import termination_as_interrupt
from hvdtrain.verb import Report

EPILOG = """example:
  hvdtrain doctor              look at this host; starts nothing
  hvdtrain doctor -n 4         also start 4 ranks: what they find, and how fast they allreduce
  hvdtrain doctor --json       for programs

The exit code is 1 where a finding is an error. 'absent' is not an error.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.epilog = EPILOG
    parser.add_argument(
        "-n",
        dest="ranks",
        type=int,
        metavar="N",
        help="start N ranks as `hvdtrain launch -n N` does, look at them and time allreduce",
    )
    parser.add_argument("--ppn", type=int, metavar="K", help="with -n: K ranks on each host")
    parser.add_argument("--hosts", metavar="A:K,B:K", help="with -n: on these hosts")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what -n would start, and start nothing"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run_verb(arguments: argparse.Namespace) -> Report:
    """Carry the verb out with parsed ``arguments``.

    Raises:
        UsageError: an option is wrong.
    """
    from hvdtrain.environment import diagnosis  # imports tables and readers that --help can spare

    asked = arguments.ranks
    if asked is not None and asked < 1:
        raise UsageError(f"-n {asked}: give a number of at least 1")
    if asked is None and (arguments.ppn or arguments.hosts):
        raise UsageError("--ppn and --hosts say where -n starts its ranks: give -n too")
    wanted = diagnosis.Ranks(asked, arguments.ppn, arguments.hosts) if asked else None
    environ = dict(os.environ)
    if arguments.dry_run:
        lines = [one.show() for one in wanted.commands(environ)] if wanted else []
        return Report("\n".join(lines), {"ok": True, "commands": lines})
    findings = list(diagnosis.look(environ, wanted))
    report = times = None
    if wanted:
        with termination_as_interrupt():
            more, report, times = diagnosis.try_ranks(wanted, environ)
        findings += more
    return diagnosis.report(findings, report, times)
