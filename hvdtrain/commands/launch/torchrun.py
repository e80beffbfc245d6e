"""``hvdtrain launch --launcher torchrun``: an agent per host starts the ranks there."""

from __future__ import annotations

import shlex
import signal
import socket
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from typing_extensions import override

from hvdtrain.commands.launch import host_process
from hvdtrain.commands.launch.argv import forwarded
from hvdtrain.commands.launch.hosts import Host, RankLayout
from hvdtrain.errors import HvdtrainError
from hvdtrain.system.machine.network import is_this_host, local_names
from hvdtrain.system.machine.threads import thread_variables
from hvdtrain.system.runtime.command import Command, start
from hvdtrain.system.runtime.detect import JOB_VARIABLES
from hvdtrain.system.runtime.spawn import STOP_TIMEOUT, Processes, exit_code

SSH = (str(Path(__file__).with_name("deaf_to_term")), "ssh", "-oBatchMode=yes")
PORT = "29500"  # torchrun's default for the rendezvous of several hosts; set by MASTER_PORT
RESTARTS = "--max-restarts=10"  # losses of a rank or a host that a job survives
# By default torchrun 2.13 gives an agent that joins the address of a store that is not recreated.
NO_SHARED_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def agent_commands(
    layout: RankLayout,
    words: Sequence[str],
    threads: int | None,
    environ: Mapping[str, str],
    fewest: int | None = None,
) -> dict[str, Command]:
    """Return the commands of the agents that start ``words`` with ``layout``, by host.

    The host is as spelled by the batch system or the user; empty: this machine. Without ``threads``
    an agent decides itself. ``fewest`` is the minimum number of ranks after losses; None: all.
    """
    variables = thread_variables(threads, environ)
    hosts = layout.hosts or (Host("", layout.ranks),)
    port = environ.get("MASTER_PORT", PORT)
    rendezvous = ["--standalone"]
    if fewest:
        variables |= NO_SHARED_STORE
        job = next((environ[name] for name in JOB_VARIABLES if environ.get(name)), port)
        single_host = len(hosts) == 1
        rendezvous = [*rendezvous, RESTARTS] if single_host else _elastic(hosts, fewest, port, job)
    elif len(hosts) > 1:
        rendezvous = [f"--nnodes={len(hosts)}", f"--master-addr={hosts[0].name}"]
        rendezvous += [f"--master-port={port}"]
    commands = {}
    for number, host in enumerate(hosts):
        options = [f"--nproc-per-node={host.slots}", "--no-python", *words]
        if len(hosts) > 1:
            is_host = f"--rdzv-conf=is_host={int(number == 0)}"
            # Its ranks may rendezvous there; its own name may resolve to another address.
            address = [is_host, f"--local-addr={host.name}"]
            options = [*(address if fewest else [f"--node-rank={number}"]), *options]
        agent = Command((*host_process.PROGRAM, *rendezvous, *options), variables)
        commands[host.name] = on_host(host.name, agent, environ)
    return commands


def _elastic(hosts: Sequence[Host], fewest: int, port: str, job: str) -> list[str]:
    """Return torchrun's options for agents that may be lost, and may join later."""
    slots = list(accumulate(sorted(host.slots for host in hosts)))
    needed = 1 + sum(total < fewest for total in slots)  # hosts, whichever they are
    return [
        f"--nnodes={needed}:{len(hosts)}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={hosts[0].name}:{port}",
        f"--rdzv-id={job}",
        RESTARTS,
    ]


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


class Agents(Processes):
    """The running agents that this process has started."""

    def start(self, agents: Mapping[str, Command]) -> None:
        """Start the agents, by host.

        Raises:
            HvdtrainError: an agent cannot be started.
        """
        self._hosts = list(agents)
        for command in agents.values():
            try:
                self.running.append(start(command, fed=True))
            except OSError as error:
                raise HvdtrainError(f"{command.argv[0]}: {error.strerror}") from error

    @override
    def name(self, index: int) -> str:
        return f"the agent on {self._hosts[index] or socket.gethostname()}"

    @override
    def forward(self, number: signal.Signals) -> None:
        for process in self.running:
            host_process.stop(process)

    @override
    def kill(self) -> None:
        host_process.end(self.running)
        super().kill()


class ElasticAgents(Agents):
    """Agents that may be lost, except the first, which hosts the rendezvous."""

    @override
    def _have_ended(self) -> bool:
        codes = [process.poll() for process in self.running]
        if codes[0] is not None:
            self._code = exit_code(codes[0])
            self._end_within(STOP_TIMEOUT)
        return None not in codes
