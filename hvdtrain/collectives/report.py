"""What ``--time`` has measured, as tables and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.collectives.bench import BACKENDS
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
Report = Mapping[str, Any]  # see ``bench``
PANEL = 3.4, 2.9  # inches
COLUMNS = 3  # panels side by side


def time_text(report: Report) -> str:
    """Return a table per collective, and what could not be measured."""
    where = f"{plural(report['ranks'], 'rank')} on {plural(report['hosts'], 'host')}"
    parts = [f"{where}: median time of the slowest rank"]
    for name, (header, rows) in time_tables(report):
        parts += ["", name, table(header, rows)]
    missing = map(message, left_out(report))
    return "\n".join([*parts, *([""] if left_out(report) else []), *missing])


def time_tables(report: Report) -> Sequence[tuple[str, Table]]:
    """Return for each collective a row per message size, and those of latency and bandwidth.

    Beside each time but the first library's stands how many times as long as that one's it is.
    """
    backends = _measured(report)
    found = []
    for collective in _collectives(backends):
        have = {name: one for name, one in backends.items() if _rows(one, collective)}
        first = next(iter(have.values()))
        rows = []
        for number, row in enumerate(_rows(first, collective)):
            times = [_rows(one, collective)[number]["seconds"] for one in have.values()]
            rows.append([size(row["bytes"]), *_compared(times)])
        fits = [_fit(one, collective) for one in have.values()]
        latencies = [fit["latency_seconds"] for fit in fits]
        rows.append(["latency", *(duration(one) if one else "-" for one in latencies)])
        rows.append(["bandwidth", *(_speed(fit["bytes_per_second"]) for fit in fits)])
        found.append((collective, (["message", *(NAMES[name] for name in have)], rows)))
    return found


def check_measured(report: Report) -> None:
    """Make sure that there is something to show.

    Raises:
        HvdtrainError: no library could be measured.
    """
    if not any(one["rows"] for one in _measured(report).values()):
        raise HvdtrainError(f"nothing could be measured. {'; '.join(left_out(report))}")


def left_out(report: Report) -> list[str]:
    """Return a line for each library and collective that could not be measured."""
    lines = []
    for name, one in report["backends"].items():
        if one["state"] != "ok":
            lines.append(f"{NAMES[name]}: {one['reason']}")
        lines += [f"{NAMES[name]}, {what}: {why}" for what, why in one.get("left_out", {}).items()]
    return lines


def time_figure(report: Report) -> Any:
    """Return a panel per collective, time over size, as a matplotlib figure.

    Points are measured; a thin line is latency plus bytes over bandwidth, as fitted.
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
        for name, one in backends.items():
            if rows := _rows(one, collective):
                _draw(panel, name, rows, _fit(one, collective))
        size_axis(panel, [row["bytes"] for one in backends.values() for row in one["rows"]])
    for panel in axes[:, 0]:
        panel.set_ylabel("time")
    handles = {text: handle for one in axes.flat for handle, text in _handles(one)}
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
    modelled = [fit["latency_seconds"] + one * per_byte for one in dense]
    panel.plot(dense, modelled, color=style["color"], linewidth=1)


def size_axis(panel: Any, sizes: Sequence[int]) -> None:
    """Give a plot axes of bytes and seconds, both logarithmic, in readable units."""
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
    """Return such as ``10 µs``."""
    number, unit = duration(seconds).split()
    return f"{float(number):g} {unit}"


def _measured(report: Report) -> dict[str, Any]:
    return {name: one for name, one in report["backends"].items() if one["state"] == "ok"}


def _collectives(backends: Mapping[str, Any]) -> list[str]:
    rows = [row for one in backends.values() for row in one["rows"]]
    return list(dict.fromkeys(row["collective"] for row in rows))


def _rows(backend: Any, collective: str) -> list[Any]:
    return [row for row in backend["rows"] if row["collective"] == collective]


def _fit(backend: Any, collective: str) -> Any:
    return next(fit for fit in backend["fits"] if fit["collective"] == collective)


def _compared(times: Sequence[float]) -> list[str]:
    """Return each time, all but the first with its ratio to that."""
    ratios = [one / times[0] for one in times[1:]]
    shown = [f"{one:.{2 if one < 10 else 0}f}x" for one in ratios]
    pairs = zip(times[1:], shown, strict=True)
    return [duration(times[0]), *(f"{duration(one)} ({ratio})" for one, ratio in pairs)]


def _speed(bytes_per_second: float | None) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s" if bytes_per_second else "-"
