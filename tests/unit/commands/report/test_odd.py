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
    "good.jsonl": step(1, loss=1) + step(3, loss=0.5) + "cut off",  # its last line is invalid
}
LINES = {
    "garbage\n": "line 2: ",
    step(2, loss="x"): "line 2: loss: expected `float | null`",
    step(None): "line 2: missing step",
    step("2"): "line 2: step: expected `float | null`",
    step(float("inf")): "line 2: ",
    '{"kind": "step", "step": 1e999}\n': "line 2: ",
    "[1]\n": "line 2: not a training record",
    '{"kind": [1], "step": 2}\n': "line 2: not a training record",
}
ODD = [
    (
        "odd.json",
        result(images_per_second_mean="10"),
        "images_per_second_mean: expected `float | null`",
    ),
    (
        "odd.json",
        result(images_per_second_mean=True),
        "images_per_second_mean: expected `float | null`",
    ),
    ("odd.json", result(seconds_total=10**400), "seconds_total: number out of range"),
    ("odd.json", result(eval_accuracy=[0.5]), "eval_accuracy: expected `float | null`"),
    (
        "odd.json",
        result(gradient_messages={}),
        "gradient_messages: object missing required field `count`",
    ),
    (
        "odd.json",
        result(gradient_messages={"count": 3}),
        "gradient_messages: object missing required field `bytes`",
    ),
    ("odd.json", result(gradient_messages=3), "gradient_messages: expected `object | null`"),
    ("odd.json", result(step_split={"data": "much"}), "step_split.data: expected `float | null`"),
    ("odd.json", result(step_split=[1]), "step_split: expected `object | null`"),
    (STATE, "{}", "missing step"),
    (STATE, "[1]", "not a JSON object"),
    (STATE, '{"step": 3, "metrics": [1]}', "metrics: expected `object | null`"),
    (STATE, '{"step": 3, "metrics": {"accuracy": "all"}}', "accuracy: expected `float | null`"),
    (STATE, '{"a":' * 100_000, ""),
    *(("odd.jsonl", step(1) + line + step(3), cause) for line, cause in LINES.items()),
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


def test_what_was_left_out_is_on_the_page(tmp_path: Path) -> None:
    write(tmp_path, "good.json", result())
    for name, content, _ in ODD:
        write(tmp_path, name, content)
    page = render(look(tmp_path))
    assert all(f"<li>{name}: " in page for name, _, _ in ODD)


@pytest.mark.parametrize("value", [None, 0, 3, 0.5, float("nan"), float("inf")])
def test_the_summary_of_a_diverged_training_is_shown(value: Any, tmp_path: Path) -> None:
    names = ("images_per_second_mean", "eval_accuracy", "eval_loss", "seconds_total")
    write(tmp_path, "good.json", result(**dict.fromkeys(names, value), gradient_messages=None))
    contents = look(tmp_path)
    assert not contents.notes
    assert "<h2>Result</h2>" in render(contents)


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        (
            {"gradient_messages": {"n": 1}},
            "gradient_messages: object missing required field `count`",
        ),
        ({"hosts": "one"}, "hosts: expected `int | null`"),
    ],
)
def test_an_odd_study_does_not_affect_other_results(
    changed: dict[str, Any], cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "good.json", result())
    file = tmp_path / "results.jsonl"
    for record in (run(1), run(2)):
        append_line(file, record)
    first, second = file.read_text().splitlines()
    line = json.loads(first)
    line["summary"] |= changed
    file.write_text(f"{json.dumps(line)}\n{second}\n")
    assert cli.main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "summaries: 1" in printed and "studies" not in printed
    assert "results.jsonl, line 1: not a run of a sweep" in printed
    assert cause in printed


def test_the_causes_are_reported_if_no_file_is_valid(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    write(tmp_path, "odd.json", result(gradient_messages={}))
    message = refused("report", str(tmp_path))
    assert "Left out: odd.json: gradient_messages: object missing required field `count`" in message
