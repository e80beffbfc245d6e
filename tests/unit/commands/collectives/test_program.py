"""Tables and plots of timings, from constructed results."""

from __future__ import annotations

import pytest

from hvdtrain.commands.collectives.program import time_figure, time_output, time_tables
from hvdtrain.commands.collectives.timing import (
    JobTimes,
    LibraryFailure,
    LibraryTimes,
    TimeFit,
    TimeRow,
    repeats_for,
)
from hvdtrain.errors import HvdtrainError


def timed(collective: str, *times: float) -> list[TimeRow]:
    sizes = (4, 2**20)
    return [TimeRow(collective, size, 5, t, t, t) for size, t in zip(sizes, times, strict=True)]


MPI = LibraryTimes(
    rows=timed("scatter", 1e-6, 1e-3) + timed("allreduce", 2e-6, 4e-3),
    fits=[TimeFit("scatter", 1e-6, 1e9), TimeFit("allreduce", 0.0, 2.5e8)],
    left_out={},
)
GLOO = LibraryTimes(
    rows=timed("allreduce", 3e-5, 6e-3),
    fits=[TimeFit("allreduce", 3e-5, None)],
    left_out={"scatter": "it has none"},
)
NCCL = LibraryFailure("absent", "no GPU")
TIMES = JobTimes(4, 1, {"mpi4py": MPI, "gloo": GLOO, "nccl": NCCL})


def test_a_table_per_collective_with_ratios_and_fits() -> None:
    scatter, allreduce = time_tables(TIMES)
    assert (scatter.title, scatter.header) == ("scatter", ["message", "MPI (mpi4py)"])
    assert scatter.rows == [
        ["4 B", "1 µs"],
        ["1.0 MiB", "1.00 ms"],
        ["latency", "1 µs"],
        ["bandwidth", "1 GB/s"],
    ]
    assert allreduce.header == ["message", "MPI (mpi4py)", "torch.distributed, Gloo"]
    assert allreduce.rows == [
        ["4 B", "2 µs", "30 µs (15x)"],
        ["1.0 MiB", "4.00 ms", "6.00 ms (1.50x)"],
        ["latency", "-", "30 µs"],
        ["bandwidth", "250 MB/s", "-"],
    ]


def test_failed_measurements_are_reported_with_their_reason() -> None:
    lines = ["torch.distributed, Gloo, scatter: it has none", "torch.distributed, NCCL: no GPU"]
    assert TIMES.left_out == lines
    assert time_output(TIMES).text.splitlines()[-2:] == lines
    TIMES.check()
    with pytest.raises(HvdtrainError, match="NCCL: no GPU"):
        JobTimes(4, 1, {"nccl": NCCL}).check()


def test_the_plot_has_a_panel_per_collective_and_a_series_per_library() -> None:
    panels = [panel for panel in time_figure(TIMES).axes if panel.get_title()]
    assert [panel.get_title() for panel in panels] == ["scatter", "allreduce"]
    assert [len(panel.get_lines()) for panel in panels] == [2, 4]  # points, and the fit
    assert list(panels[1].get_lines()[0].get_ydata()) == [2e-6, 4e-3]
    turned = JobTimes(4, 1, {"gloo": GLOO, "mpi4py": MPI})  # the first has no scatter
    titles = [panel.get_title() for panel in time_figure(turned).axes if panel.get_title()]
    assert titles == ["allreduce", "scatter"]


@pytest.mark.parametrize(
    ("seconds", "repeats"),
    [(0.0, 200), (1e-6, 200), (0.01, 30), (0.2, 5), (1.0, 5), (2.0, 2), (60.0, 1)],
)
def test_repeats_fill_the_budget(seconds: float, repeats: int) -> None:
    assert repeats_for(seconds, 0.3) == repeats
