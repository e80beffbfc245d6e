"""``mpirun -n 4 python -m hvdtrain.collectives``: what collectives do, and how fast they are."""

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
from hvdtrain.config.options import number, positive
from hvdtrain.config.strategies import STRATEGIES
from hvdtrain.errors import EXIT_OK, UsageError
from hvdtrain.system.files import check_writable
from hvdtrain.system.machine.mpi_library import not_loaded
from hvdtrain.system.output.text import page
from hvdtrain.system.runtime.exit import run_and_exit
from hvdtrain.system.runtime.tuning import MPI_VARIABLES, keep_freed_memory, set_defaults

if TYPE_CHECKING:
    from hvdtrain.collectives.mpi4py import Mpi4py
    from hvdtrain.collectives.page import Section

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

{page("collectives")} explains what is shown."""
# Which of the switches each option needs.
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
    """What rank 0 shows: to people, to programs, on a page and as a plot."""

    text: str
    data: dict[str, Any]
    sections: Callable[[], Sequence[Section]]
    figure: Callable[[], Any] | None = field(default=None)


def build_parser() -> Parser:
    """Declare the options."""
    parser = Parser(
        "collectives",
        "Show what each collective does: what every rank holds before and after it.\n"
        "With --time measure how long each takes, with --study which way to allreduce is best.",
        EXAMPLE,
        USAGE,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures, too")
    what = parser.add_argument_group("what is measured").add_mutually_exclusive_group()
    what.add_argument(
        "--time", action="store_true", help="each collective, by message size and library"
    )
    what.add_argument(
        "--study", action="store_true", help="algorithms of allreduce, by message size and ranks"
    )
    add = parser.add_argument_group("how it is measured").add_argument
    for name, kind, metavar, told in (
        ("--sizes", _sizes, "BYTES,...", "of the messages, such as 4,1e6 (4 ... 64 MiB)"),
        (
            "--seconds",
            _above_zero,
            "S",
            "per size, for each collective (0.1), or the study (1)",
        ),
        ("--collectives", _words, "NAME,...", "with --time, these (all)"),
        ("--libraries", _words, "NAME,...", "with --time, of mpi4py, horovod, gloo, nccl (all)"),
        ("--ranks", _ranks, "N,...", "with --study, of the job's (2, 4, 8 ... and all)"),
        ("--gradient-mb", _megabytes, "MB", "with --study: a model's (102, ResNet-50)"),
        ("--plot", Path, "STEM", "write the plot as STEM.png and STEM.pdf"),
    ):
        add(name, type=kind, metavar=metavar, help=told)
    return parser


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        UsageError: an unknown option, a wrong value, or options that do not go together.
    """
    options = build_parser().read(arguments)
    for name, switches in BELONGS.items():
        if getattr(options, name) and not any(getattr(options, one) for one in switches):
            option, needed = name.replace("_", "-"), " or --".join(switches)
            raise UsageError(f"--{option} goes with --{needed}")
    return options


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


def _sizes(text: str) -> tuple[int, ...]:
    """Return message sizes, rising; at least a float32 each."""
    sizes = sorted({positive(word) for word in _words(text)})
    if sizes[0] < 4:
        raise ValueError(f"{sizes[0]} bytes are less than a float32, which has 4")
    return tuple(sizes)


def _ranks(text: str) -> tuple[int, ...]:
    counts = sorted({positive(word) for word in _words(text)})
    if counts[0] < 2:
        raise ValueError("one rank has nothing to reduce")
    return tuple(counts)


def _megabytes(text: str) -> int:
    """Return bytes, of 10^6 bytes each."""
    return round(1e6 * _above_zero(text))


def _above_zero(text: str) -> float:
    if not 0 < number(text) < float("inf"):
        raise ValueError(f"{text} is not a number above 0")
    return number(text)


def main() -> int:
    """Do what the command line asks for; rank 0 writes."""
    options = parse(sys.argv[1:])
    check_writable(options.html, "--html")
    check_writable(options.plot, "--plot")
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
    """Start MPI and return its ranks.

    Raises:
        UsageError: there is no MPI.
    """
    try:
        from hvdtrain.collectives.mpi4py import Mpi4py
    except (ImportError, RuntimeError) as error:  # RuntimeError: it finds no MPI library
        raise not_loaded(error) from error
    return Mpi4py()


