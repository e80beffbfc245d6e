"""Numbers, counts and names formatted for users."""

from __future__ import annotations

import pytest

from hvdtrain.system.output.text import (
    duration,
    percent,
    plural,
    rank_list,
    short,
    size,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 µs"),
        (1e-6, "1 µs"),
        (0.0009994, "999 µs"),
        (0.0009996, "1.00 ms"),
        (0.0501, "50.1 ms"),
        (0.09996, "100 ms"),
        (0.9996, "1.00 s"),
        (75.26, "75.3 s"),
        (1234.5, "1234 s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (40_000, "39.1 KiB"),
        (2**20, "1.0 MiB"),
        (5 * 2**40, "5120.0 GiB"),
    ],
)
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0 %"), (0.034, "3.4 %"), (0.0996, "10 %"), (1, "100 %")]
)
def test_shares(share: float, text: str) -> None:
    assert percent(share) == text


def test_long_and_strange_names() -> None:
    assert short("a" * 50, 20) == "a" * 9 + "..." + "a" * 8
    assert short("gradient", 20) == "gradient"
    assert short("red\x1b[31m\n", 20) == "red?[31m?"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), (1024, "1,024 ranks")]
)
def test_plurals(count: int, text: str) -> None:
    assert plural(count, "rank") == text


def test_lists_of_ranks() -> None:
    assert rank_list([2]) == "rank 2"
    assert rank_list([0, 3]) == "ranks 0, 3"
    assert rank_list(range(9)) == "ranks 0 to 8"
    assert rank_list(range(0, 18, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 ..."
    assert rank_list(range(3), most=2) == "ranks 0, 1 ..."
