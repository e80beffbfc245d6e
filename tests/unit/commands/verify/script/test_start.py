"""What is told of a script: how it crashed, the rows, what was not seen, and the exit code."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from hvdtrain.commands.verify.rows import FAILED, NOT_SEEN, OK, Row
from hvdtrain.commands.verify.script.start import Watched, report

Ends = tuple[str | None, ...]


def seen(
    *states: str, ended: tuple[str | None, ...] = ("updates",) * 2, updates: int = 5
) -> Watched:
    rows = [Row(step, state, f"evidence {step}") for step, state in enumerate(states, start=1)]
    return Watched(rows, list(ended), updates)


def options(updates: str = "5", *, strict: bool = False) -> argparse.Namespace:
    words = {"script": Path("my train.py"), "arguments": ["--epochs", "1"]}
    return argparse.Namespace(updates=updates, strict=strict, **words)


def test_what_was_not_seen_does_not_read_as_passed() -> None:
    states = [OK] * 6 + [NOT_SEEN] * 2
    found = report(seen(*states), options(), 2)
    assert found.text.splitlines()[-2:] == [
        "nothing failed, but this is no pass: 2 of 8 not seen (7, 8); to see more, run it to its "
        "end:",
        "  hvdtrain verify -n 2 --updates all --script 'my train.py' -- --epochs 1",
    ]
    assert (found.exit_code, found.data["ok"], found.data["not_seen"]) == (0, True, [7, 8])
    strict = report(seen(*states), options(strict=True), 2)
    assert (strict.exit_code, strict.data["ok"]) == (1, False)


def test_no_command_shows_what_the_script_does_not_do() -> None:
    found = report(seen(*[OK] * 7, NOT_SEEN, ended=("its own end",) * 2), options("all"), 2)
    assert found.text.endswith("nothing failed, but this is no pass: 1 of 8 not seen (8)")
    alone = report(seen(*[OK] * 2, *[NOT_SEEN] * 6, ended=("its own end",)), options("all"), 1)
    assert str(alone.data["to_see_more"]).startswith("hvdtrain verify -n 2 --updates all ")


def test_all_seen() -> None:
    found = report(seen(*[OK] * 8), options(strict=True), 2)
    assert (found.exit_code, found.text.splitlines()[-1]) == (0, "nothing failed")


def test_a_crash_comes_first() -> None:
    other = "HorovodInternalError: the other rank has gone"
    error = "AttributeError: 'Variable' object has no attribute 'ref' (train.py line 7)"
    found = report(seen(OK, *[NOT_SEEN] * 7, ended=(other, error), updates=0), options(), 2)
    lines = found.text.splitlines()
    assert lines[1] == f"crashed before update 1; nothing was checked: rank 1: {error}"
    assert lines[2].startswith("-> Keras 3: ")
    assert len(lines) == 3  # no table of what nobody saw
    assert (found.exit_code, found.data["crash"]) == (1, "\n".join(lines[1:]))


@pytest.mark.parametrize(
    ("ended", "updates", "words"),
    [
        (("updates", "exit code 3"), 2, "crashed after 2 updates: rank 1: exit code 3"),
        (("a hang: ended after 9 s", None), 0, "hung before update 1: rank 0: a hang: ended"),
    ],
)
def test_a_row_that_failed_is_told_beside_the_crash(ended: Ends, updates: int, words: str) -> None:
    found = report(seen(*[OK] * 5, FAILED, OK, OK, ended=ended, updates=updates), options(), 2)
    assert found.text.splitlines()[1].startswith(words)
    assert "failed  6 equal start" in found.text
    assert found.exit_code == 1
