"""Tables and plot of ``--time``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.commands.collectives.timing import BACKENDS
from hvdtrain.errors import HvdtrainError
from hvdtrain.system.output import plots
from hvdtrain.system.output.tables import Table, message, table
from hvdtrain.system.output.text import duration, plural, size

NAMES = {
    "mpi4py": "MPI (mpi4py)",
    "horovod": "Horovod",
    "gloo": "torch.distributed, Gloo",
    "nccl": "torch.distributed, NCCL",
}
Report = Mapping[str, Any]  # see ``timing``
PANEL = 3.4, 2.9  # inches
COLUMNS = 3  # panels side by side


def time_text(report: Report) -> str:
    """Return a table per collective and the failed measurements."""
    job = f"{plural(report['ranks'], 'rank')} on {plural(report['hosts'], 'host')}"
    parts = [f"{job}: median time of the slowest rank"]
    for name, (header, rows) in time_tables(report):
        parts += ["", name, table(header, rows)]
    missing = map(message, left_out(report))
    return "\n".join([*parts, *([""] if left_out(report) else []), *missing])


def time_tables(report: Report) -> Sequence[tuple[str, Table]]:
    """Return a table per collective: a row per message size, then latency and bandwidth.

    Times of libraries after the first are followed by their ratio to the first library's.
    """
    backends = _measured(report)
    titled = []
    for collective in _collectives(backends):
        have = {name: entry for name, entry in backends.items() if _rows(entry, collective)}
        first = next(iter(have.values()))
        rows = []
        for number, row in enumerate(_rows(first, collective)):
            times = [_rows(entry, collective)[number]["seconds"] for entry in have.values()]
            rows.append([size(row["bytes"]), *_compared(times)])
        fits = [_fit(entry, collective) for entry in have.values()]
        latencies = [fit["latency_seconds"] for fit in fits]
        rows.append(["latency", *(duration(latency) if latency else "-" for latency in latencies)])
        rows.append(["bandwidth", *(_speed(fit["bytes_per_second"]) for fit in fits)])
        titled.append((collective, (["message", *(NAMES[name] for name in have)], rows)))
    return titled


def check_measured(report: Report) -> None:
    """Check that at least one measurement succeeded.

    Raises:
        HvdtrainError: no library could be measured.
    """
    if not any(entry["rows"] for entry in _measured(report).values()):
        raise HvdtrainError(f"all measurements failed. {'; '.join(left_out(report))}")


def left_out(report: Report) -> list[str]:
    """Return a line for each library and collective that could not be measured."""
    lines = []
    for name, entry in report["backends"].items():
        if entry["state"] != "ok":
            lines.append(f"{NAMES[name]}: {entry['reason']}")
        omitted = entry.get("left_out", {}).items()
        lines += [f"{NAMES[name]}, {collective}: {reason}" for collective, reason in omitted]
    return lines


def time_figure(report: Report) -> Any:
    """Return a panel per collective, time over size, as a matplotlib figure.

    Points are measurements; thin lines are the fits, latency + bytes / bandwidth.
    """
    from matplotlib import pyplot as plt

    plots.style()
    backends = _measured(report)
    collectives = _collectives(backends)
    columns = min(COLUMNS, len(collectives))
    lines = -(-len(collectives) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(PANEL[0] * columns, PANEL[1] * lines), squeeze=False, sharey=True
    )
    for panel in axes.flat[len(collectives) :]:
        panel.set_axis_off()
    for panel, collective in zip(axes.flat, collectives, strict=False):
        panel.set_title(collective)
        for name, entry in backends.items():
            if rows := _rows(entry, collective):
                _draw(panel, name, rows, _fit(entry, collective))
        size_axis(panel, [row["bytes"] for entry in backends.values() for row in entry["rows"]])
    for panel in axes[:, 0]:
        panel.set_ylabel("time")
    handles = {text: handle for panel in axes.flat for handle, text in _handles(panel)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    return figure


def _handles(panel: Any) -> Any:
    return zip(*panel.get_legend_handles_labels(), strict=True)


def _draw(panel: Any, name: str, rows: Sequence[Any], fit: Any) -> None:
    sizes = [row["bytes"] for row in rows]
    style = plots.series(BACKENDS.index(name))
    panel.plot(sizes, [r["seconds"] for r in rows], **{**style, "linestyle": ""}, label=NAMES[name])
    per_byte = 1 / fit["bytes_per_second"] if fit["bytes_per_second"] else 0.0
    dense = [sizes[0] * (sizes[-1] / sizes[0]) ** (step / 40) for step in range(41)]
    modelled = [fit["latency_seconds"] + nbytes * per_byte for nbytes in dense]
    panel.plot(dense, modelled, color=style["color"], linewidth=1)


def size_axis(panel: Any, sizes: Sequence[int]) -> None:
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


def _measured(report: Report) -> dict[str, Any]:
    return {name: entry for name, entry in report["backends"].items() if entry["state"] == "ok"}


def _collectives(backends: Mapping[str, Any]) -> list[str]:
    rows = [row for entry in backends.values() for row in entry["rows"]]
    return list(dict.fromkeys(row["collective"] for row in rows))


def _rows(backend: Any, collective: str) -> list[Any]:
    return [row for row in backend["rows"] if row["collective"] == collective]


def _fit(backend: Any, collective: str) -> Any:
    return next(fit for fit in backend["fits"] if fit["collective"] == collective)


def _compared(times: Sequence[float]) -> list[str]:
    """Return each time as text, all but the first with the ratio to the first."""
    ratios = [seconds / times[0] for seconds in times[1:]]
    shown = [f"{ratio:.{2 if ratio < 10 else 0}f}x" for ratio in ratios]
    pairs = zip(times[1:], shown, strict=True)
    return [duration(times[0]), *(f"{duration(seconds)} ({ratio})" for seconds, ratio in pairs)]


def _speed(bytes_per_second: float | None) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s" if bytes_per_second else "-"
