"""``mpirun -n 4 python -m hvdtrain.collectives``: demonstrate and time collectives."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.config.command_line import Parser
from hvdtrain.config.declare import add_options, declared, option
from hvdtrain.config.strategies import STRATEGIES
from hvdtrain.config.values import above_zero, counts, names
from hvdtrain.errors import EXIT_OK, UsageError
from hvdtrain.system.files import check_writable
from hvdtrain.system.machine import mpi_library
from hvdtrain.system.output.plots import check_installed
from hvdtrain.system.output.text import page, plural
from hvdtrain.system.runtime.tuning import MPI_VARIABLES, set_defaults

if TYPE_CHECKING:
    from hvdtrain.collectives.mpi4py import Mpi4py
    from hvdtrain.system.output.page import Section

USAGE = """
  mpirun -n N python -m hvdtrain.collectives [--json] [--html FILE]
  mpirun -n N python -m hvdtrain.collectives --time [options]"""
EXAMPLE = f"""\
examples:
  mpirun -n 3 python -m hvdtrain.collectives
  mpirun -n 4 python -m hvdtrain.collectives --html lesson.html
  mpirun -n 4 python -m hvdtrain.collectives --time \\
      --collectives allreduce,broadcast

{page("collectives")} explains the output."""
TEMPLATE = Path(__file__).with_name("page.html")


def message_sizes(text: str) -> tuple[int, ...]:
    """Read ascending message sizes, each at least a float32."""
    sizes = tuple(sorted(set(counts(text))))
    if sizes[0] < 4:
        raise ValueError(f"{sizes[0]} bytes: must be at least 4, a float32")
    return sizes


@dataclass(frozen=True)
class MeasurementOptions:
    """Options of ``--time``."""

    sizes: tuple[int, ...] = option(
        (),
        "message sizes, e.g. 4,1e6 (default: 4 B to 64 MiB)",
        message_sizes,
        metavar="BYTES,...",
        group="measurement options",
    )
    seconds: float = option(
        0.0, "seconds per size and collective (default: 0.1)", above_zero, metavar="S"
    )
    collectives: tuple[str, ...] = option(
        (), "collectives to time (default: all)", names, metavar="NAME,..."
    )
    libraries: tuple[str, ...] = option(
        (), "mpi4py, horovod, gloo, nccl (default: all)", names, metavar="NAME,..."
    )
    plot: Path | None = option(None, "write a plot to STEM.png and STEM.pdf", Path, metavar="STEM")


@dataclass(frozen=True)
class ProgramOutput:
    """Output of rank 0: text, JSON, section of the page, and plot."""

    text: str
    data: dict[str, object]
    section: Callable[[], Section]
    figure: Callable[[], Any] | None = None


def build_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="python -m hvdtrain.collectives",
        usage=USAGE,
        description="Demonstrate collectives: the data of every rank before and after each.\n"
        "With --time measure their duration.",
        epilog=EXAMPLE,
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="HTML file for a page with diagrams"
    )
    parser.add_argument(
        "--time", action="store_true", help="time each collective by message size and library"
    )
    add_options(parser, MeasurementOptions)
    return parser


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        UsageError: unknown option, invalid value, or options that cannot be combined.
    """
    options = build_parser().read(arguments)
    for field in declared(MeasurementOptions):
        if getattr(options, field.name) and not options.time:
            raise UsageError(f"--{field.name} needs --time")
    return options


def main() -> int:
    """Run the command line on all ranks; rank 0 writes the result."""
    options = parse(sys.argv[1:])
    for path, name in ((options.html, "--html"), (options.plot, "--plot")):
        check_writable(path, name)
        if path:
            check_installed(name)
    set_defaults(MPI_VARIABLES)
    if options.time:
        for strategy in STRATEGIES.values():
            set_defaults(strategy.variables(os.environ, short_steps=False))
    ranks = connect()
    result = measure_time(ranks, options) if options.time else show_lesson(ranks)
    ranks.on_root(lambda: publish(result, options, ranks.size))
    return EXIT_OK


def connect() -> Mpi4py:
    """Initialize MPI and return its communicator.

    Raises:
        UsageError: there is no MPI library.
    """
    with mpi_library.required():
        from hvdtrain.collectives.mpi4py import Mpi4py
    return Mpi4py()


def show_lesson(ranks: Mpi4py) -> ProgramOutput:
    """Perform each collective once on small arrays; all ranks together."""
    from hvdtrain.commands.collectives import lesson

    outcomes = lesson.run_all(ranks)
    data = {"ranks": ranks.size, "lesson": [outcome.to_json() for outcome in outcomes]}
    return ProgramOutput(lesson.text(outcomes), data, partial(lesson.section, outcomes))


def measure_time(ranks: Mpi4py, options: argparse.Namespace) -> ProgramOutput:
    """Time each collective of each library; all ranks together.

    Raises:
        UsageError: unknown collective or library.
        HvdtrainError: no library could be measured.
    """
    from hvdtrain.commands.collectives import report, timing
    from hvdtrain.commands.collectives.lesson import COLLECTIVES

    known = [collective.name for collective in COLLECTIVES]
    collectives = _chosen(options.collectives, known, "--collectives")
    sizes, seconds = options.sizes or timing.SIZES, options.seconds or timing.SECONDS
    backends = {
        name: timing.measure(ranks, name, collectives, sizes, seconds)
        for name in _chosen(options.libraries, timing.BACKENDS, "--libraries")
    }
    hosts = len(set(ranks.gather(socket.gethostname().encode())))
    times = timing.JobTimes(ranks.size, hosts, backends)
    ranks.on_root(lambda: report.check_measured(times))
    return ProgramOutput(
        report.time_text(times),
        asdict(times),
        partial(report.time_section, times),
        partial(report.time_figure, times),
    )


def _chosen(requested: Sequence[str] | None, known: Sequence[str], option: str) -> Sequence[str]:
    """Return the requested names, else all.

    Raises:
        UsageError: unknown name.
    """
    for name in requested or ():
        if name not in known:
            raise UsageError(f"{option} {name}: choose of {', '.join(known)}")
    return requested or known


def publish(result: ProgramOutput, options: argparse.Namespace, size: int) -> None:
    """Write plot and page if requested, and print the result."""
    written: list[Path] = []
    if options.plot and result.figure:
        from hvdtrain.system.output import plots

        written += plots.save(result.figure(), options.plot)
    if options.html:
        from hvdtrain.system.output.page import render, write

        html = render(TEMPLATE, subject="", ranks=plural(size, "rank"), part=result.section())
        write(options.html, html)
        written.append(options.html)
    text = "\n".join([result.text, *([""] if written else []), *map(str, written)])
    sys.stdout.write(f"{json.dumps(result.data) if options.json else text}\n")
    sys.stdout.flush()
