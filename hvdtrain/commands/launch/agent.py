"""The agent that ``hvdtrain launch --launcher torchrun`` starts on each host.

``python -m hvdtrain.commands.launch.agent`` takes torchrun's options and behaves like torchrun,
except that

- its exit code is that of the first rank to fail; torchrun's is always 1;
- it forwards signals to its ranks as SIGUSR1, on which they save and stop; torchrun kills them;
- if standard input is a pipe, a byte on it stops the ranks too, also through ssh; and when the pipe
  closes, because the process that started the agent has exited, it exits with all of its ranks;
- each rank gets its share of the host's cores; torchrun gives it one thread;
- with ``--max-restarts``, ranks that saved and stopped, or that ended with a usage error, are not
  restarted.
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
    """Start the ranks of this host with torchrun's ``arguments``; return the exit code."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: request_stop())
    watch_input(lambda _: request_stop())
    if "LOGLEVEL" not in os.environ:  # torchrun's
        logging.disable(logging.ERROR)  # failed ranks report it themselves, or are reported below
    quiet = "TORCH_CPP_LOG_LEVEL" not in os.environ
    if quiet:  # 20 lines for each request to the store of an agent that has exited
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    if quiet:
        del os.environ["TORCH_CPP_LOG_LEVEL"]  # not for the ranks
    codes = _restart_only_after_loss()
    parsed = parse_args(list(arguments))
    if hasattr(parsed, "signals_to_handle"):  # otherwise TERM kills the ranks, as under torchrun
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
        if codes == {EXIT_PREEMPTED}:  # harmless: the ranks have saved
            return EXIT_PREEMPTED
        say(f"{socket.gethostname()}: the rendezvous of the agents failed: {error}")
        return EXIT_FAILURE
    return EXIT_OK


def _restart_only_after_loss() -> set[int]:
    """Make the agent give up if its ranks end in a way that a restart would only repeat.

    Returns:
        The exit codes of the ranks that failed last; updated when others fail.
    """
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.launcher import api

    codes: set[int] = set()

    class LossOnlyAgent(LocalElasticAgent):
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

    api.LocalElasticAgent = LossOnlyAgent  # type: ignore[attr-defined]  # used by run()
    return codes


def _ranks() -> list[psutil.Process]:
    return psutil.Process().children()


def request_stop() -> None:
    """Signal the ranks of this host to save and stop; exit at once if none has been started."""
    ranks = _ranks()
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(signal.SIGUSR1)
    if not ranks:
        os._exit(128 + signal.SIGTERM)


def kill_ranks() -> None:
    """Kill the ranks of this host."""
    for rank in _ranks():
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()


def watch_input(handle: Callable[[bytes], None]) -> None:
    """Keep standard input from the ranks; if it is a pipe, ``handle`` its bytes and its end."""
    kind = os.fstat(STANDARD_INPUT).st_mode
    pipe = os.dup(STANDARD_INPUT)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, STANDARD_INPUT)
    os.close(null)
    if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind):
        threading.Thread(target=_listen, args=(pipe, handle), name="stdin", daemon=True).start()


def _listen(pipe: int, handle: Callable[[bytes], None]) -> None:
    while order := os.read(pipe, 1):
        handle(order)
    kill_ranks()
    os._exit(EXIT_FAILURE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
