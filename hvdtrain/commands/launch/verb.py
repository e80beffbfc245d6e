"""``hvdtrain launch``: find the hosts and the MPI, and start N ranks of a program."""

from __future__ import annotations

import argparse
import logging
import os
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise

from hvdtrain.commands.launch.outcome import code_after_stop
from hvdtrain.commands.launch.prepare import (
    Request,
    add_host_options,
    notes,
    option_of,
    prepare,
    prepare_agents,
)
from hvdtrain.commands.launch.stage_environment import refuse_value, staged
from hvdtrain.commands.launch.torchrun import Agents, ElasticAgents
from hvdtrain.commands.launch.watch import watch
from hvdtrain.config.strategies import DEFAULT, STRATEGIES
from hvdtrain.config.values import above_zero, positive
from hvdtrain.errors import UsageError
from hvdtrain.system.output import Report
from hvdtrain.system.output.text import page
from hvdtrain.system.runtime.detect import TORCHRUN
from hvdtrain.system.runtime.scratch import clear_leftovers
from hvdtrain.system.runtime.spawn import StopSignals
from hvdtrain.system.runtime.walltime import ENDS, ends_at

log = logging.getLogger(__name__)

EPILOG = f"""example:
  hvdtrain launch -n 2 -- python -m hvdtrain.mnist
  hvdtrain launch -n 2 --timeout 600 --tag -- python train.py --epochs 3
  hvdtrain launch -n 8 --ppn 4 --hosts node1,node2 --dry-run -- \\
      python -m hvdtrain.resnet

The exit code is that of the job; 124 after --timeout. See {page("launch")}."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.usage = "hvdtrain launch -n N [options] -- COMMAND..."
    parser.epilog = EPILOG
    parser.add_argument("-n", type=positive, metavar="N", help="total number of ranks")
    add_host_options(parser)
    parser.add_argument(
        "--launcher",
        choices=("mpi", "torchrun"),
        help="launcher of the ranks: that of the installed MPI, or torchrun (default: mpi, with "
        "--elastic torchrun)",
    )
    _add_elastic_options(parser)
    parser.add_argument(
        "--threads",
        type=positive,
        metavar="T",
        help="OMP_NUM_THREADS of each rank (default: its share of the job's cores, else unset)",
    )
    parser.add_argument(
        "--room-for",
        type=positive,
        metavar="K",
        help="number of ranks per host to divide cores and threads by (default: those that run)",
    )
    parser.add_argument(
        "--timeout",
        type=above_zero,
        metavar="SECONDS",
        help="seconds without output from any rank until the job is ended (default: none)",
    )
    parser.add_argument(
        "--stage-env",
        action="store_true",
        help="copy the program's virtual or conda environment to $TMPDIR of each host over MPI, "
        "and start the ranks there",
    )
    parser.add_argument("--tag", action="store_true", help="prefix each line of output with [RANK]")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command without running it"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _add_elastic_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(f"elastic training ({page('launch')})")
    group.add_argument(
        "--elastic",
        action="store_true",
        help="survive lost ranks and hosts, by torchrun; requires --min and --max instead of -n",
    )
    group.add_argument("--min", type=positive, metavar="N", help="minimum number of ranks")
    group.add_argument("--max", type=positive, metavar="M", help="maximum number of ranks")


def run_verb(arguments: argparse.Namespace) -> Report:
    """Start the ranks, wait for them, and pass on the launcher's exit code.

    Raises:
        UsageError: see ``prepare`` and ``prepare_agents``; an option is for other launchers.
        HvdtrainError: the job was ended after --timeout, or cannot be started.
    """
    words, timeout = arguments.command, arguments.timeout
    if arguments.stage_env:
        refuse_value(words)
    if arguments.elastic is (arguments.n is not None):
        raise UsageError(
            "the number of ranks is required: use either -n N, or --elastic --min N --max M"
        )
    if not arguments.elastic and (arguments.min or arguments.max):
        raise UsageError("--min and --max require --elastic")
    request = Request(
        arguments.n or arguments.max or 1,
        words[1:] if words[:1] == ["--"] else words,
        ppn=arguments.ppn,
        threads=arguments.threads,
        hosts=arguments.hosts,
        hostfile=arguments.hostfile,
        tag=arguments.tag or timeout is not None,
        ranks_per_host=arguments.room_for,
        fewest=arguments.min,
    )
    if arguments.elastic:
        _check_elastic(arguments, request.words)
    by_torchrun = arguments.elastic or arguments.launcher == TORCHRUN
    if arguments.stage_env and by_torchrun:
        raise UsageError("--stage-env is for the launcher of the MPI, not torchrun or --elastic")
    if arguments.stage_env and arguments.dry_run:
        raise UsageError(
            "--stage-env and --dry-run: the command depends on copies that --dry-run does not "
            "make; omit one of them"
        )
    if by_torchrun:
        return _by_torchrun(request, dry_run=arguments.dry_run)
    with StopSignals() as signals:  # signals may arrive during `mpirun --version`
        launch = prepare(request)
        if arguments.dry_run:
            return Report(launch.command.show())
        for note in notes(launch):
            log.warning("hvdtrain: %s", note)
        clear_leftovers()
        try:
            with staged(launch, signals) if arguments.stage_env else nullcontext(launch) as launch:
                log.info("%s", launch.command.show())
                code = watch(launch, signals, tag=arguments.tag, timeout=timeout)
        except KeyboardInterrupt:  # the ranks were not started
            stop = signal.Signals(signals.received[-1])
            code = code_after_stop(128 + stop, stop.name, request.words)
    return Report("", exit_code=code)


def _export_job_end() -> None:
    """Export when the batch job ends: rank 0 may be on a host where it cannot be queried."""
    end = ends_at()
    if end is not None:
        os.environ[ENDS] = f"{end:.0f}"


def _check_elastic(arguments: argparse.Namespace, words: Sequence[str]) -> None:
    """Raise ``UsageError`` if torchrun cannot restart the ranks of a trainer."""
    if None in (arguments.min, arguments.max):
        raise UsageError("--elastic requires --min N and --max M, the numbers of ranks")
    is_trainer = any(
        option == "-m" and module.startswith("hvdtrain.") for option, module in pairwise(words)
    )
    name = option_of(words, "strategy") or (DEFAULT.name if is_trainer else "")
    framework = option_of(words, "framework")
    supported = [strategy for strategy in STRATEGIES.values() if TORCHRUN in strategy.launchers]
    remedy = "--strategy ddp, or a chain of jobs"
    if arguments.launcher == "mpi":
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


def _by_torchrun(request: Request, *, dry_run: bool) -> Report:
    """Start an agent on each host, and wait for them."""
    if request.tag:
        option = "--elastic" if request.fewest else "--launcher torchrun"
        raise UsageError(f"{option} does not support --tag and --timeout")
    with StopSignals() as signals:
        if not dry_run:
            _export_job_end()
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
