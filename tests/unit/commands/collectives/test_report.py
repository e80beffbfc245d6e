"""Tables and plot of timings, from a constructed report."""

from __future__ import annotations

from typing import Any

import pytest

from hvdtrain.commands.collectives.report import (
    check_measured,
    left_out,
    time_figure,
    time_tables,
    time_text,
)
from hvdtrain.commands.collectives.timing import repeats_for
from hvdtrain.errors import HvdtrainError


def row(collective: str, size: int, seconds: float) -> dict[str, Any]:
    return {"collective": collective, "bytes": size, "seconds": seconds}


def fit(collective: str, latency: float, speed: float | None) -> dict[str, Any]:
    return {"collective": collective, "latency_seconds": latency, "bytes_per_second": speed}


REPORT: dict[str, Any] = {
    "ranks": 4,
    "hosts": 1,
    "backends": {
        "mpi4py": {
            "state": "ok",
            "rows": [
                *(row("scatter", 4, 1e-6), row("scatter", 2**20, 1e-3)),
                *(row("allreduce", 4, 2e-6), row("allreduce", 2**20, 4e-3)),
            ],
            "fits": [fit("scatter", 1e-6, 1e9), fit("allreduce", 0.0, 2.5e8)],
            "left_out": {},
        },
        "gloo": {
            "state": "ok",
            "rows": [row("allreduce", 4, 3e-5), row("allreduce", 2**20, 6e-3)],
            "fits": [fit("allreduce", 3e-5, None)],
            "left_out": {"scatter": "it has none"},
        },
        "nccl": {"state": "absent", "reason": "no GPU"},
    },
}


def test_a_table_per_collective_with_ratios_and_fits() -> None:
    assert time_tables(REPORT) == [
        (
            "scatter",
            (
                ["message", "MPI (mpi4py)"],
                [
                    ["4 B", "1 µs"],
                    ["1.0 MiB", "1.00 ms"],
                    ["latency", "1 µs"],
                    ["bandwidth", "1 GB/s"],
                ],
            ),
        ),
        (
            "allreduce",
            (
                ["message", "MPI (mpi4py)", "torch.distributed, Gloo"],
                [
                    ["4 B", "2 µs", "30 µs (15x)"],
                    ["1.0 MiB", "4.00 ms", "6.00 ms (1.50x)"],
                    ["latency", "-", "30 µs"],
                    ["bandwidth", "0.25 GB/s", "-"],
                ],
            ),
        ),
    ]


def test_failed_measurements_are_reported_with_their_reason() -> None:
    lines = ["torch.distributed, Gloo, scatter: it has none", "torch.distributed, NCCL: no GPU"]
    assert left_out(REPORT) == lines
    assert time_text(REPORT).splitlines()[-2:] == lines


def test_the_plot_has_a_panel_per_collective_and_a_series_per_library() -> None:
    panels = [panel for panel in time_figure(REPORT).axes if panel.get_title()]
    assert [panel.get_title() for panel in panels] == ["scatter", "allreduce"]
    assert [len(panel.get_lines()) for panel in panels] == [2, 4]  # points, and the fit
    points = panels[1].get_lines()[0]
    assert list(points.get_ydata()) == [2e-6, 4e-3]


def test_a_library_without_a_collective_may_come_first() -> None:
    backends = REPORT["backends"]
    turned = {**REPORT, "backends": {"gloo": backends["gloo"], "mpi4py": backends["mpi4py"]}}
    panels = [panel for panel in time_figure(turned).axes if panel.get_title()]
    assert [panel.get_title() for panel in panels] == ["allreduce", "scatter"]


def test_no_measurement_is_an_error_with_the_reasons() -> None:
    check_measured(REPORT)
    nothing = {**REPORT, "backends": {"nccl": REPORT["backends"]["nccl"]}}
    with pytest.raises(HvdtrainError, match="NCCL: no GPU"):
        check_measured(nothing)


@pytest.mark.parametrize(("seconds", "repeats"), [(0.0, 200), (1e-6, 200), (0.01, 30), (9.0, 5)])
def test_repeats_fill_the_budget(seconds: float, repeats: int) -> None:
    assert repeats_for(seconds, 0.3) == repeats


def test_slow_operations_are_repeated_less() -> None:
    seconds = (0.0, 0.01, 0.2, 1.0, 2.0, 60.0)
    assert [repeats_for(each, 0.3, longest=5.0) for each in seconds] == [200, 30, 5, 5, 2, 1]
