"""The agent that ``hvdtrain launch --launcher torchrun`` starts on each host.

``python -m hvdtrain.commands.launch.agent`` takes torchrun's options and does what torchrun does.
Besides,

- its exit code is that of the first of its ranks to fail; torchrun's own is always 1;
- a signal reaches its ranks as SIGUSR1, on which they save and stop; torchrun would end them;
- where standard input is a pipe, a byte on it asks the ranks to stop too, also through ssh; and
  when the pipe closes, because whoever started the agent is gone, it ends with all of its ranks;
- each rank has its share of the host's cores; torchrun gives it one thread;
- with ``--max-restarts``, ranks that saved and stopped, or that were used wrongly, are not started
  anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Sequence

import psutil
from typing_extensions import override

from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, EXIT_PREEMPTED, EXIT_USAGE
from hvdtrain.system.runtime.processes import STOP_SIGNALS, exit_code, say, signal_of

STANDARD_INPUT = 0


def main(arguments: Sequence[str]) -> int:
    """Start the ranks of this host as torchrun's ``arguments`` say; return the exit code."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: ask())
    watch_input(lambda _: ask())
    if "LOGLEVEL" not in os.environ:  # of torchrun
        logging.disable(logging.ERROR)  # ranks that fail tell so themselves, or are told of below
    quiet = "TORCH_CPP_LOG_LEVEL" not in os.environ
    if quiet:  # the store of an agent that ended first is gone: 20 lines for each question to it
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    if quiet:
        del os.environ["TORCH_CPP_LOG_LEVEL"]  # the ranks have their own
    codes = _restart_only_after_loss()
    parsed = parse_args(list(arguments))
    if hasattr(parsed, "signals_to_handle"):  # else TERM ends the ranks, as torchrun does it
        parsed.signals_to_handle = "SIGQUIT"
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // int(parsed.nproc_per_node))))
    try:
        run(parsed)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            by = signal_of(failure.exitcode) or f"signal {-failure.exitcode}"
            say(f"rank {rank} on {socket.gethostname()} was ended by {by}")
        return exit_code(failure.exitcode)
    except SignalException as stop:
        return 128 + int(stop.sigval)
    except RendezvousError as error:
        if codes == {EXIT_PREEMPTED}:  # of no concern to ranks that have saved
            return EXIT_PREEMPTED
        say(f"{socket.gethostname()}: the rendezvous of the agents failed: {error}")
        return EXIT_FAILURE
    return EXIT_OK


def _restart_only_after_loss() -> set[int]:
    """Let an agent give up where its ranks end in a way that a new start would only repeat.

    Returns:
        The exit codes of the ranks that have failed last; changes when others do.
    """
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.launcher import api

    codes: set[int] = set()

    class Agent(LocalElasticAgent):
        @override
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result = super()._monitor_workers(worker_group)
            failed = {failure.exitcode for failure in result.failures.values()}
            if failed:
                codes.clear()
                codes.update(failed)
                if failed <= {EXIT_USAGE, EXIT_PREEMPTED}:
                    self._remaining_restarts = 0
            return result

    api.LocalElasticAgent = Agent  # type: ignore[attr-defined]  # which starts it
    return codes


def _ranks() -> list[psutil.Process]:
    return psutil.Process().children()


def ask() -> None:
    """Ask the ranks of this host to save and stop; end at once where there are none yet."""
    ranks = _ranks()
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(signal.SIGUSR1)
    if not ranks:
        os._exit(128 + signal.SIGTERM)


def kill() -> None:
    """End the ranks of this host, for certain."""
    for rank in _ranks():
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()


def watch_input(obey: Callable[[bytes], None]) -> None:
    """Keep standard input from the ranks; where it is a pipe, ``obey`` each byte, and its end."""
    kind = os.fstat(STANDARD_INPUT).st_mode
    leash = os.dup(STANDARD_INPUT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, STANDARD_INPUT)
    os.close(nothing)
    if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind):
        threading.Thread(target=_listen, args=(leash, obey), name="leash", daemon=True).start()


def _listen(leash: int, obey: Callable[[bytes], None]) -> None:
    while order := os.read(leash, 1):
        obey(order)
    kill()
    os._exit(EXIT_FAILURE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
