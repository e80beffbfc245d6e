"""``hvdtrain launch``: find the hosts and the MPI, and start N ranks of a program the right way."""

from __future__ import annotations

import argparse
import logging
import signal
from pathlib import Path

from hvdtrain.commands.launch.prepare import (
    Request,
    add_host_options,
    checkpoint_dir,
    notes,
    prepare,
    prepare_agents,
)
from hvdtrain.commands.launch.torchrun import Agents, show
from hvdtrain.commands.launch.watch import StopSignals, code_after_stop, watch
from hvdtrain.errors import UsageError
from hvdtrain.system.output.result import Report

log = logging.getLogger(__name__)

EPILOG = """example:
  hvdtrain launch -n 2 -- python -m hvdtrain.mnist
  hvdtrain launch -n 2 --timeout 600 --tag -- python train.py --epochs 3
  hvdtrain launch -n 8 --ppn 4 --hosts node1,node2 --dry-run -- python -m hvdtrain.resnet

The exit code is the job's; 124 after --timeout. docs/launch.md tells more."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.usage = "hvdtrain launch -n N [options] -- COMMAND..."
    parser.epilog = EPILOG
    parser.add_argument("-n", type=int, required=True, metavar="N", help="ranks over all hosts")
    add_host_options(parser)
    parser.add_argument(
        "--launcher",
        choices=("mpi", "torchrun"),
        default="mpi",
        help="what starts the ranks: that of the MPI here, or torchrun, an agent per host (mpi)",
    )
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


def run_verb(arguments: argparse.Namespace) -> Report:
    """Start the ranks, wait for them, and pass on the launcher's exit code.

    Raises:
        UsageError: see ``prepare``.
        HvdtrainError: the job was ended for its silence.
    """
    words, timeout = arguments.command, arguments.timeout
    if timeout is not None and not timeout > 0:
        raise UsageError(f"--timeout {timeout:g}: give seconds, more than 0")
    request = Request(
        arguments.n,
        words[1:] if words[:1] == ["--"] else words,
        ppn=arguments.ppn,
        threads=arguments.threads,
        hosts=arguments.hosts,
        hostfile=arguments.hostfile,
        tag=arguments.tag or timeout is not None,
        ranks_per_host=arguments.room_for,
    )
    if arguments.launcher == "torchrun":
        return _by_torchrun(request, dry_run=arguments.dry_run)
    with StopSignals() as signals:  # a job may be stopped while mpirun is asked for its version
        launch = prepare(request)
        if arguments.dry_run:
            return Report(launch.command.show())
        for note in notes(launch.placed):
            log.warning("hvdtrain: %s", note)
        log.info("%s", launch.command.show())
        kept = _checkpoints(request)
        code = watch(launch, signals, tag=arguments.tag, timeout=timeout, checkpoints=kept)
    return Report("", exit_code=code)


def _checkpoints(request: Request) -> Path | None:
    kept = checkpoint_dir(request.words)
    return Path(kept) if kept else None


def _by_torchrun(request: Request, *, dry_run: bool) -> Report:
    """Start an agent on each host, and wait for them.

    Raises:
        UsageError: see ``prepare_agents``; or the output would have to be read.
        HvdtrainError: an agent cannot be started.
    """
    if request.tag:
        raise UsageError("--tag and --timeout are for an MPI's launcher: leave them out")
    with StopSignals() as signals:
        wanted = prepare_agents(request)
        if dry_run:
            return Report(show(wanted))
        log.info("%s", show(wanted))
        with Agents(signals.came) as running:
            running.start(wanted)
            code = running.wait()
    asked = signal.Signals(running.asked[0]).name if running.asked else ""
    return Report("", exit_code=code_after_stop(code, asked, _checkpoints(request)))
