"""``hvdtrain timeline``: analyse a Horovod timeline and report what takes the time."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hvdtrain.commands.timeline import report
from hvdtrain.commands.timeline.analyse import Recorder
from hvdtrain.commands.timeline.read import repair
from hvdtrain.commands.timeline.verdict import analyse
from hvdtrain.errors import UsageError
from hvdtrain.system.output import Report
from hvdtrain.system.output.plots import check_installed
from hvdtrain.system.output.tables import message
from hvdtrain.system.output.text import printable
from hvdtrain.system.runtime import terminal

EXAMPLE = """example:
  hvdtrain timeline timeline.json
  hvdtrain timeline timeline.json --html timeline.html --slice 10:20

Horovod writes a timeline to the file named by HOROVOD_TIMELINE, hvdtrain's
trainers to that of --timeline FILE. It shows which rank was late in every step
only with HOROVOD_CACHE_CAPACITY=0 (--timeline sets it)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.epilog = EXAMPLE
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help="timeline file, plain or gzipped")
    html_help = "output file for an HTML page with report and trace"
    add("--html", metavar="OUT", type=Path, help=html_help)
    add("--json", action="store_true", help="print the analysis as one JSON object")
    repair_help = "output file for the events as valid JSON, for chrome://tracing and Perfetto"
    add("--repair", metavar="OUT", type=Path, help=repair_help)
    slice_help = "time range to analyse, in seconds after the first event (default: all)"
    add("--slice", metavar="FROM:TO", help=slice_help)
    add("--diff", metavar="OTHER", type=Path, help="second timeline to compare with, by phase")


def parse_slice(text: str | None) -> tuple[float, float] | None:
    """Parse ``FROM:TO``, in seconds; either may be omitted.

    Raises:
        UsageError: ``text`` has another form, or an empty range.
    """
    if text is None:
        return None
    low, colon, high = text.partition(":")
    try:
        edges = float(low or 0), float(high or math.inf)
    except ValueError:
        edges = (1.0, 0.0)
    if not colon or not edges[0] < edges[1]:
        raise UsageError(f"--slice {text}: must be FROM:TO in seconds, e.g. 1.5:3")
    return edges


def _check_page(page: Path, inputs: Sequence[Path | None]) -> None:
    """Raise ``UsageError`` if the page would replace a file that is read."""
    if page.exists() and any(path and path.exists() and path.samefile(page) for path in inputs):
        raise UsageError(f"--html {page}: is a file to read; specify another for the page")


def run_verb(arguments: argparse.Namespace) -> Report:
    """Run the command and return its report."""
    span = parse_slice(arguments.slice)
    if arguments.html:
        check_installed("--html")
        _check_page(arguments.html, [arguments.file, arguments.diff])
    recorder = Recorder() if arguments.html else None
    with terminal.working(f"reading {printable(arguments.file)}"):
        facts, analysis = analyse(arguments.file, span, recorder)
        data = asdict(facts)
        parts = [report.text(facts)]
        if arguments.diff:
            difference = report.compare(facts, analyse(arguments.diff, span)[0])
            data["diff"] = asdict(difference)
            parts = [report.comparison(difference)]
        if recorder:
            from hvdtrain.commands.timeline import trace_page
            from hvdtrain.system.output import page

            page.write(arguments.html, trace_page.render(facts, analysis, recorder))
            written = printable(arguments.html)
            parts.append(message(f"{written}: report and trace written; open it in a browser"))
        if arguments.repair:
            counts = repair(arguments.file, arguments.repair, span)
            data["repaired"] = asdict(counts)
            summary = (
                f"{printable(arguments.repair)}: {counts.events:,} events written; "
                f"{counts.closed:,} bars closed at the end, {counts.dropped:,} events dropped"
            )
            parts.append(message(summary))
    return Report("\n\n".join(parts), data)
