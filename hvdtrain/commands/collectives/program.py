"""``mpirun -n 4 python -m hvdtrain.collectives``: demonstrate and time collectives."""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.config.command_line import Parser
from hvdtrain.config.strategies import STRATEGIES
from hvdtrain.config.values import number, positive
from hvdtrain.errors import EXIT_OK, UsageError
from hvdtrain.system.files import check_writable
from hvdtrain.system.machine.mpi_library import not_loaded
from hvdtrain.system.output.plots import check_installed
from hvdtrain.system.output.text import page
from hvdtrain.system.runtime.tuning import MPI_VARIABLES, keep_freed_memory, set_defaults

if TYPE_CHECKING:
    from hvdtrain.collectives.mpi4py import Mpi4py
    from hvdtrain.commands.collectives.page import Section

USAGE = """
  mpirun -n N python -m hvdtrain.collectives [--json] [--html FILE]
  mpirun -n N python -m hvdtrain.collectives --time [options]
  mpirun -n N python -m hvdtrain.collectives --study [options]"""
EXAMPLE = f"""\
examples:
  mpirun -n 3 python -m hvdtrain.collectives
  mpirun -n 4 python -m hvdtrain.collectives --html lesson.html
  mpirun -n 4 python -m hvdtrain.collectives --time --collectives allreduce,broadcast
  mpirun -n 4 python -m hvdtrain.collectives --study --gradient-mb 45 --html study.html

{page("collectives")} explains the output."""
# Switches of which each option needs one.
BELONGS = {
    "collectives": ("time",),
    "libraries": ("time",),
    "ranks": ("study",),
    "gradient_mb": ("study",),
    "sizes": ("time", "study"),
    "seconds": ("time", "study"),
    "plot": ("time", "study"),
}


@dataclass(frozen=True)
class Result:
    """Output of rank 0: text, JSON, sections of the page, and plot."""

    text: str
    data: dict[str, Any]
    sections: Callable[[], Sequence[Section]]
    figure: Callable[[], Any] | None = field(default=None)


