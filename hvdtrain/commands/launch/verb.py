"""``hvdtrain launch``: find the hosts and the MPI, and start N ranks of a program."""

from __future__ import annotations

import logging
import signal
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.commands.launch.elastic import check_elastic, run_agents
from hvdtrain.commands.launch.outcome import code_after_stop
from hvdtrain.commands.launch.prepare import (
    Request,
    hostfile_option,
    hosts_option,
    notes,
    ppn_option,
    prepare,
)
from hvdtrain.commands.launch.staging import refuse_value, staged
from hvdtrain.commands.launch.watch import watch
from hvdtrain.config.declare import command, optional, switch
from hvdtrain.config.values import above_zero, positive
from hvdtrain.errors import UsageError
from hvdtrain.system.output import Report
from hvdtrain.system.output.text import page
from hvdtrain.system.runtime.detect import TORCHRUN
from hvdtrain.system.runtime.scratch import clear_leftovers
from hvdtrain.system.runtime.spawn import StopSignals

log = logging.getLogger(__name__)

USAGE = "hvdtrain launch -n N [options] -- COMMAND..."
EPILOG = f"""example:
  hvdtrain launch -n 2 -- python -m hvdtrain.mnist
  hvdtrain launch -n 2 --timeout 600 --tag -- python train.py --epochs 3
  hvdtrain launch -n 8 --ppn 4 --hosts node1,node2 --dry-run -- \\
      python -m hvdtrain.resnet

The exit code is that of the job; 124 after --timeout. See {page("launch")}."""


@dataclass(frozen=True)
class LaunchOptions:
    """Options and command of ``hvdtrain launch``."""

    ranks: int | None = optional("total number of ranks", positive, name="-n")
    hosts: str | None = hosts_option()
    hostfile: Path | None = hostfile_option()
    ppn: int | None = ppn_option()
    launcher: str | None = optional(
        "launcher of the ranks: that of the installed MPI, or torchrun (default: mpi, with "
        "--elastic torchrun)",
        choices=("mpi", "torchrun"),
        metavar="{mpi,torchrun}",
    )
    threads: int | None = optional(
        "OMP_NUM_THREADS of each rank (default: its share of the job's cores, else unset)",
        positive,
        metavar="T",
    )
    room_for: int | None = optional(
        "assume this many ranks per host when cores and threads are assigned (default: those that "
        "run)",
        positive,
        metavar="K",
    )
    timeout: float | None = optional(
        "seconds without output from any rank until the job is ended (default: none)",
        above_zero,
        metavar="SECONDS",
    )
    stage_env: bool = switch(
        "copy the program's virtual or conda environment to $TMPDIR of each host over MPI, and "
        "start the ranks there"
    )
    tag: bool = switch("prefix each line of output with [RANK]")
    dry_run: bool = switch("print the command without running it")
    elastic: bool = switch(
        "survive lost ranks and hosts, by torchrun; requires --min and --max instead of -n",
        group=f"elastic training ({page('launch')})",
    )
    min: int | None = optional("minimum number of ranks", positive)
    max: int | None = optional("maximum number of ranks", positive, metavar="M")
    command: tuple[str, ...] = command()

    @property
    def by_torchrun(self) -> bool:
        """Whether torchrun starts the ranks."""
        return self.elastic or self.launcher == TORCHRUN


def run_verb(options: LaunchOptions) -> Report:
    """Start the ranks, wait for them, and pass on the launcher's exit code.

    Raises:
        UsageError: see ``prepare`` and ``elastic.run_agents``; options cannot be combined.
        HvdtrainError: the job was ended after --timeout, or cannot be started.
    """
    _check(options)
    request = Request(
        options.ranks or options.max or 1,
        options.command,
        ppn=options.ppn,
        threads=options.threads,
        hosts=options.hosts,
        hostfile=options.hostfile,
        tag=options.tag or options.timeout is not None,
        ranks_per_host=options.room_for,
        fewest=options.min,
    )
    if options.by_torchrun:
        return run_agents(request, dry_run=options.dry_run)
    with StopSignals() as signals:  # signals may arrive during `mpirun --version`
        launch = prepare(request)
        if options.dry_run:
            return Report(launch.command.show())
        for note in notes(launch):
            log.warning("hvdtrain: %s", note)
        clear_leftovers()
        try:
            with staged(launch, signals) if options.stage_env else nullcontext(launch) as launch:
                log.info("%s", launch.command.show())
                code = watch(launch, signals, tag=options.tag, timeout=options.timeout)
        except KeyboardInterrupt:  # the ranks were not started
            stop = signal.Signals(signals.received[-1])
            code = code_after_stop(128 + stop, stop.name, request.words)
    return Report("", exit_code=code)


def _check(options: LaunchOptions) -> None:
    """Raise ``UsageError`` if options are missing, or cannot be combined."""
    if options.stage_env:
        refuse_value(options.command)
    if options.elastic is (options.ranks is not None):
        raise UsageError(
            "the number of ranks is required: use either -n N, or --elastic --min N --max M"
        )
    if not options.elastic and (options.min or options.max):
        raise UsageError("--min and --max need --elastic")
    if options.elastic:
        check_elastic(options.min, options.max, options.launcher, options.command)
    if options.stage_env and options.by_torchrun:
        raise UsageError("--stage-env is for the launcher of the MPI, not torchrun or --elastic")
    if options.stage_env and options.dry_run:
        raise UsageError(
            "--stage-env and --dry-run cannot be combined: the command depends on copies"
        )
