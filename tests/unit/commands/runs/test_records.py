"""The files of a study, JSON Lines and a table: valid, incomplete and invalid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.commands.runs.comparable import check_comparable
from hvdtrain.commands.runs.records import append_line, read_lines, read_table, table_text
from hvdtrain.errors import UsageError
from tests.studies import WORDS, run, summary


def test_lines_are_read_back(tmp_path: Path) -> None:
    file, runs = tmp_path / "results.jsonl", [run(1), run(2), run(2, 2)]
    assert read_lines(file) == []
    for record in runs:
        append_line(file, record)
    assert read_lines(file) == runs


def test_a_sweep_of_an_older_version_is_continued(tmp_path: Path) -> None:
    file, record = tmp_path / "results.jsonl", run(1, machine="2 cores per host", ranks_per_host=2)
    append_line(file, record)
    line = file.read_text()
    assert json.loads(line)["room"] == 2
    file.write_text(line.replace("per host", "a host"))
    assert read_lines(file) == [record]


@pytest.mark.parametrize("line", ["5", '"text"', "[]", "null", '{"summary": {}}'])
def test_an_invalid_line_is_reported(line: str, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(f"{line}\n")
    with pytest.raises(UsageError, match=r"results.jsonl, line 1: not a run"):
        read_lines(file)


@given(cut=st.integers(1, 400))
def test_an_incomplete_line_is_replaced(cut: int, tmp_path_factory: Any) -> None:
    file = tmp_path_factory.mktemp("cut") / "results.jsonl"
    append_line(file, run(1))
    first = file.read_bytes()
    append_line(file, run(2))
    second = len(file.read_bytes()) - len(first)
    file.write_bytes(file.read_bytes()[: len(first) + min(cut, second - 1)])
    assert read_lines(file) == [run(1)]
    append_line(file, run(4))
    assert read_lines(file) == [run(1), run(4)]


def test_a_run_without_a_newline_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    for ranks in (1, 2):
        append_line(file, run(ranks))
    file.write_text(file.read_text().removesuffix("\n"))  # as an editor or a full disk leaves it
    assert read_lines(file) == [run(1), run(2)]
    append_line(file, run(4))
    assert read_lines(file) == [run(1), run(2), run(4)]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    append_line(file, run(1))
    file.write_text("{}\n" + file.read_text())
    with pytest.raises(UsageError, match=r"results.jsonl, line 1: not a run"):
        read_lines(file)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"gradient_messages": {"bytes": 8}},
            "gradient_messages: object missing required field `count`",
        ),
        ({"gradient_messages": 3}, "gradient_messages: expected `object | null`, got `int`"),
        ({"hosts": "one"}, "hosts: expected `int | null`, got `str`"),
        ({"images_per_second_mean": 0}, "0.0 images/s on 1 ranks"),
        ({"images_per_second_mean": None}, "0.0 images/s on 1 ranks"),
        ({"images_per_second_mean": float("inf")}, "inf images/s on 1 ranks"),
    ],
)
def test_an_invalid_summary_is_reported(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "results.jsonl"
    line = {"ranks": 1, "repeat": 1, "command": WORDS, "summary": {**summary(1), **changed}}
    file.write_text(json.dumps(line) + "\n")
    with pytest.raises(UsageError, match=f"line 1: not a run of a sweep .*{message}"):
        read_lines(file)


def test_the_table_is_read_back(tmp_path: Path) -> None:
    file, runs = tmp_path / "results.csv", [run(2, rate=190.5, machine="m, 2 cores"), run(1)]
    file.write_text(table_text(runs))
    lines = file.read_text().splitlines()
    assert lines[0].startswith("ranks,repeat,images_per_second,images_per_second_std,step_seconds")
    first, second = read_table(file)
    assert (first.ranks, first.rate, second.ranks, second.rate) == (1, 100.0, 2, 190.5)
    assert (second.machine, second.batch, second.scaling) == ("m, 2 cores", 128, "weak")
    assert second.split["compute"] == 0.3
    with pytest.raises(UsageError, match="the precision"):
        file.write_text("\n".join([lines[0], lines[1], lines[2].replace("bf16", "fp32")]))
        check_comparable(read_table(file), "weak", "f")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column ranks and images_per_second"),
        ("ranks,images_per_second\n", "no rows"),
        (f"ranks,images_per_second\n{10**400},2\n", r"ranks '10+\.\.\.' is not a whole number"),
        ("ranks,images_per_second\n1,1e308\n", "'1e308' is not a positive number in the"),
        ("ranks,images_per_second\n1,5e-324\n", "'5e-324' is not a positive number"),
        ("ranks,rate\n1,2\n", "no column images_per_second"),
        ("ranks,images_per_second\n1.5,2\n", "line 2: ranks '1.5' is not a whole number"),
        ("ranks,images_per_second\n0,2\n", "line 2: ranks '0' is not"),
        ("ranks,images_per_second\n1,2\n2,-3\n", "line 3: images_per_second '-3' is not"),
        ("ranks,images_per_second\n1,nan\n", "images_per_second 'nan' is not"),
        ("ranks,images_per_second\n1,\n", "line 2: ranks or images_per_second is empty"),
        ("ranks,images_per_second,hosts\n1,2,x\n", "hosts 'x' is not a whole number"),
    ],
)
def test_invalid_tables_are_reported(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_table(file)
