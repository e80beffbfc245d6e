"""The estimated time of the remaining runs of a study."""

from __future__ import annotations

import pytest

from hvdtrain.commands.runs.start import time_left


@pytest.mark.parametrize(
    ("durations", "remaining", "text"),
    [
        ({}, "ab", ""),
        ({"a": 10.0}, "a", " (about 10 s to go)"),
        ({"a": 10.0}, "abc", " (about 30 s to go)"),  # the mean for new kinds
        ({"a": 10.0, "b": 30.0}, "abc", " (about 60 s to go)"),
        ({"a": 14.0}, "a" * 39, " (about 9 min to go)"),
        ({"a": 3600.0}, "aa", " (about 2 h to go)"),
        ({"a": 86_400.0}, "aaa", " (about 3 days to go)"),
    ],
)
def test_the_time_left_is_estimated_from_completed_runs(
    durations: dict[str, float], remaining: str, text: str
) -> None:
    assert time_left(durations, remaining) == text
