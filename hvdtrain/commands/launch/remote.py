"""Commands on other hosts, by ssh, and which hosts answer."""

from __future__ import annotations

import logging
import shlex
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from hvdtrain.commands.launch.argv import forwarded
from hvdtrain.system.machine.network import is_this_host, local_names
from hvdtrain.system.runtime.command import Command, run

log = logging.getLogger(__name__)

SSH = (str(Path(__file__).with_name("deaf_to_term")), "ssh", "-oBatchMode=yes")
NO_SSH = 255  # exit code of ssh itself: no connection, or a lost one; not that of a signal
SOON = 5  # seconds for a host to answer, and between two attempts
POLL = 0.05  # seconds between two checks for answers
SLOW = 4.0 * SOON  # seconds for the remote shell, which may read files over the network


def on_host(
    host: str,
    command: Command,
    environ: Mapping[str, str],
    *options: str,
) -> Command:
    """Return the command that runs ``command`` on ``host``, by ssh if it is another machine.

    It runs in the current working directory, with the variables of ``command``; another machine
    also gets the part of the user's ``environ`` that ranks need. ``options`` are those of ssh.
    """
    if is_here(host):
        return command
    variables = {name: environ[name] for name in forwarded(environ)} | dict(command.env)
    remote = Command(command.argv, variables, Path.cwd())
    return Command((*SSH, *options, host, f"exec {shlex.join(remote.words)}"))


def is_here(host: str) -> bool:
    """Return whether ``host`` is a name or address of this machine; empty: it is."""
    return not host or is_this_host(host, local_names())


def connection_error(host: str) -> str | None:
    """Return the reason why no command can be run on ``host``; None: it can."""
    if is_here(host):
        return None
    done = run(Command((*SSH, f"-oConnectTimeout={SOON}", host, "true")), timeout=SLOW)
    lines = done.output.strip().splitlines()
    return None if done.ok else lines[-1] if lines else f"ssh ended with code {done.exit_code}"


class Reachable:
    """The hosts that answer; one that does not is retried, every ``pause`` seconds in a thread."""

    def __init__(self, pause: float = SOON) -> None:
        self._pause = pause
        self._answers: dict[str, bool | None] = {}  # None: not yet known

    def among(self, hosts: Iterable[str]) -> set[str]:
        """Return those of ``hosts`` that answer; wait for the answers of new ones."""
        hosts = set(hosts)
        new = hosts - self._answers.keys()
        for host in new:
            self.doubt(host)
        end = time.monotonic() + SLOW
        while any(self._answers[host] is None for host in new) and time.monotonic() < end:
            time.sleep(POLL)
        return {host for host in hosts if self._answers[host]}

    def doubt(self, host: str) -> None:
        """Exclude ``host`` until it answers."""
        if self._answers.get(host, True):
            self._answers[host] = None
            threading.Thread(target=self._wait_for, args=(host,), daemon=True).start()

    def _wait_for(self, host: str) -> None:
        while (reason := connection_error(host)) is not None:
            if self._answers[host] is None:
                log.info("hvdtrain: host %s is excluded until it answers: %s", host, reason)
                self._answers[host] = False
            time.sleep(self._pause)
        if self._answers[host] is False:
            log.info("hvdtrain: host %s answers", host)
        self._answers[host] = True
