"""``hvdtrain timeline``: read a Horovod timeline and tell what takes the time."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path

from hvdtrain.commands.timeline import report
from hvdtrain.commands.timeline.analyse import Recorder
from hvdtrain.commands.timeline.facts import analyse
from hvdtrain.commands.timeline.read import repair
from hvdtrain.errors import UsageError
from hvdtrain.system.output.result import Report
from hvdtrain.system.output.tables import message
from hvdtrain.system.output.text import printable
from hvdtrain.system.runtime import terminal

EXAMPLE = """example:
  hvdtrain timeline timeline.json
  hvdtrain timeline timeline.json --html timeline.html --slice 10:20

A timeline is what Horovod writes where HOROVOD_TIMELINE names a file, and our trainers by
--timeline FILE. Only with HOROVOD_CACHE_CAPACITY=0 (--timeline sets it) does it show for every step
which rank was late."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.epilog = EXAMPLE
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help="timeline, gzipped or not")
    add("--html", metavar="OUT", type=Path, help="write a page: report and trace")
    add("--json", action="store_true", help="print the whole analysis as JSON")
    valid = "write the events as valid JSON, for chrome://tracing and Perfetto"
    add("--repair", metavar="OUT", type=Path, help=valid)
    add("--slice", metavar="FROM:TO", help="only these seconds after the first event")
    other = "compare with a second timeline, phase by phase"
    add("--diff", metavar="OTHER", type=Path, help=other)


def window(words: str | None) -> tuple[float, float] | None:
    """Parse ``FROM:TO``, in seconds; either may be left out.

    Raises:
        UsageError: it is no such thing.
    """
    if words is None:
        return None
    low, colon, high = words.partition(":")
    try:
        edges = float(low or 0), float(high or math.inf)
    except ValueError:
        edges = (1.0, 0.0)
    if not colon or not edges[0] < edges[1]:
        raise UsageError(f"--slice {words}: give FROM:TO in seconds, such as 1.5:3")
    return edges


def run_verb(arguments: argparse.Namespace) -> Report:
    """Do what the command line says."""
    span = window(arguments.slice)
    with terminal.working(f"reading {printable(arguments.file)}"):
        return _read_and_report(arguments, span)


def _read_and_report(arguments: argparse.Namespace, span: tuple[float, float] | None) -> Report:
    recorder = Recorder() if arguments.html else None
    found, analysis = analyse(arguments.file, span, recorder)
    parts = [report.text(found)]
    if arguments.diff:
        other, _ = analyse(arguments.diff, span)
        found["diff"] = report.compare(found, other)
        parts = [report.comparison(found["diff"])]
    if recorder:
        from hvdtrain.commands.timeline.page import write

        write(arguments.html, found, analysis, recorder)
        page = printable(arguments.html)
        parts.append(message(f"{page}: the report and the trace; open it in a browser"))
    if arguments.repair:
        done = repair(arguments.file, arguments.repair, span)
        found["repaired"] = dataclasses.asdict(done)
        mended = (
            f"{printable(arguments.repair)}: {done.events:,} events written; {done.closed:,} bars "
            f"closed at the end, {done.dropped:,} events left out"
        )
        parts.append(message(mended))
    return Report("\n\n".join(parts), found)
