"""Commands on other hosts, by ssh."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.commands.launch.argv import forwarded
from hvdtrain.system.machine.network import is_this_host, local_names
from hvdtrain.system.runtime.command import Command

SSH = (str(Path(__file__).with_name("deaf_to_term")), "ssh", "-oBatchMode=yes")


def on_host(host: str, command: Command, environ: Mapping[str, str]) -> Command:
    """Return the command that runs ``command`` on ``host``, by ssh if it is another machine.

    It runs in the current working directory, with the variables of ``command``; another machine
    also gets the part of the user's ``environ`` that ranks need.
    """
    if is_here(host):
        return command
    variables = {name: environ[name] for name in forwarded(environ)} | dict(command.env)
    remote = Command(command.argv, variables, Path.cwd())
    return Command((*SSH, host, f"exec {shlex.join(remote.words)}"))


def is_here(host: str) -> bool:
    """Return whether ``host`` is a name or address of this machine; empty: it is."""
    return not host or is_this_host(host, local_names())
