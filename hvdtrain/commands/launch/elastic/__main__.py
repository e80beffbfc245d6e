"""Start the ranks of a host by torchrun, as its agent there.

``python -m hvdtrain.commands.launch.elastic`` takes torchrun's options and behaves like torchrun,
except that

- its exit code is that of the first rank to fail; torchrun's is always 1;
- on a signal or a byte its ranks save and stop, by SIGUSR1; torchrun kills them;
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
from collections.abc import Sequence

import psutil
from typing_extensions import override

from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, EXIT_PREEMPTED, EXIT_USAGE
from hvdtrain.system.machine.threads import own_cpus
from hvdtrain.system.runtime.outlive import STOP_SIGNALS
from hvdtrain.system.runtime.spawn import exit_code, say, signal_of

STANDARD_INPUT = 0


def listen() -> None:
    """Stop the ranks on a signal; keep standard input from them, and read it if it is a pipe."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: request_stop())
    kind = os.fstat(STANDARD_INPUT).st_mode
    pipe = os.dup(STANDARD_INPUT)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, STANDARD_INPUT)
    os.close(null)
    if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind):
        threading.Thread(target=_listen, args=(pipe,), name="stdin", daemon=True).start()


def _listen(pipe: int) -> None:
    while os.read(pipe, 1):
        request_stop()
    signal_ranks(signal.SIGKILL)
    os._exit(EXIT_FAILURE)


def signal_ranks(number: signal.Signals) -> bool:
    """Send a signal to the ranks of this host; return whether there are any."""
    ranks = psutil.Process().children()
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(number)
    return bool(ranks)


def request_stop() -> None:
    """Signal the ranks of this host to save and stop; exit at once if none has been started."""
    if not signal_ranks(signal.SIGUSR1):
        os._exit(128 + signal.SIGTERM)


def run_torchrun(arguments: Sequence[str]) -> int:
    """Start the ranks of this host with torchrun's ``arguments``; return the exit code."""
    listen()
    if "LOGLEVEL" not in os.environ:  # torchrun's
        logging.disable(logging.ERROR)  # failed ranks report it themselves, or are reported below
    quiet = "TORCH_CPP_LOG_LEVEL" not in os.environ
    if quiet:  # 20 lines for each request to the store of an agent that has exited
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    from torch.distributed import DistNetworkError
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
    os.sched_setaffinity(0, own_cpus())  # OpenMP may have bound this thread, and so the ranks
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
    except (DistNetworkError, RendezvousError) as error:
        if codes == {EXIT_PREEMPTED}:  # harmless: the ranks have saved
            return EXIT_PREEMPTED
        cause = f"{error.__cause__ or error}; set MASTER_PORT if the port is in use"
        say(f"{socket.gethostname()}: the rendezvous of the agents failed: {cause}")
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


if __name__ == "__main__":
    sys.exit(run_torchrun(sys.argv[1:]))
