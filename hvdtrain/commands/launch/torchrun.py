"""``hvdtrain launch --launcher torchrun``: an agent per host starts the ranks there."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from typing_extensions import override

from hvdtrain.commands.launch.hosts import Host
from hvdtrain.commands.launch.layout import RankLayout
from hvdtrain.commands.launch.remote import on_host
from hvdtrain.errors import HvdtrainError
from hvdtrain.system.machine.threads import thread_variables
from hvdtrain.system.runtime.command import Command, start
from hvdtrain.system.runtime.detect import JOB_VARIABLES
from hvdtrain.system.runtime.processes import AFTER_STOP, Processes, exit_code

AGENT = (sys.executable, "-m", "hvdtrain.commands.launch.agent")
PORT = "29500"  # torchrun's default for the rendezvous of several hosts; set by MASTER_PORT
RESTARTS = "--max-restarts=10"  # losses of a rank or a host that a job survives
# By default torchrun 2.13 gives an agent that joins the address of a store that is not recreated.
NO_SHARED_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
PATIENCE = 3.0  # seconds for an agent to kill its ranks on request


@dataclass(frozen=True)
class AgentCommand:
    """The command that starts an agent."""

    host: str  # as spelled by the batch system or the user; empty: this machine
    command: Command


def agent_commands(
    layout: RankLayout,
    words: Sequence[str],
    threads: int | None,
    environ: Mapping[str, str],
    folder: Path,
    here: Collection[str],
    fewest: int | None = None,
) -> list[AgentCommand]:
    """Return the commands of the agents that start ``words`` with ``layout``.

    Args:
        layout: ranks and hosts.
        words: the program that each rank runs, and its arguments.
        threads: OMP_NUM_THREADS of each rank; None leaves it to the agent.
        environ: the user's environment; other hosts get the part that they need.
        folder: the working directory, on all hosts.
        here: names and addresses of this machine.
        fewest: minimum number of ranks after losses; None: all.
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
    commands = []
    for number, host in enumerate(hosts):
        options = [f"--nproc-per-node={host.slots}", "--no-python", *words]
        if len(hosts) > 1:
            is_host = f"--rdzv-conf=is_host={int(number == 0)}"
            # Its ranks may rendezvous there; its own name may resolve to another address.
            address = [is_host, f"--local-addr={host.name}"]
            options = [*(address if fewest else [f"--node-rank={number}"]), *options]
        command = on_host(
            host.name, Command((*AGENT, *rendezvous, *options), variables), environ, folder, here
        )
        commands.append(AgentCommand(host.name, command))
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


def show(agents: Sequence[AgentCommand]) -> str:
    """Return a line per agent, which can be pasted into a shell."""
    return "\n".join(agent.command.show() for agent in agents)


class Agents(Processes):
    """The running agents that this process has started."""

    def start(self, agents: Sequence[AgentCommand]) -> None:
        """Start the agents.

        Raises:
            HvdtrainError: an agent cannot be started.
        """
        self._hosts = [agent.host for agent in agents]
        for agent in agents:
            try:
                self.running.append(start(agent.command, fed=True))
            except OSError as error:
                raise HvdtrainError(f"{agent.command.argv[0]}: {error.strerror}") from error

    @override
    def name(self, index: int) -> str:
        return f"the agent on {self._hosts[index] or socket.gethostname()}"

    @override
    def forward(self, number: signal.Signals) -> None:
        for process in self.running:
            with contextlib.suppress(OSError):  # it has ended
                os.write(_input(process).fileno(), b"\n")

    @override
    def kill(self) -> None:
        for process in self.running:
            _input(process).close()
        end = time.monotonic() + PATIENCE
        for process in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        super().kill()


class ElasticAgents(Agents):
    """Agents that may be lost, except the first, which hosts the rendezvous."""

    @override
    def _have_ended(self) -> bool:
        codes = [process.poll() for process in self.running]
        if codes[0] is not None:
            self._code = exit_code(codes[0])
            self._end_within(AFTER_STOP)
        return None not in codes


def _input(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdin
    return process.stdin
