"""``hvdtrain doctor``: diagnose the environment: MPI, GPUs, limits, Horovod.

The checks are in ``diagnosis.py``, which is imported after the options have been parsed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.commands.launch.prepare import (
    Request,
    hostfile_option,
    hosts_option,
    ppn_option,
)
from hvdtrain.config.declare import json_switch, optional, switch
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


@dataclass(frozen=True)
class DoctorOptions:
    """Options of ``hvdtrain doctor``."""

    ranks: int | None = optional(
        "number of ranks to start as with `hvdtrain launch -n N`, to check them and to time "
        "allreduce (default: none)",
        positive,
        name="-n",
    )
    hosts: str | None = hosts_option(group="hosts of the ranks of -n")
    hostfile: Path | None = hostfile_option()
    ppn: int | None = ppn_option()
    dry_run: bool = switch("print the commands of -n without running them", group="options")
    json: bool = json_switch()


def run_verb(options: DoctorOptions) -> Report:
    """Check this host, and with ``-n`` ranks; return the findings.

    Raises:
        UsageError: an option is invalid.
    """
    # Slow to import, and not needed for --help.
    from hvdtrain.commands.doctor import diagnosis

    environ, request = dict(os.environ), None
    if options.ranks:
        request = Request(
            options.ranks, (), ppn=options.ppn, hosts=options.hosts, hostfile=options.hostfile
        )
    elif options.ppn or options.hosts or options.hostfile:
        raise UsageError("--ppn, --hosts and --hostfile need -n N: they place its ranks")
    if options.dry_run:
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
