"""``hvdtrain report``: write a self-contained HTML page of a run or a study."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hvdtrain.config.declare import argument, json_switch, optional
from hvdtrain.errors import UsageError
from hvdtrain.system.files import check_input
from hvdtrain.system.output import Report
from hvdtrain.system.output.tables import message
from hvdtrain.system.output.text import printable
from hvdtrain.system.runtime import terminal

NAME = "report.html"
EPILOG = """example:
  hvdtrain report scaling
  hvdtrain report run-7 --html run-7.html

A run is a directory with the files of a trainer's --summary, --metrics,
--checkpoint-dir and --timeline. A study is the --out of `hvdtrain scaling` or
`hvdtrain compare`. The page is a single file without references to the
network."""


@dataclass(frozen=True)
class ReportOptions:
    """Options and arguments of ``hvdtrain report``."""

    folder: Path = argument("directory of a run or a study", Path, metavar="DIR")
    html: Path | None = optional(f"file of the page (default: DIR/{NAME})", Path, metavar="OUT")
    json: bool = json_switch()


def run_verb(options: ReportOptions) -> Report:
    """Write the page.

    Raises:
        UsageError: there are no results, or the page cannot be written.
    """
    folder = options.folder
    check_input(folder, str(folder))
    with terminal.working(f"reading {printable(folder)}"):
        from hvdtrain.commands.report.find import look  # imported here to keep --help fast
        from hvdtrain.commands.report.page import render
        from hvdtrain.system.output.page import write

        contents = look(folder)
    counts = contents.counts()
    if not any(counts.values()):
        left_out = f". Left out: {printable('; '.join(contents.notes))}" if contents.notes else ""
        raise UsageError(
            f"{folder}: no results of a run or a study. A report needs a summary "
            "(--summary FILE.json), its curves (--metrics FILE.jsonl), checkpoints "
            "(--checkpoint-dir), a Horovod timeline (--timeline), or the results of `hvdtrain "
            f"scaling --out` or `hvdtrain compare --out`{left_out}"
        )
    target = options.html or folder / NAME
    with terminal.working(f"writing {printable(target)}"):
        write(target, render(contents))
    names = {**{name: name for name in counts}, "curves": "training curves"}
    shown = ", ".join(f"{names[name]}: {number}" for name, number in counts.items() if number)
    lines = [f"{target}: {shown}", *(f"left out: {note}" for note in contents.notes)]
    lines = [message(printable(line), "  ") for line in lines]
    data = {"ok": True, "html": str(target), **counts, "left_out": contents.notes}
    return Report("\n".join(lines), data)
