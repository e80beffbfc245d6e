"""Start and supervise torchrun's agents, one per host, which start the ranks there.

For ``hvdtrain launch --launcher torchrun``, and for ``--elastic``, whose agents survive lost ranks
and hosts. An agent is this package as a program (``__main__.py``) and on a leash, its standard
input: on a byte its ranks save and stop, and when it closes, because the process that holds the
other end has exited, they are killed. It works through ssh, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from typing_extensions import override

from hvdtrain.commands.launch.argv import forwarded
from hvdtrain.commands.launch.hosts import Host, RankLayout, lay_out
from hvdtrain.commands.launch.outcome import code_after_stop
from hvdtrain.commands.launch.prepare import (
    Request,
    check_request,
    choose_hosts,
    choose_threads,
    with_host_cores,
)
from hvdtrain.config.command_line import effective_value
from hvdtrain.config.strategies import DEFAULT, STRATEGIES
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.machine.limits import physical_cores
from hvdtrain.system.machine.network import is_this_host, local_names
from hvdtrain.system.machine.threads import thread_variables
from hvdtrain.system.output import Report
from hvdtrain.system.runtime.command import Command, start
from hvdtrain.system.runtime.detect import JOB_VARIABLES, TORCHRUN
from hvdtrain.system.runtime.spawn import STOP_TIMEOUT, Processes, StopSignals, exit_code
from hvdtrain.system.runtime.walltime import ENDS, ends_at

log = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-m", "hvdtrain.commands.launch.elastic")
SSH = (str(Path(__file__).parents[1] / "deaf_to_term"), "ssh", "-oBatchMode=yes")
PORT = "29500"  # torchrun's default for the rendezvous of several hosts; set by MASTER_PORT
EXIT_TIMEOUT = 3.0  # seconds for an agent to kill its ranks
RESTARTS = "--max-restarts=10"  # losses of a rank or a host that a job survives
# By default torchrun 2.13 gives an agent that joins the address of a store that is not recreated.
NO_SHARED_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def check_elastic(
    fewest: int | None, most: int | None, launcher: str | None, words: Sequence[str]
) -> None:
    """Raise ``UsageError`` if torchrun cannot restart the ranks of a trainer."""
    if None in (fewest, most):
        raise UsageError("--elastic needs --min N and --max M, the numbers of ranks")
    is_trainer = any(
        option == "-m" and module.startswith("hvdtrain.") for option, module in pairwise(words)
    )
    name = effective_value(words, "--strategy") or (DEFAULT.name if is_trainer else "")
    framework = effective_value(words, "--framework")
    supported = [strategy for strategy in STRATEGIES.values() if TORCHRUN in strategy.launchers]
    remedy = "--strategy ddp, or a chain of jobs"
    if launcher == "mpi":
        unsupported = "--launcher mpi"
    elif framework and not any(framework in strategy.adapters for strategy in supported):
        unsupported, remedy = f"--framework {framework}", "a chain of jobs"
    elif name in STRATEGIES and STRATEGIES[name] not in supported:
        unsupported = f"--strategy {name}"
    else:
        return
    raise UsageError(
        f"--elastic restarts ranks by torchrun, which does not support {unsupported}: use "
        f"{remedy} that resume (hvdtrain submit --chain)"
    )


def run_agents(request: Request, *, dry_run: bool) -> Report:
    """Start an agent on each host, and wait for them.

    Raises:
        UsageError: no such program, an option is for other launchers, or the ranks do not fit on
            the hosts.
        HvdtrainError: an agent cannot be started.
    """
    if request.tag:
        option = "--elastic" if request.fewest else "--launcher torchrun"
        raise UsageError(f"{option} does not support --tag and --timeout")
    with StopSignals() as signals:
        # Rank 0 may be on a host where the batch job cannot be queried.
        if not dry_run and (end := ends_at()) is not None:
            os.environ[ENDS] = f"{end:.0f}"
        agents = prepare_agents(request, os.environ)
        shown = "\n".join(command.show() for command in agents.values())
        if dry_run:
            return Report(shown)
        log.info("%s", shown)
        with (ElasticAgents if request.fewest else Agents)(signals) as running:
            running.start(agents)
            code = running.wait()
    stop = signal.Signals(signals.received[0]).name if signals.received else ""
    return Report("", exit_code=code_after_stop(code, stop, request.words))


def prepare_agents(request: Request, environ: Mapping[str, str]) -> dict[str, Command]:
    """Find the hosts, and return the command of the agent of each."""
    check_request(request, environ)
    allocation = choose_hosts(request.hosts, request.hostfile, environ)
    ranks, fewest = request.ranks, request.fewest
    if fewest:  # a host may be lost before the start: use the slots that there are
        slots = sum(request.ppn or host.slots for host in allocation.hosts) or ranks
        if fewest > min(slots, ranks):
            raise UsageError(f"--min {fewest}: more than --max {ranks} or the {slots} slots")
        ranks = min(slots, ranks)
    layout = lay_out(ranks, allocation, request.ppn)
    environ = with_host_cores(environ, layout.hosts)
    threads = choose_threads(request, layout, physical_cores(), environ)
    return agent_commands(layout, request.words, threads, environ, fewest)


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
        agent = Command((*PROGRAM, *rendezvous, *options), variables)
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
    if not host or is_this_host(host, local_names()):
        return command
    variables = {name: environ[name] for name in forwarded(environ)} | dict(command.env)
    remote = Command(command.argv, variables, Path.cwd())
    return Command((*SSH, host, f"exec {shlex.join(remote.words)}"))


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
            with contextlib.suppress(OSError, ValueError):  # it has ended
                if process.stdin:
                    os.write(process.stdin.fileno(), b"\n")

    @override
    def kill(self) -> None:
        for process in self.running:
            if process.stdin:
                process.stdin.close()
        deadline = time.monotonic() + EXIT_TIMEOUT
        for process in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
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
