"""``hvdtrain doctor``: look at everything that keeps a training from running well here.

What it does stands in ``diagnosis.py``, which is imported when the options have been read.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hvdtrain.commands.launch.prepare import Request, add_host_options
from hvdtrain.errors import UsageError
from hvdtrain.system.output.result import Report
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import termination_as_interrupt

EPILOG = """example:
  hvdtrain doctor              look at this host; starts nothing
  hvdtrain doctor -n 4         also start 4 ranks: what they find, and how fast they allreduce
  hvdtrain doctor --data ~/imagenet    also read some of its images: how fast, what takes the time
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
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="read a sample of the images in DIR as a training does: images/s per core, and where "
        "the time goes (seconds)",
    )
    add_host_options(parser.add_argument_group("where -n starts them"))
    parser.add_argument(
        "--dry-run", action="store_true", help="print what -n would start, and start nothing"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run_verb(arguments: argparse.Namespace) -> Report:
    """Carry the verb out with parsed ``arguments``.

    Raises:
        UsageError: an option is wrong.
    """
    # It imports tables and readers that --help can spare.
    from hvdtrain.commands.doctor import diagnosis
    from hvdtrain.commands.doctor.checks import data

    asked = arguments.ranks
    if asked is not None and asked < 1:
        raise UsageError(f"-n {asked}: give a number of at least 1")
    where = {name: getattr(arguments, name) for name in ("ppn", "hosts", "hostfile")}
    if asked is None and any(where.values()):
        raise UsageError("--ppn, --hosts and --hostfile say where -n starts ranks: give -n too")
    wanted = Request(asked, (), **where) if asked else None
    environ = dict(os.environ)
    if arguments.dry_run:
        lines = [one.show() for one in diagnosis.commands(wanted, environ)] if wanted else []
        return Report("\n".join(lines), {"ok": True, "commands": lines})
    # Wrong data ends it before anything is looked at.
    found = data.find(arguments.data) if arguments.data else None
    with terminal.working("looking at this host and its software"):
        findings = list(diagnosis.look(environ, wanted))
    report = times = read = None
    if wanted:
        with termination_as_interrupt():
            more, report, times = diagnosis.try_ranks(wanted, environ)
        findings += more
    if found:
        more, read = diagnosis.look_at_data(arguments.data, found, asked)
        findings += more
    return diagnosis.report(findings, report, times, read)
