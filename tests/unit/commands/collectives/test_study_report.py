"""Tables, verdict and plot of a study, from a constructed report."""

from __future__ import annotations

from typing import Any

from hvdtrain.commands.collectives.algorithms import MPI_CHOICE, OPEN_MPI, OWN
from hvdtrain.commands.collectives.study_report import figure, headline, tables, text, verdict

GRADIENT = 10**8
VARIABLES = {"OMPI_MCA_coll_tuned_allreduce_algorithm": "4"}
ALGORITHMS = {
    MPI_CHOICE: {"origin": MPI_CHOICE, "variables": {}},
    "ring": {"origin": OPEN_MPI, "variables": VARIABLES},
    "ring, ours": {"origin": OWN, "variables": {}},
}


def row(ranks: int, size: int, name: str, seconds: float, ratio: float) -> dict[str, Any]:
    spread = {"ratio_low": 0.9 * ratio, "ratio_high": 1.1 * ratio}
    key = {"ranks": ranks, "bytes": size, "algorithm": name}
    return {**key, "seconds": seconds, "ratio": ratio, **spread}


def best(ranks: int, size: int, name: str, ratio: float, *, clear: bool) -> dict[str, Any]:
    key = {"ranks": ranks, "bytes": size, "algorithm": name}
    return {**key, "ratio": ratio, "clear": clear}


REPORT: dict[str, Any] = {
    "ranks": 4,
    "hosts": 1,
    "cores": 2,
    "gradient_bytes": GRADIENT,
    "notes": ["a note"],
    "algorithms": ALGORITHMS,
    "rows": [
        *(row(2, 4, MPI_CHOICE, 1e-5, 1), row(2, GRADIENT, MPI_CHOICE, 0.2, 1)),
        *(row(2, 4, "ring", 2e-5, 2), row(2, GRADIENT, "ring", 0.19, 0.95)),
        *(row(2, 4, "ring, ours", 3e-5, 3), row(2, GRADIENT, "ring, ours", 0.1, 0.5)),
        *(row(4, 4, MPI_CHOICE, 1e-5, 1), row(4, GRADIENT, MPI_CHOICE, 0.2, 1)),
        *(row(4, 4, "ring", 4e-5, 4), row(4, GRADIENT, "ring", 0.15, 0.75)),
        *(row(4, 4, "ring, ours", 6e-5, 6), row(4, GRADIENT, "ring, ours", 0.3, 1.5)),
    ],
    "best": [
        best(2, 4, MPI_CHOICE, 1.0, clear=False),
        best(2, GRADIENT, "ring, ours", 0.5, clear=True),
        best(4, 4, MPI_CHOICE, 1.0, clear=False),
        best(4, GRADIENT, "ring", 0.75, clear=True),
    ],
    "link": {"latency_seconds": 1e-6, "bytes_per_second": 1e9},
}
NO_LINK = {**REPORT, "link": {"latency_seconds": 1e-6, "bytes_per_second": None}}


def test_the_best_by_size_and_ranks() -> None:
    (title, (header, rows)), *_ = tables(REPORT)
    assert "Fastest" in title and list(header) == ["message", "2 ranks", "4 ranks"]
    assert rows == [
        ["4 B", MPI_CHOICE, MPI_CHOICE],
        ["100 MB", "ring, ours 0.50", "ring 0.75"],
    ]


def test_a_table_of_ratios_per_number_of_ranks() -> None:
    title, (header, rows) = tables(REPORT)[2]
    assert title.startswith("4 ranks: ") and list(header) == ["algorithm", "4 B", "100 MB"]
    assert rows == [
        [MPI_CHOICE, "10 µs", "200 ms"],
        ["ring", "4.00", "0.75"],
        ["ring, ours", "6.00", "1.50"],
    ]


def test_the_estimate_is_that_of_the_model() -> None:
    title, (header, rows) = tables(REPORT)[-1]
    assert title == "Estimate for more ranks, 100 MB (latency 1 µs, 1 GB/s)"
    assert list(header)[1::4] == ["16 ranks", "4,096 ranks"]
    cells = {name: (first, last) for name, first, *_, last in rows}
    # 1e-6 hops + 0.1 volume: 30 and 8190; 4 and 12; 8 and 24 hops.
    assert cells["ring"] == ("188 ms", "208 ms")
    assert cells["recursive doubling"] == ("400 ms", "1.20 s")
    assert cells["Rabenseifner"] == ("188 ms", "200 ms")
    assert len(tables(NO_LINK)) == len(tables(REPORT)) - 2


def test_the_verdict_shows_a_saving_only_if_it_is_clear() -> None:
    two, four, note = verdict(REPORT)
    assert two.startswith("2 ranks: gradients of 100 MB take 200 ms. No ")
    assert "0.75" in four and "50.0 ms per step: " in four
    assert four.endswith("OMPI_MCA_coll_tuned_allreduce_algorithm=4")
    assert note == "a note"
    assert text(REPORT).splitlines()[-3:] == [two, four, note]


def test_oversubscribed_cores_are_reported() -> None:
    assert "oversubscribed" in headline(REPORT)
    assert "oversubscribed" not in headline({**REPORT, "cores": 4})


def test_another_mpi_has_a_verdict_and_a_plot_of_hvdtrains_algorithms() -> None:
    left = {name: entry for name, entry in ALGORITHMS.items() if entry["origin"] != OPEN_MPI}
    rows = [entry for entry in REPORT["rows"] if entry["algorithm"] in left]
    report = {**REPORT, "algorithms": left, "rows": rows}
    assert all("No selectable algorithm" in line for line in verdict(report)[:2])
    assert len(figure(report).axes) == 2


def test_the_plot_has_a_panel_per_number_of_ranks_and_origin() -> None:
    panels = figure(REPORT).axes
    assert [panel.get_title() for panel in panels] == ["2 ranks", "4 ranks"] * 2
    lines = [line for line in panels[1].get_lines() if line.get_label() == "ring"]
    assert [list(line.get_ydata()) for line in lines] == [[4, 0.75]]
