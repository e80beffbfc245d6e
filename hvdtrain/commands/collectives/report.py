"""Tables and plots of ``--time`` and ``--study``, and the possible saving for a training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.collectives.cost import RABENSEIFNER, RECURSIVE_DOUBLING, RING, Link
from hvdtrain.commands.collectives.algorithms import MPI_CHOICE, OPEN_MPI, OWN, AllreduceStudy
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
MANY = (16, 64, 256, 1024, 4096)  # ranks in the estimate
SMALL = 16 * 2**10  # bytes of the estimate in addition to the gradients


# Times of the collectives of each library


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


# The study of allreduce algorithms


def study_text(study: AllreduceStudy) -> str:
    """Return the tables with their titles, then the verdict."""
    parts = [message(headline(study)), *(table.text for table in study_tables(study))]
    return "\n\n".join([*parts, "\n".join(map(message, verdict(study)))])


def study_section(study: AllreduceStudy) -> Section:
    """Return the section of the page."""
    plot = plots.inline(study_figure(study))
    notes = [headline(study), *verdict(study)]
    return Section("Allreduce algorithms", notes, plot, study_tables(study))


def headline(study: AllreduceStudy) -> str:
    """Return numbers of ranks, hosts and cores as text."""
    job = f"{plural(study.ranks, 'rank')} on {plural(study.hosts, 'host')}"
    line = f"allreduce, {job} with {plural(study.cores, 'core')} in total"
    if study.ranks > study.cores:
        line += ": oversubscribed, so times depend on the cores, not on the links"
    return line


def study_tables(study: AllreduceStudy) -> list[TitledTable]:
    """Return the best algorithms, ratios for each number of ranks, and the estimates."""
    tables = [_best_table(study), *(_ratio_table(study, ranks) for ranks in study.counts)]
    link = study.link
    if link and link.bytes_per_second:
        model = Link(link.latency_seconds, 1 / link.bytes_per_second)
        tables += [_estimate_table(study, model, size) for size in (SMALL, study.gradient_bytes)]
    return tables


def verdict(study: AllreduceStudy) -> list[str]:
    """Return the saving per step by the best selectable algorithm, for each number of ranks."""
    gradients = _message(study, study.gradient_bytes)
    lines = []
    for ranks in study.counts:
        rows = study.rows_of(ranks, study.gradient_bytes)
        usual = rows[MPI_CHOICE].seconds
        selectable = [rows[name] for name in study.names(OPEN_MPI)]
        first = min(selectable, key=lambda row: row.ratio, default=None)
        line = f"{plural(ranks, 'rank')}: gradients of {gradients} take {duration(usual)}."
        if first and first.ratio_high < 1:
            words = study.algorithms[first.algorithm].variables.items()
            line += (
                f" With {first.algorithm} MPI takes {first.ratio:.2f} of that, saving up to "
                f"{duration(usual * (1 - first.ratio))} per step: "
                + " ".join(f"{name}={value}" for name, value in words)
            )
        else:
            line += " No selectable algorithm is faster than MPI's choice."
        lines.append(line)
    return [*lines, *study.notes]


def study_figure(study: AllreduceStudy) -> Any:
    """Return the ratios over size as a matplotlib figure.

    A column of panels per number of ranks: Open MPI's algorithms above, hvdtrain's below.
    """
    from matplotlib import pyplot as plt

    plots.style()
    counts = study.counts
    origins = [origin for origin in (OPEN_MPI, OWN) if study.names(origin)]
    wide, high = PANEL[0] * len(counts), (PANEL[1] + 0.1) * len(origins) + 0.6
    figure, axes = plt.subplots(
        len(origins), len(counts), figsize=(wide, high), squeeze=False, sharex=True, sharey="row"
    )
    for line, origin in zip(axes, origins, strict=True):
        for panel, ranks in zip(line, counts, strict=True):
            _draw_ratios(panel, study, origin, ranks)
            panel.set_title(plural(ranks, "rank"))
        line[0].set_ylabel(f"{origin}: time, MPI's choice = 1")
        # A legend per row, as the rows show different algorithms.
        line[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    for panel in axes[:-1].flat:
        panel.set_xlabel("")
    return figure


def _draw_ratios(panel: Any, study: AllreduceStudy, origin: str, ranks: int) -> None:
    from matplotlib import ticker

    for number, name in enumerate(study.names(origin)):
        rows = [study.rows_of(ranks, nbytes)[name] for nbytes in study.sizes]
        style = plots.series(number)
        panel.plot(study.sizes, [row.ratio for row in rows], label=name, **style)
        low, high = [row.ratio_low for row in rows], [row.ratio_high for row in rows]
        panel.fill_between(study.sizes, low, high, color=style["color"], alpha=0.15, linewidth=0)
    panel.axhline(1, color=plots.GREY, linestyle="--", linewidth=1)
    _size_axis(panel, study.sizes)
    panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _best_table(study: AllreduceStudy) -> TitledTable:
    best = {(entry.ranks, entry.bytes): entry for entry in study.best}
    rows = []
    for nbytes in study.sizes:
        winners = [best[ranks, nbytes] for ranks in study.counts]
        cells = [f"{w.algorithm} {w.ratio:.2f}" if w.clear else MPI_CHOICE for w in winners]
        rows.append([_message(study, nbytes), *cells])
    title = "Fastest algorithm, and its time relative to MPI's choice"
    return TitledTable(title, ["message", *(plural(n, "rank") for n in study.counts)], rows)


def _ratio_table(study: AllreduceStudy, ranks: int) -> TitledTable:
    columns = [study.rows_of(ranks, nbytes) for nbytes in study.sizes]
    rows = [[MPI_CHOICE, *(duration(column[MPI_CHOICE].seconds) for column in columns)]]
    for name in columns[0]:
        if name != MPI_CHOICE:
            rows.append([name, *(f"{column[name].ratio:.2f}" for column in columns)])
    title = f"{plural(ranks, 'rank')}: time of MPI's choice, relative time of the others"
    sizes = [_message(study, nbytes) for nbytes in study.sizes]
    return TitledTable(title, ["algorithm", *sizes], rows)


def _estimate_table(study: AllreduceStudy, link: Link, nbytes: int) -> TitledTable:
    rows = [
        [law.name, *(duration(link.seconds(law, ranks, nbytes)) for ranks in MANY)]
        for law in (RING, RECURSIVE_DOUBLING, RABENSEIFNER)
    ]
    title = (
        f"Estimate for more ranks, {_message(study, nbytes)} (latency "
        f"{duration(link.latency)}, {bandwidth(link.bandwidth)})"
    )
    return TitledTable(title, ["algorithm", *(plural(ranks, "rank") for ranks in MANY)], rows)


def _message(study: AllreduceStudy, nbytes: int) -> str:
    """Return a message size as text, that of the gradients in MB as specified."""
    return f"{nbytes / 1e6:g} MB" if nbytes == study.gradient_bytes else size(nbytes)
