"""The time to an accuracy at each number of ranks, from the files of a study."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.commands.runs.records import LINES, append_line
from tests.studies import run

# By ranks and repeat: seconds and accuracy at the end of each epoch.
CURVES = {
    (1, 1): [(10.0, 0.5), (20.0, 0.9), (30.0, 0.95)],
    (1, 2): [(12.0, 0.5), (24.0, 0.9), (36.0, 0.95)],
    (2, 1): [(6.0, 0.4), (12.0, 0.8), (18.0, 0.92)],
    (4, 1): [(4.0, 0.3), (8.0, 0.6), (12.0, 0.7)],
}


@pytest.fixture
def study(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    for (ranks, repeat), curve in CURVES.items():
        append_line(tmp_path / LINES, run(ranks, repeat, rate=100.0 * ranks))
        records = [
            {
                "kind": "epoch",
                "step": epoch,
                "epoch": epoch,
                "elapsed": seconds,
                "eval_accuracy": accuracy,
            }
            for epoch, (seconds, accuracy) in enumerate(curve)
        ]
        text = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / "runs" / f"{ranks}-{repeat}.jsonl").write_text(text)
    return tmp_path


def test_the_time_at_each_size(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["scaling", "--out", str(study), "--target", "accuracy=0.9"]
    assert cli.main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["target"] == {
        "metric": "accuracy",
        "value": 0.9,
        "sizes": [
            {"ranks": 1, "seconds": 22.0, "speedup": 1.0, "runs": 2},
            {"ranks": 2, "seconds": 18.0, "speedup": 22 / 18, "runs": 1},
            {"ranks": 4, "seconds": None, "speedup": None, "runs": 1},
        ],
    }
    assert str(study / "target.png") in data["files"]
    assert (study / "target.pdf").read_bytes().startswith(b"%PDF")
    assert cli.main(words) == 0
    assert "not reached" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "map=0.5"], "no run in {} has an evaluation with this metric"),
        (["--target", "accuracy=0.5", "--from", "x.csv"], "--target needs the training curves"),
    ],
)
def test_a_target_without_evaluations_is_reported(
    words: list[str], message: str, study: Path, refused: Callable[..., str]
) -> None:
    assert message.format(study) in refused("scaling", "--out", str(study), *words)
