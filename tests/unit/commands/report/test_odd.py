"""Files with a known name and unexpected content: a run's, a study's, a comparison's.

A report leaves them out, each with the cause that the verb of the study gives as its error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import cli
from hvdtrain.commands.report.find import look
from hvdtrain.commands.report.page import render
from hvdtrain.commands.study.run import encode_record
from hvdtrain.system.files import MAX_READ
from tests.conftest import run
from tests.studies import DDP, WORDS, summary, trial


def result(**changed: Any) -> str:
    """Return the summary of a run."""
    return json.dumps(summary(2, **{"steps_completed": 7, **changed}))


def step(number: Any, **values: Any) -> str:
    return json.dumps({"kind": "step", "step": number, **values}) + "\n"


def write(folder: Path, name: str, content: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content)


STATE = "step-000000003/state.json"
GOOD = {
    "good.json": result(),
    "step-000000001/state.json": '{"step": 1}',
    "good.jsonl": step(1, loss=1) + "[2]\n" + step(3, loss=0.5) + "cut off",
}
WRONG = {"images_per_second_mean": "10"}, "images_per_second_mean: expected `float | null`"
ODD = [
    ("odd.json", result(**WRONG[0]), WRONG[1]),
    ("odd.json", result()[:-9], ""),
    (STATE, "{}", "step"),
    (STATE, '{"step": 3,', ""),
]


def test_a_name_in_a_plot_does_not_reach_the_terminal(tmp_path: Path) -> None:
    """Through matplotlib's warning on a letter that its fonts lack."""
    epoch = {"kind": "epoch", "step": 3, "eval_loss": 1.0, "eval_\x1b[2J": 0.5}
    write(tmp_path, "m.jsonl", step(1, loss=1) + step(3, loss=0.5) + json.dumps(epoch) + "\n")
    outcome = run([sys.executable, "-m", "hvdtrain.cli", "report", "."], cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert "Glyph 27 (\\x1b)" in outcome.err and "\x1b" not in outcome.err


def sweep_line(**changed: Any) -> str:
    """Return a line of a scaling study; ``changed``: keys of its summary."""
    content = {"ranks": 1, "repeat": 1, "command": WORDS, "summary": summary(1, **changed)}
    return json.dumps(content)


def trial_line(**changed: Any) -> str:
    """Return a line of a comparison; ``changed``: its keys."""
    return json.dumps({**encode_record(trial(DDP)), **changed})


RECORDS = [  # the second of three lines
    ("results.jsonl", "[]", ""),
    ("results.jsonl", "{", ""),
    ("results.jsonl", sweep_line(**WRONG[0]), WRONG[1]),
    ("compare.jsonl", trial_line(method={"strategy": "ddp"}), "`framework`"),
    ("compare.jsonl", trial_line(command=3), "command"),
]


@pytest.mark.parametrize(("name", "content", "cause"), ODD)
def test_an_odd_file_is_left_out_with_the_cause(
    name: str, content: str, cause: str, tmp_path: Path
) -> None:
    for good in GOOD.items():
        write(tmp_path, *good)
    write(tmp_path, name, content)
    contents = look(tmp_path)
    shown = [*contents.summaries, *contents.checkpoints, *(run.path for run in contents.curves)]
    assert list(map(str, shown)) == ["good.json", "step-000000001", "good.jsonl"]
    (note,) = contents.notes
    assert note.startswith(f"{name}: ")
    assert cause in note


def test_what_is_too_large_is_left_out(tmp_path: Path) -> None:
    large = ("big.jsonl", "compare.jsonl", "results.jsonl", STATE)
    for name in large:
        write(tmp_path, name, "")
        os.truncate(tmp_path / name, MAX_READ + 1)
    notes = [note for note in look(tmp_path).notes if "more than " in note]
    assert all(any(name in note for note in notes) for name in large)


@pytest.mark.parametrize("value", [None, 0, float("nan")])
def test_the_summary_of_a_diverged_training_is_shown(value: Any, tmp_path: Path) -> None:
    names = ("images_per_second_mean", "eval_accuracy", "eval_loss", "seconds_total")
    write(tmp_path, "good.json", result(**dict.fromkeys(names, value), gradient_messages=None))
    contents = look(tmp_path)
    assert not contents.notes
    assert "<h2>Result</h2>" in render(contents)


@pytest.mark.parametrize(("name", "line", "cause"), RECORDS)
def test_an_odd_study_does_not_affect_other_results(
    name: str, line: str, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "good.json", result())
    good = sweep_line() if name == "results.jsonl" else trial_line()
    write(tmp_path, name, f"{good}\n{line}\n{good}\n")
    assert cli.main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "summaries: 1" in printed and "studies" not in printed and "comparisons" not in printed
    kind = "sweep" if name == "results.jsonl" else "comparison"
    assert f"{name}, line 2: not a run of a {kind} " in printed
    assert cause in printed


def test_the_causes_are_reported_if_no_file_is_valid(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    write(tmp_path, "odd.json", result(gradient_messages={}))
    message = refused("report", str(tmp_path))
    assert "Left out: odd.json: gradient_messages: object missing required field `count`" in message