def build_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "collectives",
        "Demonstrate collectives: the data of every rank before and after each.\n"
        "With --time measure their duration, with --study compare allreduce algorithms.",
        EXAMPLE,
        USAGE,
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="HTML file for a page with diagrams"
    )
    mode = parser.add_argument_group("measurements").add_mutually_exclusive_group()
    mode.add_argument(
        "--time", action="store_true", help="time each collective by message size and library"
    )
    mode.add_argument(
        "--study",
        action="store_true",
        help="compare allreduce algorithms by message size and number of ranks",
    )
    add = parser.add_argument_group("measurement options").add_argument
    for name, kind, metavar, text in (
        ("--sizes", _sizes, "BYTES,...", "message sizes, e.g. 4,1e6 (default: 4 B to 64 MiB)"),
        (
            "--seconds",
            _above_zero,
            "S",
            "seconds per size and collective (default: 0.1), or per size in a study (default: 1)",
        ),
        ("--collectives", _words, "NAME,...", "collectives to time (default: all)"),
        ("--libraries", _words, "NAME,...", "mpi4py, horovod, gloo, nccl (default: all)"),
        ("--ranks", _ranks, "N,...", "numbers of ranks to study (default: 2, 4, 8 ... and all)"),
        ("--gradient-mb", _megabytes, "MB", "gradient size to study (default: 102, ResNet-50)"),
        ("--plot", Path, "STEM", "write a plot to STEM.png and STEM.pdf"),
    ):
        add(name, type=kind, metavar=metavar, help=text)
    return parser


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        UsageError: unknown option, invalid value, or options that cannot be combined.
    """
    options = build_parser().read(arguments)
    for name, switches in BELONGS.items():
        if getattr(options, name) and not any(getattr(options, switch) for switch in switches):
            option, needed = name.replace("_", "-"), " or --".join(switches)
            raise UsageError(f"--{option} needs --{needed}")
    return options


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


def _sizes(text: str) -> tuple[int, ...]:
    """Return ascending message sizes, each at least a float32."""
    sizes = sorted({positive(word) for word in _words(text)})
    if sizes[0] < 4:
        raise ValueError(f"{sizes[0]} bytes: must be at least 4, a float32")
    return tuple(sizes)


def _ranks(text: str) -> tuple[int, ...]:
    counts = sorted({positive(word) for word in _words(text)})
    if counts[0] < 2:
        raise ValueError("must be at least 2 ranks")
    return tuple(counts)


def _megabytes(text: str) -> int:
    """Return bytes from a number of megabytes (10^6 bytes)."""
    return round(1e6 * _above_zero(text))


def _above_zero(text: str) -> float:
    if not 0 < number(text) < float("inf"):
        raise ValueError(f"{text} is not a number above 0")
    return number(text)


def main() -> int:
    """Run the command line on all ranks; rank 0 writes the result."""
    options = parse(sys.argv[1:])
    for path, option in ((options.html, "--html"), (options.plot, "--plot")):
        check_writable(path, option)
        if path:
            check_installed(option)
    set_defaults(MPI_VARIABLES)
    if options.time:
        for strategy in STRATEGIES.values():
            set_defaults(strategy.environment)
    ranks = connect()
    if options.time:
        result = measure_time(ranks, options)
    else:
        result = study_allreduce(ranks, options) if options.study else show_lesson(ranks)
    ranks.on_root(lambda: publish(result, options, ranks.size))
    return EXIT_OK


def connect() -> Mpi4py:
    """Initialize MPI and return its communicator.

    Raises:
        UsageError: there is no MPI library.
    """
    try:
        from hvdtrain.collectives.mpi4py import Mpi4py
    except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library
        raise not_loaded(error) from error
    return Mpi4py()


def show_lesson(ranks: Mpi4py) -> Result:
    """Perform each collective once on small arrays; all ranks together."""
    from hvdtrain.commands.collectives import lesson

    outcomes = lesson.run_all(ranks.world)

    def sections() -> Sequence[Section]:
        from hvdtrain.commands.collectives.page import lesson_section

        return [lesson_section(outcomes)]

    data = {"ranks": ranks.size, "lesson": [outcome.to_json() for outcome in outcomes]}
    return Result(lesson.text(outcomes), data, sections)


def measure_time(ranks: Mpi4py, options: argparse.Namespace) -> Result:
    """Time each collective of each library; all ranks together.

    Raises:
        UsageError: unknown collective or library.
        HvdtrainError: no library could be measured.
    """
    from hvdtrain.commands.collectives import report, timing
    from hvdtrain.commands.collectives.lesson import COLLECTIVES

    names = [collective.name for collective in COLLECTIVES]
    collectives = _chosen(options.collectives, names, "--collectives")
    libraries = _chosen(options.libraries, timing.BACKENDS, "--libraries")
    measured: dict[str, Any] = {"ranks": ranks.size, "hosts": hosts_of(ranks), "backends": {}}
    for name in libraries:
        measured["backends"][name] = timing.measure(
            ranks,
            name,
            collectives,
            options.sizes or timing.SIZES,
            options.seconds or timing.SECONDS,
        )
    ranks.on_root(lambda: report.check_measured(measured))

    def sections() -> Sequence[Section]:
        from hvdtrain.commands.collectives.page import Section

        tables, notes = report.time_tables(measured), report.left_out(measured)
        return [Section("Duration", notes, report.time_figure(measured), tables)]

    return Result(
        report.time_text(measured), measured, sections, lambda: report.time_figure(measured)
    )


def study_allreduce(ranks: Mpi4py, options: argparse.Namespace) -> Result:
    """Compare allreduce algorithms; all ranks together.

    Raises:
        UsageError: more ranks are requested than the job has, or it has one.
        HvdtrainError: an algorithm gives a wrong sum.
    """
    from hvdtrain.commands.collectives import study, study_report

    if ranks.size < 2:
        raise UsageError("--study needs 2 ranks or more: mpirun -n 4")
    counts = options.ranks or study.rank_counts(ranks.size)
    if counts[-1] > ranks.size:
        raise UsageError(f"--ranks {counts[-1]}: the job has {ranks.size}; mpirun -n {counts[-1]}")
    keep_freed_memory()  # hvdtrain's algorithms allocate a buffer in each call
    measured = study.measure(
        ranks.world,
        counts,
        options.sizes or study.SIZES,
        options.gradient_mb or study.GRADIENT,
        options.seconds or study.SECONDS,
    )

    def sections() -> Sequence[Section]:
        from hvdtrain.commands.collectives.page import Section

        notes = [study_report.headline(measured), *study_report.verdict(measured)]
        plot, tables = study_report.figure(measured), study_report.tables(measured)
        return [Section("Allreduce algorithms", notes, plot, tables)]

    text = study_report.text(measured) if ranks.is_root else ""  # the rows are on rank 0
    return Result(text, measured, sections, lambda: study_report.figure(measured))


def hosts_of(ranks: Mpi4py) -> int:
    """Return the number of hosts."""
    return len(set(ranks.gather(socket.gethostname().encode())))


def _chosen(requested: Sequence[str] | None, known: Sequence[str], option: str) -> Sequence[str]:
    """Return the requested names, else all.

    Raises:
        UsageError: unknown name.
    """
    for name in requested or ():
        if name not in known:
            raise UsageError(f"{option} {name}: choose of {', '.join(known)}")
    return requested or known


def publish(result: Result, options: argparse.Namespace, size: int) -> None:
    """Write plot and page if requested, and print the result."""
    written: list[Path] = []
    if options.plot and result.figure:
        from hvdtrain.system.output import plots

        written += plots.save(result.figure(), options.plot)
    if options.html:
        from hvdtrain.commands.collectives import page

        page.write(options.html, size, result.sections())
        written.append(options.html)
    text = "\n".join([result.text, *([""] if written else []), *map(str, written)])
    sys.stdout.write(f"{json.dumps(result.data) if options.json else text}\n")
    sys.stdout.flush()
