"""``hvdtrain launch --launcher torchrun``: an agent on each host, which starts the ranks there."""

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
from hvdtrain.commands.launch.layout import Layout
from hvdtrain.commands.launch.remote import on_host
from hvdtrain.errors import HvdtrainError
from hvdtrain.system.machine.threads import thread_variables
from hvdtrain.system.runtime.command import Command, start
from hvdtrain.system.runtime.detect import JOB_VARIABLES
from hvdtrain.system.runtime.processes import AFTER_STOP, Processes, exit_code

AGENT = (sys.executable, "-m", "hvdtrain.commands.launch.agent")
PORT = "29500"  # torchrun's own, of the rendezvous of several hosts; MASTER_PORT is another
RESTARTS = "--max-restarts=10"  # losses of a rank or a host that a job goes on after
# By itself torchrun 2.13 tells an agent that joins the address of a store that is not made anew.
OWN_ADDRESS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
PATIENCE = 3.0  # seconds for an agent to end its ranks when it is told to


@dataclass(frozen=True)
class Agent:
    """An agent that is to be started."""

    host: str  # as the batch system or the user spells it; empty: this machine
    command: Command


def agents(
    layout: Layout,
    words: Sequence[str],
    threads: int | None,
    environ: Mapping[str, str],
    folder: Path,
    here: Collection[str],
    fewest: int | None = None,
) -> list[Agent]:
    """Return the agents that start ``words`` as ``layout`` says.

    Args:
        layout: ranks and hosts.
        words: the program that each rank runs, and its arguments.
        threads: OMP_NUM_THREADS of each rank; None leaves it to the agent.
        environ: the user's environment, of which other hosts get what they need.
        folder: the working directory, on all hosts.
        here: names and addresses of this machine.
        fewest: ranks to go on with where others are lost; None: with all or none.
    """
    own = thread_variables(threads, environ)
    hosts = layout.hosts or (Host("", layout.ranks),)
    port = environ.get("MASTER_PORT", PORT)
    rendezvous = ["--standalone"]
    if fewest:
        own |= OWN_ADDRESS
        job = next((environ[name] for name in JOB_VARIABLES if environ.get(name)), port)
        alone = len(hosts) == 1
        rendezvous = [*rendezvous, RESTARTS] if alone else _elastic(hosts, fewest, port, job)
    elif len(hosts) > 1:
        rendezvous = [f"--nnodes={len(hosts)}", f"--master-addr={hosts[0].name}"]
        rendezvous += [f"--master-port={port}"]
    found = []
    for number, host in enumerate(hosts):
        own_words = [f"--nproc-per-node={host.slots}", "--no-python", *words]
        if len(hosts) > 1:
            leads = f"--rdzv-conf=is_host={int(number == 0)}"
            # The rendezvous of its ranks may be there, and its own name may lead elsewhere.
            joins = [leads, f"--local-addr={host.name}"]
            own_words = [*(joins if fewest else [f"--node-rank={number}"]), *own_words]
        command = Command((*AGENT, *rendezvous, *own_words), own)
        found.append(Agent(host.name, on_host(host.name, command, environ, folder, here)))
    return found


def _elastic(hosts: Sequence[Host], fewest: int, port: str, job: str) -> list[str]:
    """Return torchrun's options for agents that may be lost, and come later."""
    slots = list(accumulate(sorted(host.slots for host in hosts)))
    needed = 1 + sum(total < fewest for total in slots)  # hosts, whichever they are
    return [
        f"--nnodes={needed}:{len(hosts)}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={hosts[0].name}:{port}",
        f"--rdzv-id={job}",
        RESTARTS,
    ]


def show(wanted: Sequence[Agent]) -> str:
    """Return a line per agent, which does the same when pasted into a shell."""
    return "\n".join(agent.command.show() for agent in wanted)


class Agents(Processes):
    """The agents that this process has started."""

    def start(self, wanted: Sequence[Agent]) -> None:
        """Start the agents.

        Raises:
            HvdtrainError: one cannot be started.
        """
        self._hosts = [agent.host for agent in wanted]
        for agent in wanted:
            try:
                self.running.append(start(agent.command, fed=True))
            except OSError as error:
                raise HvdtrainError(f"{agent.command.argv[0]}: {error.strerror}") from error

    @override
    def name(self, place: int) -> str:
        return f"the agent on {self._hosts[place] or socket.gethostname()}"

    @override
    def hand_on(self, number: signal.Signals) -> None:
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
    """Agents of which all may be lost but the first, which has the rendezvous."""

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
