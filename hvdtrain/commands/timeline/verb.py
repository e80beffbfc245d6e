"""``hvdtrain timeline``: analyse a Horovod timeline and report what takes the time."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdtrain.commands.timeline import report
from hvdtrain.commands.timeline.analyse import Recorder
from hvdtrain.commands.timeline.read import repair
from hvdtrain.commands.timeline.verdict import analyse
from hvdtrain.config.declare import argument, optional, switch
from hvdtrain.errors import UsageError
from hvdtrain.system.output import Report
from hvdtrain.system.output.plots import check_installed
from hvdtrain.system.output.tables import message
from hvdtrain.system.output.text import printable
from hvdtrain.system.runtime import terminal

EPILOG = """example:
  hvdtrain timeline timeline.json
  hvdtrain timeline timeline.json --html timeline.html --slice 10:20

Horovod writes a timeline to the file named by HOROVOD_TIMELINE, hvdtrain's
trainers to that of --timeline FILE. It shows which rank was late in every step
only with HOROVOD_CACHE_CAPACITY=0 (--timeline sets it)."""


@dataclass(frozen=True)
class TimelineOptions:
    """Options and arguments of ``hvdtrain timeline``."""

    file: Path = argument("timeline file, plain or gzipped", Path, metavar="FILE")
    html: Path | None = optional(
        "output file for an HTML page with report and trace", Path, metavar="OUT"
    )
    json: bool = switch("print the analysis as one JSON object")
    repair: Path | None = optional(
        "output file for the events as valid JSON, for chrome://tracing and Perfetto",
        Path,
        metavar="OUT",
    )
    slice: str | None = optional(
        "time range to analyse, in seconds after the first event (default: all)",
        metavar="FROM:TO",
    )
    diff: Path | None = optional("second timeline to compare with, by phase", Path, metavar="OTHER")


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


def run_verb(options: TimelineOptions) -> Report:
    """Run the command and return its report."""
    span = parse_slice(options.slice)
    if options.html:
        check_installed("--html")
        read = [path for path in (options.file, options.diff) if path and path.exists()]
        if options.html.exists() and any(path.samefile(options.html) for path in read):
            raise UsageError(
                f"--html {options.html}: is a file to read; specify another for the page"
            )
    recorder = Recorder() if options.html else None
    with terminal.working(f"reading {printable(options.file)}"):
        facts, analysis = analyse(options.file, span, recorder)
        data = asdict(facts)
        parts = [report.text(facts)]
        if options.diff:
            difference = report.compare(facts, analyse(options.diff, span)[0])
            data["diff"] = asdict(difference)
            parts = [report.comparison(difference)]
        if options.html and recorder:
            from hvdtrain.commands.timeline import trace_page
            from hvdtrain.system.output import page

            page.write(options.html, trace_page.render(facts, analysis, recorder))
            written = printable(options.html)
            parts.append(message(f"{written}: report and trace written; open it in a browser"))
        if options.repair:
            counts = repair(options.file, options.repair, span)
            data["repaired"] = asdict(counts)
            summary = (
                f"{printable(options.repair)}: {counts.events:,} events written; "
                f"{counts.closed:,} bars closed at the end, {counts.dropped:,} events dropped"
            )
            parts.append(message(summary))
    return Report("\n\n".join(parts), data)
