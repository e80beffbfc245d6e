"""``hvdtrain doctor``: diagnose the environment: MPI, GPUs, limits, Horovod.

The checks are in ``diagnosis.py``, which is imported after the options have been parsed.
"""

from __future__ import annotations

import argparse
import os

from hvdtrain.commands.launch.prepare import Request, add_host_options
from hvdtrain.config.values import positive
from hvdtrain.errors import UsageError
from hvdtrain.system.output import Report
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import termination_as_interrupt

EPILOG = """example:
  hvdtrain doctor          check this host; start no ranks
  hvdtrain doctor -n 4     also check 4 ranks and the speed of their allreduce
  hvdtrain doctor --json   for programs

The exit code is 1 if a finding is an error. 'absent' is not an error.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.epilog = EPILOG
    parser.add_argument(
        "-n",
        dest="ranks",
        type=positive,
        metavar="N",
        help="number of ranks to start as with `hvdtrain launch -n N`, to check them and to time "
        "allreduce (default: none)",
    )
    add_host_options(parser.add_argument_group("hosts of the ranks of -n"))
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands of -n without running them"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run_verb(arguments: argparse.Namespace) -> Report:
    """Run the command with parsed ``arguments``.

    Raises:
        UsageError: an option is invalid.
    """
    # Slow to import, and not needed for --help.
    from hvdtrain.commands.doctor import diagnosis

    count, environ = arguments.ranks, dict(os.environ)
    host_options = {name: getattr(arguments, name) for name in ("ppn", "hosts", "hostfile")}
    if count is None and any(host_options.values()):
        raise UsageError("--ppn, --hosts and --hostfile need -n N: they place its ranks")
    request = Request(count, (), **host_options) if count else None
    if arguments.dry_run:
        commands = diagnosis.commands(request, environ) if request else []
        lines = [command.show() for command in commands]
        return Report("\n".join(lines), {"ok": True, "commands": lines})
    with terminal.working("checking this host and its software"):
        findings = list(diagnosis.check_host(environ, request))
    world = times = None
    if request:
        with termination_as_interrupt():
            more, world, times = diagnosis.check_ranks(request, environ)
        findings += more
    return diagnosis.report(findings, world, times)
