"""Files with a known name and unexpected content are left out, each with the cause."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import cli
from hvdtrain.commands.report.find import look
from hvdtrain.commands.report.page import render
from hvdtrain.commands.scaling.runs import append_line
from tests.studies import run, summary

COMPLETE = {"steps_completed": 7}


def write_summary(folder: Path, name: str = "good.json", **changed: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(summary(2, **{**COMPLETE, **changed})))


def step(number: Any, **values: Any) -> str:
    return json.dumps({"kind": "step", "step": number, **values}) + "\n"


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        (
            {"images_per_second_mean": "10"},
            "images_per_second_mean: expected `float | null`, got `str`",
        ),
        (
            {"images_per_second_mean": True},
            "images_per_second_mean: expected `float | null`, got `bool`",
        ),
        ({"seconds_total": 10**400}, "seconds_total: number out of range"),
        ({"eval_accuracy": [0.5]}, "eval_accuracy: expected `float | null`"),
        ({"gradient_messages": {}}, "gradient_messages: object missing required field `count`"),
        (
            {"gradient_messages": {"count": 3}},
            "gradient_messages: object missing required field `bytes`",
        ),
        ({"gradient_messages": 3}, "gradient_messages: expected `object | null`, got `int`"),
        ({"step_split": {"data": "much"}}, "step_split.data: expected `float | null`"),
        ({"step_split": [1]}, "step_split: expected `object | null`, got `array`"),
    ],
)
def test_a_summary_with_invalid_values(values: dict[str, Any], cause: str, tmp_path: Path) -> None:
    write_summary(tmp_path)
    write_summary(tmp_path, "odd.json", **values)
    contents = look(tmp_path)
    assert list(map(str, contents.summaries)) == ["good.json"]
    (note,) = contents.notes
    assert note.startswith(f"odd.json: {cause}")
    assert "odd.json" in render(contents)


@pytest.mark.parametrize("value", [None, 0, 3, 0.5, float("nan"), float("inf")])
def test_the_summary_of_a_diverged_training_is_shown(value: Any, tmp_path: Path) -> None:
    names = ("images_per_second_mean", "eval_accuracy", "eval_loss", "seconds_total")
    write_summary(tmp_path, **dict.fromkeys(names, value), gradient_messages=None)
    contents = look(tmp_path)
    assert not contents.notes
    assert "<h2>Result</h2>" in render(contents)


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("{}", "missing step"),
        ("[1]", "not a JSON object"),
        ('{"step": 3, "metrics": [1]}', "metrics: expected `object | null`"),
        ('{"step": 3, "metrics": {"accuracy": "all"}}', "accuracy: expected `float | null`"),
        ('{"a":' * 100_000, ""),
    ],
)
def test_a_checkpoint_without_a_valid_state(state: str, cause: str, tmp_path: Path) -> None:
    write_summary(tmp_path)
    for name, text in (("step-000000001", '{"step": 1}'), ("step-000000003", state)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text(text)
    contents = look(tmp_path)
    assert list(map(str, contents.checkpoints)) == ["step-000000001"]
    (note,) = contents.notes
    assert note.startswith("step-000000003/state.json: ")
    assert cause in note
    render(contents)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("garbage\n", "line 2: "),
        (step(2, loss="x"), "line 2: loss: expected `float | null`"),
        (step(None), "line 2: missing step"),
        (step("2"), "line 2: step: expected `float | null`"),
        (step(float("inf")), "line 2: "),
        ('{"kind": "step", "step": 1e999}\n', "line 2: "),
        ("[1]\n", "line 2: not a training record"),
        ('{"kind": [1], "step": 2}\n', "line 2: not a training record"),
    ],
)
def test_curves_with_an_invalid_line_are_left_out(line: str, cause: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(step(1, loss=1) + line + step(3, loss=0.5))
    (tmp_path / "other.jsonl").write_text(step(1, loss=1) + step(3, loss=0.5) + line[:-1])
    contents = look(tmp_path)
    assert [str(run.path) for run in contents.curves] == ["other.jsonl"]  # its last line is invalid
    (note,) = contents.notes
    assert note.startswith(f"metrics.jsonl: {cause}")
    render(contents)


def write_study(folder: Path, **changed: Any) -> None:
    """Write a study whose first run has a changed summary."""
    file = folder / "results.jsonl"
    for record in (run(1), run(2)):
        append_line(file, record)
    first, second = file.read_text().splitlines()
    line = json.loads(first)
    line["summary"] |= changed
    file.write_text(f"{json.dumps(line)}\n{second}\n")


def test_a_study_with_an_incomplete_summary(tmp_path: Path) -> None:
    write_summary(tmp_path)
    write_study(tmp_path, gradient_messages={"n": 1})
    contents = look(tmp_path)
    assert contents.study is None
    (note,) = contents.notes
    assert "results.jsonl, line 1: not a run of a sweep" in note
    assert "gradient_messages: object missing required field `count`" in note
    render(contents)


def test_an_invalid_study_does_not_affect_other_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_summary(tmp_path)
    write_study(tmp_path, hosts="one")
    assert cli.main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "summaries: 1" in printed
    assert "results.jsonl, line 1: not a run of a sweep" in printed
    assert "hosts: expected `int | null`, got `str`" in printed


def test_the_causes_are_reported_if_no_file_is_valid(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    write_summary(tmp_path, "odd.json", gradient_messages={})
    message = refused("report", str(tmp_path))
    assert "Left out: odd.json: gradient_messages: object missing required field `count`" in message
