"""Tables, verdict and plots of timings and of a study, from constructed results."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvdtrain.commands.collectives.algorithms import (
    MPI_CHOICE,
    OPEN_MPI,
    OWN,
    AllreduceStudy,
    Best,
    LinkFacts,
    Selection,
    StudyRow,
)
from hvdtrain.commands.collectives.report import (
    check_measured,
    headline,
    left_out,
    study_figure,
    study_tables,
    study_text,
    time_figure,
    time_tables,
    time_text,
    verdict,
)
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

GRADIENT = 10**8
VARIABLES = {"OMPI_MCA_coll_tuned_allreduce_algorithm": "4"}
RATIOS = {  # by ranks and algorithm: of the small message, of the gradients
    (2, MPI_CHOICE): (1, 1),
    (2, "ring"): (2, 0.95),
    (2, "ring, ours"): (3, 0.5),
    (4, MPI_CHOICE): (1, 1),
    (4, "ring"): (4, 0.75),
    (4, "ring, ours"): (6, 1.5),
}
STUDY = AllreduceStudy(
    ranks=4,
    hosts=1,
    cores=2,
    gradient_bytes=GRADIENT,
    notes=["a note"],
    algorithms={
        MPI_CHOICE: Selection(MPI_CHOICE, {}),
        "ring": Selection(OPEN_MPI, VARIABLES),
        "ring, ours": Selection(OWN, {}),
    },
    rows=[
        StudyRow(ranks, size, name, 5, ratio * usual, 0, 1, ratio, 0.9 * ratio, 1.1 * ratio)
        for (ranks, name), ratios in RATIOS.items()
        for size, usual, ratio in zip((4, GRADIENT), (1e-5, 0.2), ratios, strict=True)
    ],
    best=[
        Best(2, 4, MPI_CHOICE, 1e-5, 1.0, clear=False),
        Best(2, GRADIENT, "ring, ours", 0.1, 0.5, clear=True),
        Best(4, 4, MPI_CHOICE, 1e-5, 1.0, clear=False),
        Best(4, GRADIENT, "ring", 0.15, 0.75, clear=True),
    ],
    link=LinkFacts(1e-6, 1e9),
)


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
    assert left_out(TIMES) == lines
    assert time_text(TIMES).splitlines()[-2:] == lines
    check_measured(TIMES)
    with pytest.raises(HvdtrainError, match="NCCL: no GPU"):
        check_measured(JobTimes(4, 1, {"nccl": NCCL}))


def test_the_plot_has_a_panel_per_collective_and_a_series_per_library() -> None:
    panels = [panel for panel in time_figure(TIMES).axes if panel.get_title()]
    assert [panel.get_title() for panel in panels] == ["scatter", "allreduce"]
    assert [len(panel.get_lines()) for panel in panels] == [2, 4]  # points, and the fit
    assert list(panels[1].get_lines()[0].get_ydata()) == [2e-6, 4e-3]
    turned = JobTimes(4, 1, {"gloo": GLOO, "mpi4py": MPI})  # the first has no scatter
    titles = [panel.get_title() for panel in time_figure(turned).axes if panel.get_title()]
    assert titles == ["allreduce", "scatter"]


@pytest.mark.parametrize(
    ("seconds", "longest", "repeats"),
    [
        *((0.0, 1e9, 200), (1e-6, 1e9, 200), (0.01, 1e9, 30), (9.0, 1e9, 5)),
        *((0.2, 5.0, 5), (1.0, 5.0, 5), (2.0, 5.0, 2), (60.0, 5.0, 1)),
    ],
)
def test_repeats_fill_the_budget(seconds: float, longest: float, repeats: int) -> None:
    assert repeats_for(seconds, 0.3, longest) == repeats


def test_the_tables_of_a_study() -> None:
    best, _, four, *_, estimate = study_tables(STUDY)
    assert "Fastest" in best.title and list(best.header) == ["message", "2 ranks", "4 ranks"]
    assert best.rows == [
        ["4 B", MPI_CHOICE, MPI_CHOICE],
        ["100 MB", "ring, ours 0.50", "ring 0.75"],
    ]
    assert four.title.startswith("4 ranks: ")
    assert list(four.header) == ["algorithm", "4 B", "100 MB"]
    assert four.rows == [
        [MPI_CHOICE, "10 µs", "200 ms"],
        ["ring", "4.00", "0.75"],
        ["ring, ours", "6.00", "1.50"],
    ]
    assert estimate.title == "Estimate for more ranks, 100 MB (latency 1 µs, 1 GB/s)"
    assert list(estimate.header)[1::4] == ["16 ranks", "4,096 ranks"]
    cells = {name: (first, last) for name, first, *_, last in estimate.rows}
    # 1e-6 hops + 0.1 volume: 30 and 8190; 4 and 12; 8 and 24 hops.
    assert cells["ring"] == ("188 ms", "208 ms")
    assert cells["recursive doubling"] == ("400 ms", "1.20 s")
    assert cells["Rabenseifner"] == ("188 ms", "200 ms")
    no_link = replace(STUDY, link=LinkFacts(1e-6, None))
    assert len(study_tables(no_link)) == len(study_tables(STUDY)) - 2


def test_the_verdict_shows_a_saving_only_if_it_is_clear() -> None:
    two, four, note = verdict(STUDY)
    assert two.startswith("2 ranks: gradients of 100 MB take 200 ms. No ")
    assert "0.75" in four and "50.0 ms per step: " in four
    assert four.endswith("OMPI_MCA_coll_tuned_allreduce_algorithm=4")
    assert note == "a note"
    assert study_text(STUDY).splitlines()[-3:] == [two, four, note]
    assert "oversubscribed" in headline(STUDY)
    assert "oversubscribed" not in headline(replace(STUDY, cores=4))


def test_another_mpi_has_a_verdict_and_a_plot_of_hvdtrains_algorithms() -> None:
    names = {name: entry for name, entry in STUDY.algorithms.items() if entry.origin != OPEN_MPI}
    rows = [row for row in STUDY.rows if row.algorithm in names]
    study = replace(STUDY, algorithms=names, rows=rows)
    assert all("No selectable algorithm" in line for line in verdict(study)[:2])
    assert len(study_figure(study).axes) == 2


def test_the_plot_has_a_panel_per_number_of_ranks_and_origin() -> None:
    panels = study_figure(STUDY).axes
    assert [panel.get_title() for panel in panels] == ["2 ranks", "4 ranks"] * 2
    lines = [line for line in panels[1].get_lines() if line.get_label() == "ring"]
    assert [list(line.get_ydata()) for line in lines] == [[4, 0.75]]
