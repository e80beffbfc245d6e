"""The eight rows as a table and as data."""

from __future__ import annotations

import pytest

from hvdtrain.commands.verify.rows import (
    FAILED,
    NOT_SEEN,
    OK,
    STEPS,
    Row,
    by_rank,
    complete,
    number,
    read_row,
    row,
    show,
)
from hvdtrain.system.output.text import rank_list


def test_eight_steps_each_with_a_remedy() -> None:
    assert [step.number for step in STEPS] == list(range(1, 9))
    assert len({step.title for step in STEPS}) == 8
    assert all(step.remedy for step in STEPS)


def test_the_table_keeps_its_columns_in_a_file() -> None:
    rows = [
        Row(1, OK, "ranks 0, 1 once each [2 on node]"),
        Row(5, FAILED, "x" * 200),
        Row(8, NOT_SEEN, "no metric"),
    ]
    margin = " " * 38
    assert show("headline", rows).splitlines() == [
        "headline",
        "ok        1 one world                 ranks 0, 1 once each [2 on node]",
        "failed    5 mean gradient             " + "x" * 200,
        f"{margin}-> let every rank reduce its gradients before each update,",
        f"{margin}weighted by its samples",
        "not seen  8 metrics over all samples  no metric",
    ]


def test_a_row_is_restored_from_its_data() -> None:
    failed = row(3, False, "7 of 9 on no rank", samples=9)
    data = failed.data()
    assert data == {
        "step": 3,
        "name": "shard_data",
        "title": "disjoint shards",
        "state": "failed",
        "evidence": "7 of 9 on no rank",
        "remedy": STEPS[2].remedy,
        "facts": {"samples": 9},
    }
    assert read_row(data) == failed
    assert row(3, True, "").remedy == ""


def test_missing_rows_are_not_seen() -> None:
    rows = complete([Row(4, OK, "here")], "not reached")
    assert [row.step for row in rows] == list(range(1, 9))
    assert [row.state for row in rows] == [NOT_SEEN] * 3 + [OK] + [NOT_SEEN] * 4
    assert rows[7].evidence == "not reached"


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (3.1e-17, "3e-17"), (0.25, "0.2"), (float("nan"), "nan")]
)
def test_a_difference_as_text(value: float, text: str) -> None:
    assert number(value) == text


def test_ranks_as_text() -> None:
    assert rank_list([1]) == "rank 1"
    assert rank_list([3, 0]) == "ranks 0, 3"
    assert rank_list(range(512)) == "ranks 0 to 511"
    assert by_rank([1, 3, 5]) == "1 + 3 + 5"
    assert by_rank([1, 3, 5, 7, 9]) == "1 to 9 per rank"
