"""``hvdtrain scaling``: run a ladder of sizes, and report how well a training scales, and why."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.commands.launch.prepare import add_host_options, count
from hvdtrain.commands.runs.records import OUT, STRONG, WEAK, Run, read_folder, read_table
from hvdtrain.commands.runs.target import read_target
from hvdtrain.errors import UsageError
from hvdtrain.system.output.result import Report
from hvdtrain.system.output.text import page
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import termination_as_interrupt

EPILOG = f"""example:
  hvdtrain scaling --ranks 1,2,4,8 -- python -m hvdtrain.resnet --num-steps 20
  hvdtrain scaling --ranks 1,2,4 --strong -- python -m hvdtrain.mnist --global-batch-size 256
  hvdtrain scaling --ranks 4,8,16 --submit "--walltime 0:20:00 --ppn 4" -- python train.py
  hvdtrain scaling --from measured.csv --leave-out 8

An interrupted study continues where it stopped: type the same command again. Without a command the
runs in --out are reported again. {page("measuring")} explains the figures."""


LADDER = ("ppn", "threads", "hosts", "hostfile", "timeout")  # options that are its fields
HELP = {
    "--threads": "threads per rank, the same at every size (default: as the largest size allows)",
    "--timeout": "limit for one run",
    "--submit": "make each size a job, with these options of hvdtrain submit, in quotes",
    "--out": f"where results and plots go ({OUT})",
    "--from": "run nothing: read the columns ranks, images_per_second of a table",
    "--allreduce": "JSON of `hvdtrain doctor -n N --json`, for the prediction; may be repeated",
    "--predict": "for these numbers of ranks (16 ... 4096)",
    "--target": "also the seconds until an evaluation reached it, such as accuracy=0.985",
    "--leave-out": "leave this size out of the fit and compare it with the prediction",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.usage = (
        "hvdtrain scaling --ranks N,N,... [options] -- COMMAND...\n"
        "       hvdtrain scaling --from FILE.csv [options]"
    )
    parser.epilog = EPILOG
    what = parser.add_argument_group("what is run")
    what.add_argument("--ranks", type=_sizes, metavar="N,N,...", help="numbers of ranks")
    how = what.add_mutually_exclusive_group()
    how.add_argument("--weak", action="store_true", help="keep the batch per rank (the default)")
    how.add_argument("--strong", action="store_true", help="keep the global batch")
    what.add_argument("--repeat", type=count, default=3, metavar="K", help="runs per size (3)")
    add_host_options(what)
    kind: Callable[[str], Any]
    for name, kind, metavar in (
        ("--threads", count, "T"),
        ("--timeout", float, "SECONDS"),
        ("--submit", str, "OPTIONS"),
    ):
        what.add_argument(name, type=kind, metavar=metavar, help=HELP[name])
    what.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    reported = parser.add_argument_group("what is reported")
    more: dict[str, Any]
    for name, kind, metavar, more in (
        ("--out", Path, "DIR", {}),
        ("--from", Path, "FILE.csv", {"dest": "table"}),
        ("--allreduce", Path, "FILE", {"action": "append", "default": []}),
        ("--predict", _sizes, "N,N,...", {}),
        ("--leave-out", count, "N", {}),
        ("--target", read_target, "NAME=VALUE", {}),
    ):
        reported.add_argument(name, type=kind, metavar=metavar, help=HELP[name], **more)
    reported.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _sizes(text: str) -> tuple[int, ...]:
    """Return ``1,2,4`` as rising numbers, each once."""
    return tuple(sorted({count(part.strip()) for part in text.split(",")}))


def run_verb(arguments: argparse.Namespace) -> Report:
    """Carry the verb out with parsed ``arguments``.

    Raises:
        UsageError: an option is wrong, or runs do not belong together.
        HvdtrainError: a run failed.
    """
    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if arguments.table is not None:
        if words or arguments.ranks:
            raise UsageError("--from runs nothing: leave --ranks and the command out")
        if arguments.target:
            raise UsageError("--target needs the training curves of the runs, not a table")
        return _report(read_table(arguments.table), arguments.table, arguments, arguments.out)
    folder = arguments.out or OUT
    if words:
        from hvdtrain.commands.scaling.ladder import Ladder, climb, command, complete, missing_runs

        given = {name: getattr(arguments, name) for name in LADDER}
        ladder = Ladder(
            words=tuple(words),
            sizes=arguments.ranks or (),
            repeats=arguments.repeat,
            scaling=STRONG if arguments.strong else WEAK,
            folder=folder,
            **given,
        )
        ladder = complete(ladder, here=arguments.submit is None)
        if arguments.submit is not None:
            from hvdtrain.commands.scaling.jobs import submit_sizes

            return submit_sizes(ladder, arguments.submit, dry_run=arguments.dry_run)
        if arguments.dry_run:
            lines = [command(ladder, *run).show() for run in missing_runs(ladder)]
            return Report("\n".join(lines), {"ok": True, "commands": lines})
        with termination_as_interrupt():  # the ranks must not outlive this process
            climb(ladder)
    elif arguments.ranks or arguments.dry_run or arguments.submit:
        raise UsageError("what should be run? Give it after --, as in `-- python train.py`")
    return _report(read_folder(folder), folder, arguments, folder)


def _report(
    runs: Sequence[Run], source: Path, arguments: argparse.Namespace, folder: Path | None
) -> Report:
    with terminal.working("fitting, drawing and writing the results"):
        from hvdtrain.commands.scaling.report import report

        return report(
            runs,
            source,
            scaling=STRONG if arguments.strong else WEAK if arguments.weak else None,
            folder=folder,
            ranks=arguments.predict,
            tables=arguments.allreduce,
            leave_out=arguments.leave_out,
            target=arguments.target,
        )
