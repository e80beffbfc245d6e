"""The lesson without MPI: origins of numbers, the table, the page."""

from __future__ import annotations

import pytest

from hvdtrain.commands.collectives.lesson import COLLECTIVES, Outcome, diagram, section, text
from hvdtrain.commands.collectives.program import TEMPLATE
from hvdtrain.system.output.page import render
from tests.html import Page

BY_NAME = {collective.name: collective for collective in COLLECTIVES}
ALLTOALL = Outcome(BY_NAME["alltoall"], [[10, 11], [20, 21]], [[10, 20], [11, 21]])
REDUCE = Outcome(BY_NAME["reduce"], [[10, 11], [20, 21]], [[30, 32], []])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 11])
def test_every_number_shows_its_origin(size: int) -> None:
    before = [BY_NAME["alltoall"].before(rank, size) for rank in range(size)]
    outcome = Outcome(BY_NAME["allreduce"], before, before)
    for rank, row in enumerate(before):
        assert [outcome.origins(value) for value in row] == [[(rank, p)] for p in range(size)]
    if size > 1:
        for index in range(size):
            total = sum(row[index] for row in before)
            assert outcome.origins(total) == [(rank, index) for rank in range(size)]


def test_the_table_has_a_line_per_rank() -> None:
    lines = text([REDUCE]).splitlines()
    assert lines[0].startswith("2 ranks: ")
    assert [line.split() for line in lines[4:6]] == [
        ["0", "10", "11", "30", "32"],
        ["1", "20", "21", "-"],
    ]


def test_a_diagram_has_lines_from_each_rank_to_the_receivers_of_its_numbers() -> None:
    drawn = diagram(ALLTOALL)
    assert [cell["value"] for cell in drawn["cells"]] == [10, 11, 20, 21, 10, 20, 11, 21]
    assert len(drawn["lines"]) == 4
    rows = {y: rank for rank, y in drawn["rows"]}
    assert [(rows[line["from"][1]], rows[line["to"][1]]) for line in drawn["lines"]] == [
        *((0, 0), (0, 1)),
        *((1, 0), (1, 1)),
    ]
    hues = [cell["hue"] for cell in drawn["cells"]]
    assert hues[:4] == [hues[0], hues[0], hues[2], hues[2]] and hues[0] != hues[2]


def test_a_sum_has_lines_from_all_and_no_colour() -> None:
    drawn = diagram(REDUCE)
    assert len(drawn["lines"]) == 2
    assert [cell["hue"] for cell in drawn["cells"][4:]] == [None, None]
    width, height = drawn["size"]
    wide, high = drawn["cell"]
    ends = [(cell["x"] + wide, cell["y"] + high) for cell in drawn["cells"]]
    assert all(x <= width and y <= height for x, y in ends)


def test_the_page_is_self_contained() -> None:
    page = render(TEMPLATE, subject="", ranks="2 ranks", part=section([ALLTOALL, REDUCE]))
    assert page.count("<svg") == 2 and "2 ranks" in page
    Page(page).check_self_contained()
    assert "script" not in Page(page).tags
