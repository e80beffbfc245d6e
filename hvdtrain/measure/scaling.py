"""``hvdtrain scaling``: run a ladder of sizes, and tell how well a training scales, and why."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvdtrain.verb import Report

OUT = Path("scaling")
EPILOG = """example:
  hvdtrain scaling --ranks 1,2,4,8 -- python -m hvdtrain.resnet --num-steps 20
  hvdtrain scaling --ranks 1,2,4 --strong -- python -m hvdtrain.mnist --global-batch-size 256
  hvdtrain scaling --ranks 4,8,16 --submit "--walltime 0:20:00 --ppn 4" -- python train.py
  hvdtrain scaling --from measured.csv --leave-out 8

An interrupted study continues where it stopped: type the same command again. Without a command the
runs in --out are reported again. docs/scaling.md explains the figures."""


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
    how.add_argument("--strong", action="store_true", help="keep the batch of all ranks")
    what.add_argument("--repeat", type=_count, default=3, metavar="K", help="runs per size (3)")
    what.add_argument(
        "--ppn", type=_count, metavar="K", help="ranks per host, as in hvdtrain launch"
    )
    what.add_argument("--hosts", metavar="A:2,B:2", help="as in hvdtrain launch")
    what.add_argument("--hostfile", type=Path, metavar="F", help="as in hvdtrain launch")
    what.add_argument(
        "--threads",
        type=_count,
        metavar="T",
        help="threads per rank, the same at every size (default: as the largest size allows)",
    )
    what.add_argument("--timeout", type=float, metavar="SECONDS", help="limit for one run")
    what.add_argument(
        "--submit",
        metavar="OPTIONS",
        help="make each size a job, with these options of hvdtrain submit, in quotes",
    )
    what.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    reported = parser.add_argument_group("what is reported")
    reported.add_argument(
        "--out", type=Path, metavar="DIR", help=f"where results and plots go ({OUT})"
    )
    reported.add_argument(
        "--from",
        dest="table",
        type=Path,
        metavar="FILE.csv",
        help="run nothing: read the columns ranks, images_per_second of a table",
    )
    reported.add_argument(
        "--allreduce",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="JSON of `hvdtrain doctor -n N --json`, for the prediction; may be repeated",
    )
    reported.add_argument(
        "--predict", type=_sizes, metavar="N,N,...", help="for these numbers of ranks (16 ... 4096)"
    )
    reported.add_argument(
        "--leave-out",
        type=_count,
        metavar="N",
        help="leave this size out of the fit and compare it with the prediction",
    )
    reported.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _sizes(text: str) -> tuple[int, ...]:
    """``1,2,4`` as rising numbers, each once."""
    return tuple(sorted({_count(part.strip()) for part in text.split(",")}))


def run_verb(arguments: argparse.Namespace) -> Report:
    """Carry the verb out with parsed ``arguments``.

    Raises:
        UsageError: an option is wrong, or runs do not belong together.
        HvdtrainError: a run failed.
    """
    from hvdtrain.measure import conduct  # imports what computes, which --help can spare

    return conduct.run(arguments)
