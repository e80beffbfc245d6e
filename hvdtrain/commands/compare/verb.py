"""``hvdtrain compare``: measure a training with several methods on this machine."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.commands.launch.prepare import add_host_options, count
from hvdtrain.commands.runs.target import read_target
from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, UsageError
from hvdtrain.system.output import Report
from hvdtrain.system.output.text import page
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import termination_as_interrupt

if TYPE_CHECKING:
    from hvdtrain.commands.compare.methods import Method
    from hvdtrain.commands.compare.trials import Comparison

# Options of the runs, which need a command.
RUNS = ("strategies", "precision", "frameworks", "ranks", "repeat", "batch_size", "dry_run")
EPILOG = f"""example:
  hvdtrain compare -- python -m hvdtrain.resnet --num-steps 30
  hvdtrain compare --strategies single,ddp --precision fp32,bf16 -- python -m hvdtrain.mnist
  hvdtrain compare --strategies 'horovod,horovod --autotune' -- python -m hvdtrain.resnet
  hvdtrain compare --out compare

To continue an interrupted comparison, run the same command again. Without a command, the results in
--out are reported again. {page("measuring")} explains the figures."""

HELP = {
    "--strategies": "strategies, each with its options in quotes, or all (default: all)",
    "--precision": "numeric precisions (default: that of the command)",
    "--frameworks": "deep-learning frameworks (default: that of the command)",
    "--ranks": "number of ranks of distributed strategies (default: 2)",
    "--repeat": "number of runs per method, in turn (default: 3)",
    "--batch-size": "search for the largest batch per rank that fits",
    "--threads": "threads per rank, also of a single process (default: cores per rank)",
    "--timeout": "time limit of one run, in seconds",
    "--out": "directory for results and plots (default: compare)",
    "--csv": "additional file for the table",
    "--target": "metric to reach, e.g. accuracy=0.985: report the time to it",
    "--price-per-hour": "price of one node-hour: report the price of an epoch",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.usage = "hvdtrain compare [options] -- COMMAND...\n       hvdtrain compare --out DIR"
    parser.epilog = EPILOG
    runs = parser.add_argument_group("runs")
    kind: Callable[[str], Any]
    for name, kind, metavar in (
        ("--strategies", _entries, "S,S,..."),
        ("--precision", _names, "P,P,..."),
        ("--frameworks", _names, "F,F,..."),
        ("--ranks", count, "N"),
        ("--repeat", count, "K"),
        ("--threads", count, "T"),
        ("--timeout", _positive, "SECONDS"),
    ):
        runs.add_argument(name, type=kind, metavar=metavar, help=HELP[name])
    add_host_options(runs)
    runs.add_argument("--batch-size", choices=("max",), help=HELP["--batch-size"])
    runs.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    report = parser.add_argument_group("report")
    for name, kind, metavar in (
        ("--out", Path, "DIR"),
        ("--csv", Path, "FILE"),
        ("--price-per-hour", _positive, "PRICE"),
        ("--target", read_target, "NAME=VALUE"),
    ):
        report.add_argument(name, type=kind, metavar=metavar, help=HELP[name])
    report.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _names(text: str) -> tuple[str, ...]:
    """Return ``a,b`` as names, without duplicates."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if "" in names:
        raise argparse.ArgumentTypeError(f"{text!r}: has an empty name")
    return names


def _entries(text: str) -> tuple[str, ...]:
    """Return ``a --x 1,2,b`` as strategies with their options; values may contain commas."""
    return tuple(dict.fromkeys(part.strip() for part in re.split(r",(?=\s*[a-z])", text)))


def _positive(text: str) -> float:
    """Return a positive number."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def run_verb(arguments: argparse.Namespace) -> Report:
    """Run the verb with parsed ``arguments``.

    Raises:
        UsageError: an option or the command is wrong, or runs are not comparable.
    """
    from hvdtrain.commands.compare import trials
    from hvdtrain.commands.compare.largest import find_largest
    from hvdtrain.commands.compare.methods import unavailable_reason

    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    folder = arguments.out or trials.OUT
    if not words:
        if any(getattr(arguments, name) for name in RUNS):
            raise UsageError("missing command: put it after --, e.g. `-- python train.py`")
        return _report(folder, None, arguments)
    plan = _plan(words, folder, arguments)
    if arguments.dry_run:
        runs = [run for run in trials.missing_runs(plan) if not unavailable_reason(run[0])]
        lines = [trials.command(plan, *run).show() for run in runs]
        return Report("\n".join(lines), {"ok": True, "commands": lines})
    with termination_as_interrupt():  # the ranks must not outlive this process
        hint = "" if arguments.strategies else "; use --strategies a,b for fewer"
        trials.run_comparison(plan, hint)
        if arguments.batch_size:
            find_largest(plan, trials.read_trials(folder))
    return _report(folder, plan.methods, arguments)


def _plan(words: Sequence[str], folder: Path, arguments: argparse.Namespace) -> Comparison:
    from hvdtrain.commands.compare.methods import ALL, Choice, choose, global_batch
    from hvdtrain.commands.compare.trials import Comparison
    from hvdtrain.commands.launch.prepare import choose_hosts
    from hvdtrain.commands.runs.command_options import check_measurable, value_of
    from hvdtrain.commands.runs.start import describe_machine, fullest_host
    from hvdtrain.system.machine.threads import equal_threads

    check_measurable(words, os.environ)
    if strategy := value_of(words, "--strategy"):
        raise UsageError(
            f"--strategy {strategy} in the command: it varies between runs; use "
            f"hvdtrain compare --strategies {strategy},single -- ..."
        )
    ranks = arguments.ranks or 2
    choice = Choice(
        arguments.strategies or (ALL,), arguments.frameworks, arguments.precision, ranks
    )
    methods = choose(choice, words)
    hosts = choose_hosts(arguments.hosts, arguments.hostfile, os.environ)
    share = fullest_host((ranks,), arguments.ppn, hosts)
    return Comparison(
        words=tuple(words),
        methods=tuple(methods),
        batch=global_batch(words, ranks),
        repeats=arguments.repeat or 3,
        folder=folder,
        machine=describe_machine(os.environ)[0],
        threads=arguments.threads or equal_threads(share, os.environ),
        ranks_per_host=share,
        ppn=arguments.ppn,
        hosts=arguments.hosts,
        hostfile=arguments.hostfile,
        timeout=arguments.timeout,
    )


def _report(
    folder: Path, methods: Sequence[Method] | None, arguments: argparse.Namespace
) -> Report:
    price, target = arguments.price_per_hour, arguments.target
    with terminal.working("drawing and writing the results"):
        from hvdtrain.commands.compare.report import report

        data, text = report(folder, methods, price, arguments.csv, target)
    failed = any(row["reason"] and row["reason"].startswith("failed") for row in data["rows"])
    return Report(text, data, EXIT_FAILURE if failed else EXIT_OK)
