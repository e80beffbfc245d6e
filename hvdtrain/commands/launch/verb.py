"""``hvdtrain launch``: find the hosts and the MPI, and start N ranks of a program the right way."""

from __future__ import annotations

import argparse
import logging
import os
import signal
from pathlib import Path

from hvdtrain.commands.launch.elastic import check_gloo, make_pool
from hvdtrain.commands.launch.outcome import Outcome
from hvdtrain.commands.launch.prepare import (
    Request,
    add_host_options,
    count,
    notes,
    prepare,
    prepare_agents,
)
from hvdtrain.commands.launch.stop import StopSignals, code_after_stop
from hvdtrain.commands.launch.torchrun import Agents, ElasticAgents, show
from hvdtrain.commands.launch.watch import watch
from hvdtrain.errors import UsageError
from hvdtrain.system.output.result import Report
from hvdtrain.system.output.text import page
from hvdtrain.system.runtime.scratch import clear_leftovers
from hvdtrain.system.runtime.walltime import ENDS, ends_at

log = logging.getLogger(__name__)

EPILOG = f"""example:
  hvdtrain launch -n 2 -- python -m hvdtrain.mnist
  hvdtrain launch -n 2 --timeout 600 --tag -- python train.py --epochs 3
  hvdtrain launch -n 8 --ppn 4 --hosts node1,node2 --dry-run -- python -m hvdtrain.resnet

The exit code is the job's; 124 after --timeout. {page("launch")} tells more."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.usage = "hvdtrain launch -n N [options] -- COMMAND..."
    parser.epilog = EPILOG
    parser.add_argument("-n", type=int, metavar="N", help="ranks over all hosts")
    add_host_options(parser)
    parser.add_argument(
        "--launcher",
        choices=("mpi", "torchrun"),
        default="mpi",
        help="what starts the ranks: that of the MPI here, or torchrun, an agent per host (mpi)",
    )
    _add_elastic_options(parser)
    parser.add_argument(
        "--threads", type=int, metavar="T", help="OMP_NUM_THREADS of each rank (default: unset)"
    )
    parser.add_argument(
        "--room-for",
        type=int,
        metavar="K",
        help="cores and threads per rank as if K ran per host, to compare numbers of ranks",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="end the job when no rank has written anything for so long",
    )
    parser.add_argument("--tag", action="store_true", help="put [RANK] before each line")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be run, and run nothing"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _add_elastic_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(f"a world that changes ({page('elastic')})")
    group.add_argument(
        "--elastic",
        action="store_true",
        help="go on when ranks are lost or hosts come and go, by Horovod's elastic driver or "
        "torchrun; instead of -n",
    )
    group.add_argument("--min", type=count, metavar="N", help="ranks that it waits for")
    group.add_argument("--max", type=count, metavar="M", help="ranks, whatever slots there are")
    group.add_argument(
        "--discovery",
        type=Path,
        metavar="SCRIPT",
        help="a program that prints lines `host:slots`, asked every second",
    )


def run_verb(arguments: argparse.Namespace) -> Report:
    """Start the ranks, wait for them, and pass on the launcher's exit code.

    Raises:
        UsageError: see ``prepare``.
        HvdtrainError: the job was ended for its silence.
    """
    words, timeout = arguments.command, arguments.timeout
    if timeout is not None and not timeout > 0:
        raise UsageError(f"--timeout {timeout:g}: give seconds, more than 0")
    if arguments.elastic is (arguments.n is not None):
        raise UsageError("give the number of ranks by -n N, or by --elastic --min N --max M")
    if not arguments.elastic and (arguments.min or arguments.max or arguments.discovery):
        raise UsageError("--min, --max and --discovery are for --elastic: give it too")
    request = Request(
        arguments.max or 1 if arguments.n is None else arguments.n,
        words[1:] if words[:1] == ["--"] else words,
        ppn=arguments.ppn,
        threads=arguments.threads,
        hosts=arguments.hosts,
        hostfile=arguments.hostfile,
        tag=arguments.tag or timeout is not None,
        ranks_per_host=arguments.room_for,
        fewest=arguments.min,
    )
    if arguments.elastic and None in (arguments.min, arguments.max):
        raise UsageError("--elastic: how many ranks may run? Give --min N and --max M")
    if arguments.launcher == "torchrun" and not arguments.discovery:
        return _by_torchrun(request, dry_run=arguments.dry_run)
    if arguments.elastic:
        return _elastic(arguments, request)
    with StopSignals() as signals:  # a job may be stopped while mpirun is asked for its version
        launch = prepare(request)
        if arguments.dry_run:
            return Report(launch.command.show())
        for note in notes(launch.placed):
            log.warning("hvdtrain: %s", note)
        clear_leftovers()
        log.info("%s", launch.command.show())
        with Outcome() as outcome:
            code = watch(
                launch, signals, outcome, request.words, tag=arguments.tag, timeout=timeout
            )
    return Report("", exit_code=code)


def _know_the_end() -> None:
    """Ask when the batch job ends: rank 0 may be on a host where it cannot ask."""
    end = ends_at()
    if end is not None:
        os.environ[ENDS] = f"{end:.0f}"


def _elastic(arguments: argparse.Namespace, request: Request) -> Report:
    """Start Horovod's elastic driver, and wait for its ranks.

    Raises:
        UsageError: see ``make_pool``; an option is for other launchers, or Horovod is not there.
        HvdtrainError: there were too few slots for too long.
    """
    if request.tag or arguments.launcher != "mpi":
        raise UsageError(
            "--tag and --timeout are not for --elastic, nor is --launcher for --discovery: leave "
            "them out"
        )
    pool = make_pool(request, arguments.min, arguments.max, arguments.discovery)
    check_gloo()
    from hvdtrain.commands.launch.elastic_job import ElasticJob, show

    if arguments.dry_run:
        return Report(show(pool, request.words, os.environ))
    with StopSignals() as signals:
        _know_the_end()
        job = ElasticJob(pool, request.words, signals)
        log.info("hvdtrain: Horovod's elastic driver, at %s:%d", job.address, job.port)
        code = job.run()
    return Report("", exit_code=code_after_stop(code, job.asked, request.words))


def _by_torchrun(request: Request, *, dry_run: bool) -> Report:
    """Start an agent on each host, and wait for them.

    Raises:
        UsageError: see ``prepare_agents``; or the output would have to be read.
        HvdtrainError: an agent cannot be started.
    """
    if request.tag:
        raise UsageError("--tag and --timeout are for an MPI's launcher: leave them out")
    with StopSignals() as signals:
        if not dry_run:
            _know_the_end()
        wanted = prepare_agents(request)
        if dry_run:
            return Report(show(wanted))
        log.info("%s", show(wanted))
        with (ElasticAgents if request.fewest else Agents)(signals.came) as running:
            running.start(wanted)
            code = running.wait()
    asked = signal.Signals(running.asked[0]).name if running.asked else ""
    return Report("", exit_code=code_after_stop(code, asked, request.words))