def show_lesson(ranks: Mpi4py) -> Result:
    """Do each collective once on small arrays; all ranks together."""
    from hvdtrain.collectives import lesson

    outcomes = lesson.run_all(ranks.world)

    def sections() -> Sequence[Section]:
        from hvdtrain.collectives.page import lesson_section

        return [lesson_section(outcomes)]

    data = {"ranks": ranks.size, "lesson": [one.to_json() for one in outcomes]}
    return Result(lesson.text(outcomes), data, sections)


def measure_time(ranks: Mpi4py, options: argparse.Namespace) -> Result:
    """Time each collective of each library; all ranks together.

    Raises:
        UsageError: a collective or a library that is not known.
        HvdtrainError: no library could be measured.
    """
    from hvdtrain.collectives import bench, report
    from hvdtrain.collectives.lesson import COLLECTIVES

    collectives = _chosen(options.collectives, [one.name for one in COLLECTIVES], "--collectives")
    libraries = _chosen(options.libraries, bench.BACKENDS, "--libraries")
    found: dict[str, Any] = {"ranks": ranks.size, "hosts": hosts_of(ranks), "backends": {}}
    for name in libraries:
        found["backends"][name] = bench.measure(
            ranks, name, collectives, options.sizes or bench.SIZES, options.seconds or bench.SECONDS
        )
    ranks.on_root(lambda: report.check_measured(found))

    def sections() -> Sequence[Section]:
        from hvdtrain.collectives.page import Section

        tables, notes = report.time_tables(found), report.left_out(found)
        return [Section("How long each one takes", notes, report.time_figure(found), tables)]

    return Result(report.time_text(found), found, sections, lambda: report.time_figure(found))


def study_allreduce(ranks: Mpi4py, options: argparse.Namespace) -> Result:
    """Compare algorithms of allreduce; all ranks together.

    Raises:
        UsageError: more ranks are asked for than there are, or there is one.
        HvdtrainError: an algorithm sums wrongly.
    """
    from hvdtrain.collectives import study, study_report

    if ranks.size < 2:
        raise UsageError("--study needs 2 ranks or more: mpirun -n 4")
    counts = options.ranks or study.rank_counts(ranks.size)
    if counts[-1] > ranks.size:
        raise UsageError(f"--ranks {counts[-1]}: the job has {ranks.size}; mpirun -n {counts[-1]}")
    keep_freed_memory()  # our own algorithms take a buffer in each call
    found = study.measure(
        ranks.world,
        counts,
        options.sizes or study.SIZES,
        options.gradient_mb or study.GRADIENT,
        options.seconds or study.SECONDS,
    )

    def sections() -> Sequence[Section]:
        from hvdtrain.collectives.page import Section

        notes = [study_report.headline(found), *study_report.verdict(found)]
        plot, tables = study_report.figure(found), study_report.tables(found)
        return [Section("Which way to allreduce is best", notes, plot, tables)]

    text = study_report.text(found) if ranks.is_root else ""  # the rows are on rank 0
    return Result(text, found, sections, lambda: study_report.figure(found))


def hosts_of(ranks: Mpi4py) -> int:
    """Return on how many hosts the ranks are."""
    return len(set(ranks.gather(socket.gethostname().encode())))


def _chosen(asked: Sequence[str] | None, known: Sequence[str], option: str) -> Sequence[str]:
    """Return what was asked for, else all.

    Raises:
        UsageError: one of it is not known.
    """
    for name in asked or ():
        if name not in known:
            raise UsageError(f"{option} {name}: choose of {', '.join(known)}")
    return asked or known


def publish(result: Result, options: argparse.Namespace, size: int) -> None:
    """Write what was asked for, and print the result."""
    written: list[Path] = []
    if options.plot and result.figure:
        from hvdtrain.system.output import plots

        written += plots.save(result.figure(), options.plot)
    if options.html:
        from hvdtrain.collectives import page

        page.write(options.html, size, result.sections())
        written.append(options.html)
    text = "\n".join([result.text, *([""] if written else []), *map(str, written)])
    sys.stdout.write(f"{json.dumps(result.data) if options.json else text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run_and_exit(main)
