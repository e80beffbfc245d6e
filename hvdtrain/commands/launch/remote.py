"""Commands on other hosts, by ssh: how they are started there, and which hosts answer."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import psutil

from hvdtrain.commands.launch.argv import forwarded
from hvdtrain.system.runtime.command import Command, run

log = logging.getLogger(__name__)

SSH = (str(Path(__file__).with_name("deaf_to_term")), "ssh", "-oBatchMode=yes")
NO_SSH = 255  # the exit code of ssh itself: no way to the host, or no more; no signal's
SOON = 5  # seconds for a host to answer, and between two questions to one that does not
POLL = 0.05  # seconds between two looks at what was answered
SLOW = 4.0 * SOON  # seconds for the shell there, which may read files over the network


def on_host(
    host: str,
    command: Command,
    environ: Mapping[str, str],
    folder: Path,
    here: Collection[str],
    *options: str,
) -> Command:
    """Return what runs ``command`` on ``host``, by ssh where that is another machine.

    Args:
        host: its name; empty: this machine.
        command: with the variables that are set for it.
        environ: the user's environment, of which other hosts get what they need.
        folder: the working directory, on all hosts.
        here: names and addresses of this machine.
        *options: of ssh.
    """
    if is_here(host, here):
        return command
    variables = {name: environ[name] for name in forwarded(environ)} | dict(command.env)
    there = Command(command.argv, variables, folder)
    return Command((*SSH, *options, host, f"exec {there.show()}"))


def is_here(host: str, here: Collection[str]) -> bool:
    """Return whether ``host`` is this machine, by the names that it has."""
    return not host or host in here or host.partition(".")[0] in here


def names_here() -> set[str]:
    """Return the names and the addresses of this machine; nothing is resolved."""
    name = socket.gethostname()
    cards = psutil.net_if_addrs().values()
    return {name, name.partition(".")[0], "localhost"} | {one.address for c in cards for one in c}


def ask(host: str) -> str | None:
    """Return why a command cannot be run on ``host``; None: it can."""
    if is_here(host, names_here()):
        return None
    done = run(Command((*SSH, f"-oConnectTimeout={SOON}", host, "true")), timeout=SLOW)
    said = done.output.strip().splitlines()
    return None if done.ok else said[-1] if said else f"ssh ended with code {done.exit_code}"


class Reachable:
    """Which hosts answer. One that does not is asked again and again, in a thread, until it does.

    Args:
        question: asks a host; returns why it does not answer, or None.
        pause: seconds between two questions.
    """

    def __init__(self, question: Callable[[str], str | None] = ask, pause: float = SOON) -> None:
        self._question, self._pause = question, pause
        self._answers: dict[str, bool | None] = {}  # None: it has not been heard yet

    def among(self, hosts: Iterable[str]) -> set[str]:
        """Return those of ``hosts`` that answer; what one says that is new is waited for."""
        hosts = set(hosts)
        new = hosts - self._answers.keys()
        for host in new:
            self.doubt(host)
        end = time.monotonic() + SLOW
        while any(self._answers[host] is None for host in new) and time.monotonic() < end:
            time.sleep(POLL)
        return {host for host in hosts if self._answers[host]}

    def doubt(self, host: str) -> None:
        """Let ``host`` count as silent until it answers."""
        if self._answers.get(host, True):
            self._answers[host] = None
            threading.Thread(target=self._wait_for, args=(host,), daemon=True).start()

    def _wait_for(self, host: str) -> None:
        while (why := self._question(host)) is not None:
            if self._answers[host] is None:
                log.info("hvdtrain: %s is left out until it answers: %s", host, why)
                self._answers[host] = False
            time.sleep(self._pause)
        if self._answers[host] is False:
            log.info("hvdtrain: %s answers", host)
        self._answers[host] = True
