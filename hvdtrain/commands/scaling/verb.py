"""``hvdtrain scaling``: run a training on several numbers of ranks, and report its scaling."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.commands.launch.prepare import add_host_options, count
from hvdtrain.commands.runs.records import OUT, STRONG, WEAK, Run, read_folder, read_table
from hvdtrain.commands.runs.target import read_target
from hvdtrain.errors import UsageError
from hvdtrain.system.output import Report
from hvdtrain.system.output.text import page
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import termination_as_interrupt

EPILOG = f"""example:
  hvdtrain scaling --ranks 1,2,4,8 -- python -m hvdtrain.resnet --num-steps 20
  hvdtrain scaling --ranks 1,2,4 --strong -- python -m hvdtrain.mnist --global-batch-size 256
  hvdtrain scaling --ranks 4,8,16 --submit "--walltime 0:20:00 --ppn 4" -- python train.py
  hvdtrain scaling --from measured.csv --leave-out 8

To continue an interrupted study, run the same command again. Without a command, the results in
--out are reported again. {page("measuring")} explains the figures."""


FIELDS = ("ppn", "threads", "hosts", "hostfile", "timeout")  # options that are fields of a Sweep
HELP = {
    "--threads": "threads per rank at every size (default: cores per rank at the largest size)",
    "--timeout": "time limit of one run, in seconds",
    "--submit": "options of hvdtrain submit, in quotes: submit each size as a job",
    "--out": f"directory for results and plots (default: {OUT})",
    "--from": "table to report instead of runs, with columns ranks, images_per_second",
    "--allreduce": "JSON of `hvdtrain doctor -n N --json`, for the prediction; repeatable",
    "--predict": "numbers of ranks to predict (default: 16 ... 4096)",
    "--target": "metric to reach, e.g. accuracy=0.985: report the time to it",
    "--leave-out": "size to exclude from the fit and compare with the prediction",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.usage = (
        "hvdtrain scaling --ranks N,N,... [options] -- COMMAND...\n"
        "       hvdtrain scaling --from FILE.csv [options]"
    )
    parser.epilog = EPILOG
    runs = parser.add_argument_group("runs")
    runs.add_argument("--ranks", type=_sizes, metavar="N,N,...", help="numbers of ranks")
    scaling = runs.add_mutually_exclusive_group()
    scaling.add_argument("--weak", action="store_true", help="constant batch per rank (default)")
    scaling.add_argument("--strong", action="store_true", help="constant global batch")
    repeat = "number of runs per size (default: 3)"
    runs.add_argument("--repeat", type=count, default=3, metavar="K", help=repeat)
    add_host_options(runs)
    kind: Callable[[str], Any]
    for name, kind, metavar in (
        ("--threads", count, "T"),
        ("--timeout", float, "SECONDS"),
        ("--submit", str, "OPTIONS"),
    ):
        runs.add_argument(name, type=kind, metavar=metavar, help=HELP[name])
    runs.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    report = parser.add_argument_group("report")
    keywords: dict[str, Any]
    for name, kind, metavar, keywords in (
        ("--out", Path, "DIR", {}),
        ("--from", Path, "FILE.csv", {"dest": "table"}),
        ("--allreduce", Path, "FILE", {"action": "append", "default": []}),
        ("--predict", _sizes, "N,N,...", {}),
        ("--leave-out", count, "N", {}),
        ("--target", read_target, "NAME=VALUE", {}),
    ):
        report.add_argument(name, type=kind, metavar=metavar, help=HELP[name], **keywords)
    report.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _sizes(text: str) -> tuple[int, ...]:
    """Return ``1,2,4`` as increasing numbers, without duplicates."""
    return tuple(sorted({count(part.strip()) for part in text.split(",")}))


def run_verb(arguments: argparse.Namespace) -> Report:
    """Run the verb with parsed ``arguments``.

    Raises:
        UsageError: an option is wrong, or runs are not comparable.
        HvdtrainError: a run failed.
    """
    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if arguments.table is not None:
        if words or arguments.ranks:
            raise UsageError("--from only reads a table: remove --ranks and the command")
        if arguments.target:
            raise UsageError("--target needs the training curves of the runs, not a table")
        return _report(read_table(arguments.table), arguments.table, arguments, arguments.out)
    folder = arguments.out or OUT
    if words:
        from hvdtrain.commands.scaling.sweep import Sweep, command, missing_runs, resolve, run_sweep

        sweep = Sweep(
            words=tuple(words),
            sizes=arguments.ranks or (),
            repeats=arguments.repeat,
            scaling=STRONG if arguments.strong else WEAK,
            folder=folder,
            **{name: getattr(arguments, name) for name in FIELDS},
        )
        sweep = resolve(sweep, local=arguments.submit is None)
        if arguments.submit is not None:
            from hvdtrain.commands.scaling.jobs import submit_sizes

            return submit_sizes(sweep, arguments.submit, dry_run=arguments.dry_run)
        if arguments.dry_run:
            lines = [command(sweep, *run).show() for run in missing_runs(sweep)]
            return Report("\n".join(lines), {"ok": True, "commands": lines})
        with termination_as_interrupt():  # the ranks must not outlive this process
            run_sweep(sweep)
    elif arguments.ranks or arguments.dry_run or arguments.submit:
        raise UsageError("missing command: put it after --, e.g. `-- python train.py`")
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
