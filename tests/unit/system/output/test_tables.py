"""Tables and paragraphs at any width: nothing is cut or omitted."""

from __future__ import annotations

from collections.abc import Callable

from hvdtrain.system.output.tables import FILE, Table, entry, paragraph, width

HEADER = ["rank", "first", "second", "third"]
ROWS = [["0", "1.00 ms", "20.0 ms", "a longer text"], ["11", "3 µs", "-", "x"]]


def test_the_width_is_that_of_the_terminal(terminal_of: Callable[[int], None]) -> None:
    assert width() == FILE == 100
    terminal_of(57)
    assert width() == 57


def test_tables_keep_their_columns() -> None:
    assert Table("", ["", "count"], [["a", "1"], ["longer", "1,000"]]).body == (
        "           count\n  a            1\n  longer   1,000"
    )
    assert Table(
        "", ["", "name", "n"], [["a", "b", "1"], ["a", "bc", "22"]], names=2
    ).body.splitlines() == [
        *("      name    n", "  a   b       1", "  a   bc     22"),
    ]


def test_a_table_that_is_too_wide_is_split_into_blocks(
    terminal_of: Callable[[int], None],
) -> None:
    terminal_of(40)
    assert Table("", HEADER, ROWS).body.splitlines() == [
        "  rank    first   second          third",
        "  0     1.00 ms  20.0 ms  a longer text",
        "  11       3 µs        -              x",
    ]
    terminal_of(38)
    assert Table("", HEADER, ROWS).body.splitlines() == [
        "  rank    first   second",
        "  0     1.00 ms  20.0 ms",
        "  11       3 µs        -",
        "",
        "  rank          third",
        "  0     a longer text",
        "  11                x",
    ]
    assert Table("", HEADER, ROWS, joined={"third"}).body.splitlines()[::4] == [
        "  rank    first",
        "  rank   second          third",
    ]


def test_a_wide_cell_is_wrapped_between_words(terminal_of: Callable[[int], None]) -> None:
    terminal_of(20)
    assert Table("", ["", "n"], [["a name of four words", "10 11 12 13 14"]]).body.splitlines() == [
        "                   n",
        "  a name    10 11 12",
        "  of four      13 14",
        "  words",
    ]


def test_a_text_is_put_below_its_name_if_space_is_short(
    terminal_of: Callable[[int], None],
) -> None:
    text = "a text of several words that is too long"
    terminal_of(40)
    assert entry("ok  ", text) == "ok  a text of several words that is too\n    long"
    assert entry("ok, with a name  ", text).splitlines() == [
        *("ok, with a name", "    a text of several words that is too", "    long"),
    ]
    assert entry(" " * 17, "-> more") == "    -> more"  # continues the entry


def test_words_are_not_broken_in_a_file(terminal_of: Callable[[int], None]) -> None:
    path = "/a/path" * 20
    assert paragraph(f"written: {path}") == f"written:\n{path}"
    terminal_of(100)
    assert max(map(len, paragraph(f"written: {path}").splitlines())) == 100
    assert paragraph("one two", "  ") == "one two"
