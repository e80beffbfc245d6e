"""``hvdtrain timeline``: read a Horovod timeline and tell what takes the time."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import time
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.timeline import diff, report
from hvdtrain.timeline.analyse import Analysis
from hvdtrain.timeline.bars import NEGOTIATE
from hvdtrain.timeline.facts import Facts, facts
from hvdtrain.timeline.read import Reading
from hvdtrain.timeline.recorder import Recorder
from hvdtrain.timeline.repair import repair
from hvdtrain.timeline.sequence import timeline
from hvdtrain.timeline.units import printable
from hvdtrain.timeline.verdict import verdict
from hvdtrain.verb import Report

log = logging.getLogger(__name__)

EXAMPLE = """example:
  hvdtrain timeline timeline.json
  hvdtrain timeline timeline.json --html timeline.html --slice 10:20

A timeline is what Horovod writes where HOROVOD_TIMELINE names a file, and our trainers by
--timeline FILE. Only with HOROVOD_CACHE_CAPACITY=0 (--timeline sets it) does it show for every step
which rank was late."""

PATIENCE = 5.0  # seconds between two words about a file that takes long


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the verb."""
    parser.epilog = EXAMPLE
    parser.add_argument("file", metavar="FILE", type=Path, help="timeline, gzipped or not")
    parser.add_argument("--html", metavar="OUT", type=Path, help="write a page: report and trace")
    parser.add_argument("--json", action="store_true", help="print the whole analysis as JSON")
    parser.add_argument(
        "--repair",
        metavar="OUT",
        type=Path,
        help="write the events as valid JSON, for chrome://tracing and Perfetto",
    )
    parser.add_argument(
        "--slice", metavar="FROM:TO", help="only these seconds after the first event"
    )
    parser.add_argument(
        "--diff", metavar="OTHER", type=Path, help="compare with a second timeline, phase by phase"
    )


def window(words: str | None) -> tuple[float, float] | None:
    """``FROM:TO`` in seconds; either may be left out.

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


def analyse(
    path: Path, span: tuple[float, float] | None = None, recorder: Recorder | None = None
) -> tuple[Facts, Analysis]:
    """The facts of the timeline at ``path``, with the verdict; ``recorder`` is told of all bars.

    Raises:
        UsageError: it cannot be read, or is no timeline of Horovod's.
    """
    reading, analysis = Reading(path), Analysis(recorder)
    spoken = time.monotonic()
    for events in timeline(reading, span):
        analysis.feed(events)
        if time.monotonic() - spoken > PATIENCE:
            spoken = time.monotonic()
            log.info("%s: %.0f of %.0f MB", path, reading.position / 1e6, path.stat().st_size / 1e6)
    analysis.finish()
    negotiated = any(phase.kind == NEGOTIATE for phase in analysis.rows.phases.values())
    horovods = reading.files or negotiated or analysis.cycle is not None or span
    if analysis.events and not horovods:
        raise UsageError(f"{path} holds trace events, but none of Horovod's: another tool wrote it")
    found = facts(reading, analysis, span)
    return {**found, "verdict": verdict(found)}, analysis


def run_verb(arguments: argparse.Namespace) -> Report:
    """Do what the command line says."""
    span = window(arguments.slice)
    recorder = Recorder() if arguments.html else None
    found, analysis = analyse(arguments.file, span, recorder)
    parts = [report.text(found)]
    if arguments.diff:
        other, _ = analyse(arguments.diff, span)
        found["diff"] = diff.compare(found, other)
        parts = [diff.text(found["diff"])]
    if recorder:
        from hvdtrain.timeline.page import write

        write(arguments.html, found, analysis, recorder)
        parts.append(f"{printable(arguments.html)}: the report and the trace; open it in a browser")
    if arguments.repair:
        done = repair(arguments.file, arguments.repair, span)
        found["repaired"] = dataclasses.asdict(done)
        parts.append(
            f"{printable(arguments.repair)}: {done.events:,} events written; {done.closed:,} bars "
            f"closed at the end, {done.dropped:,} events left out"
        )
    return Report("\n\n".join(parts), found)
