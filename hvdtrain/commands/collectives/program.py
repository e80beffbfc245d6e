"""``mpirun -n 4 python -m hvdtrain.collectives``: demonstrate and time collectives."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.commands.collectives import lesson, timing
from hvdtrain.commands.collectives.timing import BACKENDS, JobTimes, LibraryTimes
from hvdtrain.config.checks import check, of_fields
from hvdtrain.config.command_line import Parser
from hvdtrain.config.declare import add_options, from_namespace, optional, switch
from hvdtrain.config.strategies import STRATEGIES
from hvdtrain.config.values import above_zero, counts, names
from hvdtrain.errors import EXIT_OK, UsageError
from hvdtrain.system.files import check_writable
from hvdtrain.system.machine import mpi_library
from hvdtrain.system.output import plots
from hvdtrain.system.output.page import Section, render, write
from hvdtrain.system.output.tables import Table, message
from hvdtrain.system.output.text import bandwidth, duration, page, plural, size
from hvdtrain.system.runtime.tuning import MPI_VARIABLES, set_defaults

if TYPE_CHECKING:
    from hvdtrain.collectives.mpi4py import Mpi4py

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
COLUMNS = 3  # panels of timings side by side
PANEL = 3.4, 2.9  # inches


def message_sizes(text: str) -> tuple[int, ...]:
    """Read ascending message sizes, each at least a float32."""
    sizes = tuple(sorted(set(counts(text))))
    if sizes[0] < 4:
        raise ValueError(f"{sizes[0]} bytes: must be at least 4, a float32")
    return sizes


_measured = partial(optional, group="measurement options", needs="--time")


@dataclass(frozen=True)
class CollectivesOptions:
    """CollectivesOptions of the program; None: not given."""

    json: bool = switch("print the result as JSON")
    html: Path | None = optional("HTML file for a page with diagrams", Path, metavar="FILE")
    time: bool = switch("time each collective by message size and library")
    sizes: tuple[int, ...] | None = _measured(
        "message sizes, e.g. 4,1e6 (default: 4 B to 64 MiB)", message_sizes, metavar="BYTES,..."
    )
    seconds: float | None = _measured(
        "seconds per size and collective (default: 0.1)", above_zero, metavar="S"
    )
    collectives: tuple[str, ...] | None = _measured(
        "collectives to time (default: all)", names, metavar="NAME,..."
    )
    libraries: tuple[str, ...] | None = _measured(
        "mpi4py, horovod, gloo, nccl (default: all)", names, metavar="NAME,..."
    )
    plot: Path | None = _measured("write a plot to STEM.png and STEM.pdf", Path, metavar="STEM")


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
    add_options(parser, CollectivesOptions)
    return parser


def main() -> int:
    """Run the command line on all ranks; rank 0 writes the result."""
    options = from_namespace(CollectivesOptions, build_parser().read(sys.argv[1:]))
    check(of_fields(options))
    for path, name in ((options.html, "--html"), (options.plot, "--plot")):
        check_writable(path, name)
        if path:
            plots.check_installed(name)
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
    outcomes = lesson.run_all(ranks)
    data = {"ranks": ranks.size, "lesson": [outcome.to_json() for outcome in outcomes]}
    return ProgramOutput(lesson.text(outcomes), data, partial(lesson.section, outcomes))


def measure_time(ranks: Mpi4py, options: CollectivesOptions) -> ProgramOutput:
    """Time each collective of each library; all ranks together.

    Raises:
        UsageError: unknown collective or library.
        HvdtrainError: no library could be measured.
    """
    known = [collective.name for collective in lesson.COLLECTIVES]
    collectives = _chosen(options.collectives, known, "--collectives")
    sizes, seconds = options.sizes or timing.SIZES, options.seconds or timing.SECONDS
    backends = {
        name: timing.measure(ranks, name, collectives, sizes, seconds)
        for name in _chosen(options.libraries, list(BACKENDS), "--libraries")
    }
    hosts = len(set(ranks.gather(socket.gethostname().encode())))
    times = JobTimes(ranks.size, hosts, backends)
    ranks.on_root(times.check)
    return time_output(times)


def _chosen(requested: Sequence[str] | None, known: Sequence[str], option: str) -> Sequence[str]:
    """Return the requested names, else all.

    Raises:
        UsageError: unknown name.
    """
    for name in requested or ():
        if name not in known:
            raise UsageError(f"{option} {name}: choose from {', '.join(known)}")
    return requested or known


def publish(result: ProgramOutput, options: CollectivesOptions, size: int) -> None:
    """Write plot and page if requested, and print the result."""
    written: list[Path] = []
    if options.plot and result.figure:
        written += plots.save(result.figure(), options.plot)
    if options.html:
        html = render(TEMPLATE, subject="", ranks=plural(size, "rank"), part=result.section())
        write(options.html, html)
        written.append(options.html)
    text = "\n".join([result.text, *([""] if written else []), *map(str, written)])
    sys.stdout.write(f"{json.dumps(result.data) if options.json else text}\n")
    sys.stdout.flush()


def time_output(times: JobTimes) -> ProgramOutput:
    """Return a table per collective, the failed measurements, and a plot."""
    tables, figure = time_tables(times), partial(time_figure, times)
    job = f"{plural(times.ranks, 'rank')} on {plural(times.hosts, 'host')}"
    parts = [f"{job}: median time of the slowest rank", *(table.text for table in tables)]
    parts += ["\n".join(map(message, times.left_out))] if times.left_out else []
    return ProgramOutput(
        "\n\n".join(parts),
        asdict(times),
        lambda: Section("Duration", times.left_out, plots.inline(figure()), tables),
        figure,
    )


def time_tables(times: JobTimes) -> list[Table]:
    """Return a table per collective: a row per message size, then latency and bandwidth.

    Times of libraries after the first are followed by their ratio to the first library's.
    """
    tables = []
    for collective in times.collectives:
        have = {n: entry for n, entry in times.measured.items() if entry.rows_of(collective)}
        by_size = zip(*(entry.rows_of(collective) for entry in have.values()), strict=True)
        rows = [
            [size(same[0].bytes), *_compared([row.seconds for row in same])] for same in by_size
        ]
        fits = [entry.fit_of(collective) for entry in have.values()]
        latencies = [fit.latency_seconds for fit in fits]
        rows.append(["latency", *(duration(latency) if latency else "-" for latency in latencies)])
        rates = [fit.bytes_per_second for fit in fits]
        rows.append(["bandwidth", *(bandwidth(rate) if rate else "-" for rate in rates)])
        tables.append(Table(collective, ["message", *(BACKENDS[name] for name in have)], rows))
    return tables


def time_figure(times: JobTimes) -> Any:
    """Return a panel per collective, time over size, as a matplotlib figure.

    Points are measurements; thin lines are the fits, latency + bytes / bandwidth.
    """
    from matplotlib import pyplot as plt

    plots.style()
    collectives = times.collectives
    columns = min(COLUMNS, len(collectives))
    lines = -(-len(collectives) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(PANEL[0] * columns, PANEL[1] * lines), squeeze=False, sharey=True
    )
    for panel in axes.flat[len(collectives) :]:
        panel.set_axis_off()
    handles = {}
    for panel, collective in zip(axes.flat, collectives, strict=False):
        panel.set_title(collective)
        for name, entry in times.measured.items():
            if entry.rows_of(collective):
                handles[BACKENDS[name]] = _draw_times(panel, name, entry, collective)
        _size_axis(panel, [row.bytes for entry in times.measured.values() for row in entry.rows])
    for panel in axes[:, 0]:
        panel.set_ylabel("time")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    return figure


def _draw_times(panel: Any, name: str, entry: LibraryTimes, collective: str) -> Any:
    """Draw points and fit of a library; return the points."""
    rows, fit = entry.rows_of(collective), entry.fit_of(collective)
    sizes = [row.bytes for row in rows]
    style = plots.series(list(BACKENDS).index(name))
    seconds = [row.seconds for row in rows]
    (points,) = panel.plot(sizes, seconds, **{**style, "linestyle": ""}, label=BACKENDS[name])
    per_byte = 1 / fit.bytes_per_second if fit.bytes_per_second else 0.0
    dense = [sizes[0] * (sizes[-1] / sizes[0]) ** (step / 40) for step in range(41)]
    modelled = [fit.latency_seconds + nbytes * per_byte for nbytes in dense]
    panel.plot(dense, modelled, color=style["color"], linewidth=1)
    return points


def _size_axis(panel: Any, sizes: Sequence[int]) -> None:
    """Set logarithmic axes of bytes and seconds with readable units."""
    from matplotlib import ticker

    panel.set_xscale("log")
    panel.set_yscale("log")
    first, last = min(sizes), max(sizes)
    marks = [mark for mark in (4, 2**10, 2**16, 2**22) if first <= mark <= last]
    panel.set_xticks(marks, [size(mark).replace(".0", "") for mark in marks])
    panel.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _tick(value)))
    panel.minorticks_off()
    panel.set_xlabel("message")


def _tick(seconds: float) -> str:
    """Return the label of a tick, e.g. ``10 µs``."""
    number, unit = duration(seconds).split()
    return f"{float(number):g} {unit}"


def _compared(times: Sequence[float]) -> list[str]:
    """Return each time as text, all but the first with the ratio to the first."""
    shown = [duration(times[0])]
    for seconds in times[1:]:
        ratio = seconds / times[0]
        shown.append(f"{duration(seconds)} ({ratio:.{2 if ratio < 10 else 0}f}x)")
    return shown
