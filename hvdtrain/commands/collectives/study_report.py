"""Tables and plot of ``--study``, and the possible saving for a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.collectives.cost import RABENSEIFNER, RECURSIVE_DOUBLING, RING, Link
from hvdtrain.commands.collectives.algorithms import MPI_CHOICE, OPEN_MPI, OWN
from hvdtrain.commands.collectives.report import size_axis
from hvdtrain.system.output import plots
from hvdtrain.system.output.tables import Table, message, table
from hvdtrain.system.output.text import duration, plural, size

Report = Mapping[str, Any]  # see ``study``
MANY = (16, 64, 256, 1024, 4096)  # ranks in the estimate
SMALL = 16 * 2**10  # bytes of the estimate in addition to the gradients
PANEL = 3.4, 3.0  # inches


def text(report: Report) -> str:
    """Return the tables with their titles, then the verdict."""
    parts = [message(headline(report))]
    for title, (header, rows) in tables(report):
        parts += ["", message(title), table(header, rows)]
    return "\n".join([*parts, "", *map(message, verdict(report))])


def headline(report: Report) -> str:
    """Return numbers of ranks, hosts and cores as text."""
    job = f"{plural(report['ranks'], 'rank')} on {plural(report['hosts'], 'host')}"
    line = f"allreduce, {job} with {plural(report['cores'], 'core')} in total"
    if report["ranks"] > report["cores"]:
        line += ": oversubscribed, so times depend on the cores, not on the links"
    return line


def tables(report: Report) -> Sequence[tuple[str, Table]]:
    """Return the best algorithms, ratios for each number of ranks, and the estimates."""
    titled: list[tuple[str, Table]] = [
        ("Fastest algorithm, and its time relative to MPI's choice", _best_table(report))
    ]
    for ranks in _counts(report):
        title = f"{plural(ranks, 'rank')}: time of MPI's choice, relative time of the others"
        titled.append((title, _ratio_table(report, ranks)))
    link = report["link"]
    if link["bytes_per_second"]:
        titled += [
            (
                f"Estimate for more ranks, {_message(report, nbytes)} (latency "
                f"{duration(link['latency_seconds'])}, {link['bytes_per_second'] / 1e9:.3g} GB/s)",
                _estimate_table(link, nbytes),
            )
            for nbytes in (SMALL, report["gradient_bytes"])
        ]
    return titled


def verdict(report: Report) -> list[str]:
    """Return the saving per step by the best selectable algorithm, for each number of ranks."""
    gradient, algorithms = report["gradient_bytes"], report["algorithms"]
    message = _message(report, gradient)
    lines = []
    for ranks in _counts(report):
        rows = _rows(report, ranks, gradient)
        usual = rows[MPI_CHOICE]["seconds"]
        selectable = [row for name, row in rows.items() if algorithms[name]["origin"] == OPEN_MPI]
        first = min(selectable, key=lambda row: float(row["ratio"]), default=None)
        line = f"{plural(ranks, 'rank')}: gradients of {message} take {duration(usual)}."
        if first and first["ratio_high"] < 1:
            words = algorithms[first["algorithm"]]["variables"].items()
            line += (
                f" With {first['algorithm']} MPI takes {first['ratio']:.2f} of that, saving up to "
                f"{duration(usual * (1 - first['ratio']))} per step: "
                + " ".join(f"{name}={value}" for name, value in words)
            )
        else:
            line += " No selectable algorithm is faster than MPI's choice."
        lines.append(line)
    return [*lines, *report["notes"]]


def figure(report: Report) -> Any:
    """Return the ratios over size as a matplotlib figure.

    A column of panels per number of ranks: Open MPI's algorithms above, hvdtrain's below.
    """
    from matplotlib import pyplot as plt

    plots.style()
    counts = _counts(report)
    origins = [origin for origin in (OPEN_MPI, OWN) if _names(report, origin)]
    wide, high = PANEL[0] * len(counts), PANEL[1] * len(origins) + 0.6
    created, axes = plt.subplots(
        len(origins), len(counts), figsize=(wide, high), squeeze=False, sharex=True, sharey="row"
    )
    for line, origin in zip(axes, origins, strict=True):
        for panel, ranks in zip(line, counts, strict=True):
            _draw(panel, report, origin, ranks)
            panel.set_title(plural(ranks, "rank"))
        line[0].set_ylabel(f"{origin}: time, MPI's choice = 1")
        # A legend per row, as the rows show different algorithms.
        line[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    for panel in axes[:-1].flat:
        panel.set_xlabel("")
    return created


def _draw(panel: Any, report: Report, origin: str, ranks: int) -> None:
    from matplotlib import ticker

    sizes = _sizes(report)
    for number, name in enumerate(_names(report, origin)):
        rows = [_rows(report, ranks, nbytes)[name] for nbytes in sizes]
        middle = [row["ratio"] for row in rows]
        style = plots.series(number)
        panel.plot(sizes, middle, label=name, **style)
        low, high = [row["ratio_low"] for row in rows], [row["ratio_high"] for row in rows]
        panel.fill_between(sizes, low, high, color=style["color"], alpha=0.15, linewidth=0)
    panel.axhline(1, color=plots.GREY, linestyle="--", linewidth=1)
    size_axis(panel, sizes)
    panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _best_table(report: Report) -> Table:
    rows = []
    for nbytes in _sizes(report):
        cells = []
        for ranks in _counts(report):
            key = (ranks, nbytes)
            (best,) = [row for row in report["best"] if (row["ranks"], row["bytes"]) == key]
            clear = f"{best['algorithm']} {best['ratio']:.2f}"
            cells.append(clear if best["clear"] else MPI_CHOICE)
        rows.append([_message(report, nbytes), *cells])
    return ["message", *(plural(ranks, "rank") for ranks in _counts(report))], rows


def _ratio_table(report: Report, ranks: int) -> Table:
    columns = [_rows(report, ranks, nbytes) for nbytes in _sizes(report)]
    usual = [MPI_CHOICE, *(duration(rows[MPI_CHOICE]["seconds"]) for rows in columns)]
    others = [
        [name, *(f"{rows[name]['ratio']:.2f}" for rows in columns)]
        for name in columns[0]
        if name != MPI_CHOICE
    ]
    return ["algorithm", *(_message(report, nbytes) for nbytes in _sizes(report))], [usual, *others]


def _estimate_table(link: Mapping[str, float], nbytes: int) -> Table:
    model = Link(link["latency_seconds"], 1 / link["bytes_per_second"])
    rows = [
        [law.name, *(duration(model.seconds(law, ranks, nbytes)) for ranks in MANY)]
        for law in (RING, RECURSIVE_DOUBLING, RABENSEIFNER)
    ]
    return ["algorithm", *(plural(ranks, "rank") for ranks in MANY)], rows


def _counts(report: Report) -> list[int]:
    return sorted({row["ranks"] for row in report["rows"]})


def _sizes(report: Report) -> list[int]:
    return sorted({row["bytes"] for row in report["rows"]})


def _names(report: Report, origin: str) -> list[str]:
    return [name for name, entry in report["algorithms"].items() if entry["origin"] == origin]


def _message(report: Report, nbytes: int) -> str:
    """Return a message size as text, that of the gradients in MB as specified."""
    return f"{nbytes / 1e6:g} MB" if nbytes == report["gradient_bytes"] else size(nbytes)


def _rows(report: Report, ranks: int, nbytes: int) -> dict[str, Any]:
    """Return the row of each algorithm, by name."""
    rows = report["rows"]
    chosen = [row for row in rows if (row["ranks"], row["bytes"]) == (ranks, nbytes)]
    return {row["algorithm"]: row for row in chosen}
