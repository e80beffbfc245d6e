"""The report of a script: its crash, the rows, the steps not seen, and the exit code."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from hvdtrain.commands.verify.rows import FAILED, NOT_SEEN, OK, StepRow
from hvdtrain.commands.verify.script.start import ScriptResult, report

Ends = tuple[str | None, ...]


def result(
    *states: str, ended: tuple[str | None, ...] = ("updates",) * 2, updates: int = 5
) -> ScriptResult:
    rows = [StepRow(step, state, f"evidence {step}") for step, state in enumerate(states, start=1)]
    return ScriptResult(rows, list(ended), updates)


def options(updates: str = "5", *, strict: bool = False) -> argparse.Namespace:
    arguments = {"script": Path("my train.py"), "arguments": ["--epochs", "1"]}
    return argparse.Namespace(updates=updates, strict=strict, **arguments)


def test_steps_not_seen_are_not_reported_as_passed() -> None:
    states = [OK] * 6 + [NOT_SEEN] * 2
    shown = report(result(*states), options(), 2)
    assert shown.text.splitlines()[-2:] == [
        "nothing failed, but this is no pass: 2 of 8 not seen (7, 8); to see more, run it to its "
        "end:",
        "  hvdtrain verify -n 2 --updates all --script 'my train.py' -- --epochs 1",
    ]
    assert (shown.exit_code, shown.data["ok"], shown.data["not_seen"]) == (0, True, [7, 8])
    strict = report(result(*states), options(strict=True), 2)
    assert (strict.exit_code, strict.data["ok"]) == (1, False)


def test_a_script_that_ran_to_its_end_needs_no_further_command() -> None:
    shown = report(result(*[OK] * 7, NOT_SEEN, ended=("its own end",) * 2), options("all"), 2)
    assert shown.text.endswith("nothing failed, but this is no pass: 1 of 8 not seen (8)")
    single = report(result(*[OK] * 2, *[NOT_SEEN] * 6, ended=("its own end",)), options("all"), 1)
    assert str(single.data["to_see_more"]).startswith("hvdtrain verify -n 2 --updates all ")


def test_all_seen() -> None:
    shown = report(result(*[OK] * 8), options(strict=True), 2)
    assert (shown.exit_code, shown.text.splitlines()[-1]) == (0, "all steps took effect")


def test_a_crash_comes_first() -> None:
    consequence = "HorovodInternalError: the other rank has gone"
    error = "AttributeError: 'Variable' object has no attribute 'ref' (train.py line 7)"
    shown = report(result(OK, *[NOT_SEEN] * 7, ended=(consequence, error), updates=0), options(), 2)
    lines = shown.text.splitlines()
    assert lines[1] == f"crashed before update 1; nothing was checked: rank 1: {error}"
    assert lines[2].startswith("-> Keras 3: ")
    assert len(lines) == 3  # no table if no row was seen
    assert (shown.exit_code, shown.data["crash"]) == (1, "\n".join(lines[1:]))


@pytest.mark.parametrize(
    ("ended", "updates", "crash"),
    [
        (("updates", "exit code 3"), 2, "crashed after 2 updates: rank 1: exit code 3"),
        (("a hang: ended after 9 s", None), 0, "hung before update 1: rank 0: a hang: ended"),
    ],
)
def test_a_failed_row_is_reported_after_the_crash(ended: Ends, updates: int, crash: str) -> None:
    shown = report(result(*[OK] * 5, FAILED, OK, OK, ended=ended, updates=updates), options(), 2)
    assert shown.text.splitlines()[1].startswith(crash)
    assert "failed  6 equal start" in shown.text
    assert shown.exit_code == 1
