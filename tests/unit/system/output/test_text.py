"""Numbers, counts and names formatted for users."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from hvdtrain.system.output.text import bandwidth, duration, percent, plural, rank_list, short, size

CASES: dict[Callable[[Any], str], dict[Any, str]] = {
    duration: {
        0: "0 µs",
        1e-6: "1 µs",
        5.74e-6: "5.7 µs",
        9.96e-6: "10 µs",
        0.0009994: "999 µs",
        0.0009996: "1.00 ms",
        0.0501: "50.1 ms",
        0.09996: "100 ms",
        0.9996: "1.00 s",
        75.26: "75.3 s",
        1234.5: "1234 s",
    },
    bandwidth: {
        0: "0 kB/s",
        200: "0.2 kB/s",
        4000: "4 kB/s",
        4e8: "400 MB/s",
        999.6e6: "1 GB/s",
        12.5e9: "12.5 GB/s",
    },
    size: {
        0: "0 B",
        1023: "1023 B",
        1024: "1.0 KiB",
        40_000: "39.1 KiB",
        2**20: "1.0 MiB",
        5 * 2**40: "5120.0 GiB",
    },
    percent: {0: "0 %", 0.034: "3.4 %", 0.0996: "10 %", 1: "100 %"},
    partial(short, length=20): {
        "a" * 50: "a" * 9 + "..." + "a" * 8,
        "gradient": "gradient",
        "red\x1b[31m\n": "red?[31m?",
    },
    partial(plural, noun="rank"): {0: "0 ranks", 1: "1 rank", 2: "2 ranks", 1024: "1,024 ranks"},
    rank_list: {
        (2,): "rank 2",
        (0, 3): "ranks 0, 3",
        range(9): "ranks 0 to 8",
        range(0, 18, 2): "ranks 0, 2, 4, 6, 8, 10, 12, 14 ...",
    },
}


@pytest.mark.parametrize("function", CASES)
def test_each_text(function: Callable[[Any], str]) -> None:
    assert {value: function(value) for value in CASES[function]} == CASES[function]
