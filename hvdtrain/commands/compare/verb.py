"""``hvdtrain compare``: the same training by every method, and which is the best here."""

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
from hvdtrain.system.output.result import Report
from hvdtrain.system.output.text import page
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import termination_as_interrupt

if TYPE_CHECKING:
    from hvdtrain.commands.compare.methods import Method
    from hvdtrain.commands.compare.trials import Comparison

# Options that are about runs, so that a command has to be given with them.
RUNS = ("strategies", "precision", "frameworks", "ranks", "repeat", "batch_size", "dry_run")
EPILOG = f"""example:
  hvdtrain compare -- python -m hvdtrain.resnet --num-steps 30
  hvdtrain compare --strategies single,ddp --precision fp32,bf16 -- python -m hvdtrain.mnist
  hvdtrain compare --strategies 'horovod,horovod --autotune' -- python -m hvdtrain.resnet
  hvdtrain compare --out compare

An interrupted comparison continues where it stopped: type the same command again. Without a command
what is in --out is reported again. {page("measuring")} explains the figures."""

HELP = {
    "--strategies": "which, or all (all); options of one stand behind it, in quotes",
    "--precision": "in each of these (the command's)",
    "--frameworks": "by each of these (the command's)",
    "--ranks": "of each strategy that takes several (2)",
    "--repeat": "runs per method, in turn (3)",
    "--batch-size": "also find the largest batch per rank that fits",
    "--threads": "threads per rank, of the one process, too (default: a rank's share of the host)",
    "--timeout": "limit for one run",
    "--out": "where results and plots go (compare)",
    "--csv": "also write the table to this file",
    "--target": "also the seconds until an evaluation reached it, such as accuracy=0.985",
    "--price-per-hour": "of one node: adds the price of an epoch",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.usage = "hvdtrain compare [options] -- COMMAND...\n       hvdtrain compare --out DIR"
    parser.epilog = EPILOG
    what = parser.add_argument_group("what is run")
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
        what.add_argument(name, type=kind, metavar=metavar, help=HELP[name])
    add_host_options(what)
    what.add_argument("--batch-size", choices=("max",), help=HELP["--batch-size"])
    what.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    reported = parser.add_argument_group("what is reported")
    for name, kind, metavar in (
        ("--out", Path, "DIR"),
        ("--csv", Path, "FILE"),
        ("--price-per-hour", _positive, "PRICE"),
        ("--target", read_target, "NAME=VALUE"),
    ):
        reported.add_argument(name, type=kind, metavar=metavar, help=HELP[name])
    reported.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _names(text: str) -> tuple[str, ...]:
    """Return ``a,b`` as names, each once."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if "" in names:
        raise argparse.ArgumentTypeError(f"{text!r}: an empty name")
    return names


def _entries(text: str) -> tuple[str, ...]:
    """Return ``a --x 1,2,b`` as strategies with their options: a comma within a value stays."""
    return tuple(dict.fromkeys(part.strip() for part in re.split(r",(?=\s*[a-z])", text)))


def _positive(text: str) -> float:
    """Return a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def run_verb(arguments: argparse.Namespace) -> Report:
    """Carry the verb out with parsed ``arguments``.

    Raises:
        UsageError: an option or the command is wrong, or runs do not belong together.
    """
    from hvdtrain.commands.compare.largest import find_largest
    from hvdtrain.commands.compare.trials import OUT, carry_out, command, missing, read_trials

    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    folder = arguments.out or OUT
    if not words:
        if any(getattr(arguments, name) for name in RUNS):
            raise UsageError("what should be run? Give it after --, as in `-- python train.py`")
        return _report(folder, None, arguments)
    plan = _plan(words, folder, arguments)
    if arguments.dry_run:
        from hvdtrain.commands.compare.methods import why_not

        lines = [command(plan, *one).show() for one in missing(plan) if not why_not(one[0])]
        return Report("\n".join(lines), {"ok": True, "commands": lines})
    with termination_as_interrupt():  # the ranks must not outlive this process
        carry_out(plan, "" if arguments.strategies else "; --strategies a,b for fewer")
        if arguments.batch_size:
            find_largest(plan, read_trials(folder))
    return _report(folder, plan.methods, arguments)


def _plan(words: Sequence[str], folder: Path, arguments: argparse.Namespace) -> Comparison:
    from hvdtrain.commands.compare.methods import ALL, Choice, choose, global_batch
    from hvdtrain.commands.compare.trials import Comparison
    from hvdtrain.commands.launch.prepare import choose_hosts
    from hvdtrain.commands.runs.start import describe_machine, fullest_host
    from hvdtrain.commands.runs.words import check_measurable, value_of
    from hvdtrain.system.machine.threads import equal_threads

    check_measurable(words, os.environ)
    if strategy := value_of(words, "--strategy"):
        raise UsageError(
            f"--strategy {strategy} in the command: each run has another; say which by "
            f"hvdtrain compare --strategies {strategy},single -- ..."
        )
    ranks = arguments.ranks or 2
    asked = arguments.strategies or (ALL,)
    methods = choose(Choice(asked, arguments.frameworks, arguments.precision, ranks), words)
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

        found, text = report(folder, methods, price, arguments.csv, target)
    failed = any(row["reason"] and row["reason"].startswith("failed") for row in found["rows"])
    return Report(text, found, EXIT_FAILURE if failed else EXIT_OK)
