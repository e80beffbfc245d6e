"""``hvdtrain report``: make one page of a run or a study, to be mailed to an advisor."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.system.output.result import Report
from hvdtrain.system.output.tables import message
from hvdtrain.system.output.text import printable
from hvdtrain.system.runtime import terminal

NAME = "report.html"
EPILOG = """example:
  hvdtrain report scaling
  hvdtrain report run-7 --html run-7.html

A run is what the trainers leave: --summary, --metrics, --checkpoint-dir and --timeline in one
directory. A study is the --out of `hvdtrain scaling` or
`hvdtrain compare`. The page is one file; it needs no network."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.epilog = EPILOG
    parser.add_argument("folder", metavar="DIR", type=Path, help="of a run or a study")
    parser.add_argument("--html", metavar="OUT", type=Path, help=f"the page (DIR/{NAME})")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")


def run_verb(arguments: argparse.Namespace) -> Report:
    """Write the page.

    Raises:
        UsageError: nothing was found, or the page cannot be written.
    """
    folder: Path = arguments.folder
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such directory")
    with terminal.working(f"looking through {printable(folder)}"):
        from hvdtrain.commands.report.find import look  # imported here: --help needs none of it
        from hvdtrain.commands.report.page import write

        found = look(folder)
    if found.is_empty:
        left_out = f". Left out: {printable('; '.join(found.notes))}" if found.notes else ""
        raise UsageError(
            f"{folder}: neither a run nor a study is in it. A report is made of a summary "
            "(--summary FILE.json), its curves (--metrics FILE.jsonl), checkpoints "
            "(--checkpoint-dir), a Horovod timeline (--timeline), or the results of `hvdtrain "
            f"scaling --out` or `hvdtrain compare --out`{left_out}"
        )
    target = arguments.html or folder / NAME
    with terminal.working(f"drawing {printable(target)}"):
        write(target, found)
    counts = found.counts()
    names = {**{name: name for name in counts}, "courses": "training curves"}
    shown = ", ".join(f"{names[name]}: {number}" for name, number in counts.items() if number)
    lines = [f"{target}: {shown}", *(f"left out: {note}" for note in found.notes)]
    lines = [message(printable(line), "  ") for line in lines]
    data = {"ok": True, "html": str(target), **counts, "left_out": found.notes}
    return Report("\n".join(lines), data)
