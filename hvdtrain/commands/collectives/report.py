"""Tables and plots of ``--time``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.commands.collectives.timing import BACKENDS, JobTimes, LibraryTimes
from hvdtrain.errors import HvdtrainError
from hvdtrain.system.output import plots
from hvdtrain.system.output.page import Section
from hvdtrain.system.output.tables import TitledTable, message
from hvdtrain.system.output.text import bandwidth, duration, plural, size

NAMES = {
    "mpi4py": "MPI (mpi4py)",
    "horovod": "Horovod",
    "gloo": "torch.distributed, Gloo",
    "nccl": "torch.distributed, NCCL",
}
COLUMNS = 3  # panels of timings side by side
PANEL = 3.4, 2.9  # inches


def time_text(times: JobTimes) -> str:
    """Return a table per collective and the failed measurements."""
    job = f"{plural(times.ranks, 'rank')} on {plural(times.hosts, 'host')}"
    parts = [f"{job}: median time of the slowest rank"]
    parts += [table.text for table in time_tables(times)]
    parts += ["\n".join(map(message, left_out(times)))] if left_out(times) else []
    return "\n\n".join(parts)


def time_section(times: JobTimes) -> Section:
    """Return the section of the page."""
    plot = plots.inline(time_figure(times))
    return Section("Duration", left_out(times), plot, time_tables(times))


def time_tables(times: JobTimes) -> list[TitledTable]:
    """Return a table per collective: a row per message size, then latency and bandwidth.

    Times of libraries after the first are followed by their ratio to the first library's.
    """
    tables = []
    for collective in _collectives(times):
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
        tables.append(TitledTable(collective, ["message", *(NAMES[name] for name in have)], rows))
    return tables


def check_measured(times: JobTimes) -> None:
    """Check that at least one measurement succeeded.

    Raises:
        HvdtrainError: no library could be measured.
    """
    if not any(entry.rows for entry in times.measured.values()):
        raise HvdtrainError(f"all measurements failed. {'; '.join(left_out(times))}")


def left_out(times: JobTimes) -> list[str]:
    """Return a line for each library and collective that could not be measured."""
    lines = []
    for name, entry in times.backends.items():
        if isinstance(entry, LibraryTimes):
            lines += [f"{NAMES[name]}, {kind}: {reason}" for kind, reason in entry.left_out.items()]
        else:
            lines.append(f"{NAMES[name]}: {entry.reason}")
    return lines


def time_figure(times: JobTimes) -> Any:
    """Return a panel per collective, time over size, as a matplotlib figure.

    Points are measurements; thin lines are the fits, latency + bytes / bandwidth.
    """
    from matplotlib import pyplot as plt

    plots.style()
    collectives = _collectives(times)
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
                handles[NAMES[name]] = _draw_times(panel, name, entry, collective)
        _size_axis(panel, [row.bytes for entry in times.measured.values() for row in entry.rows])
    for panel in axes[:, 0]:
        panel.set_ylabel("time")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    return figure


def _draw_times(panel: Any, name: str, entry: LibraryTimes, collective: str) -> Any:
    """Draw points and fit of a library; return the points."""
    rows, fit = entry.rows_of(collective), entry.fit_of(collective)
    sizes = [row.bytes for row in rows]
    style = plots.series(BACKENDS.index(name))
    seconds = [row.seconds for row in rows]
    (points,) = panel.plot(sizes, seconds, **{**style, "linestyle": ""}, label=NAMES[name])
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


def _collectives(times: JobTimes) -> list[str]:
    rows = [row for entry in times.measured.values() for row in entry.rows]
    return list(dict.fromkeys(row.collective for row in rows))


def _compared(times: Sequence[float]) -> list[str]:
    """Return each time as text, all but the first with the ratio to the first."""
    shown = [duration(times[0])]
    for seconds in times[1:]:
        ratio = seconds / times[0]
        shown.append(f"{duration(seconds)} ({ratio:.{2 if ratio < 10 else 0}f}x)")
    return shown
