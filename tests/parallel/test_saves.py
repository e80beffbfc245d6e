"""Checkpoints that the trainers write in the background."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

from tests.conftest import ranks
from tests.parallel.conftest import SCRIPTS, Training, assert_bit_equal, train

FAULTY = str(SCRIPTS / "faulty_trainer.py")
WAYS = ("--strategy=horovod", "--strategy=zero", "--strategy=fsdp", "--framework=tensorflow")


def content(folder: Path) -> dict[str, bytes]:
    """The bytes of each tensor of each checkpoint."""
    return {
        f"{file.relative_to(folder)} {name}": value.tobytes()
        for file in sorted(folder.glob("checkpoints/step-*/*.safetensors"))
        for name, value in safetensors.numpy.load_file(file).items()
    }


@pytest.mark.parametrize("way", WAYS)
def test_what_is_saved_in_the_background_is_what_is_saved_in_place(
    way: str, tmp_path: Path
) -> None:
    options = (way, "--model=small", "--num-steps=10", "--checkpoint-every=3", "--keep=9")
    for name in ("async", "sync"):
        (tmp_path / name).mkdir()
        saved = train(2, tmp_path / name, "mnist", *options, f"--save={name}")
        assert saved.summary["saves"]["count"] == 4 and saved.summary["saves"]["every"] == 3
    first, second = (content(tmp_path / name) for name in ("async", "sync"))
    assert first.keys() == second.keys() and len({key[:26] for key in first}) == 4
    assert first == second


EPOCHS = ("--model=small", "--epochs=3", "--global-batch-size=70", "--dropout=0")  # of 22 steps


def epochs(folder: Path) -> list[dict[str, Any]]:
    """The figures of each epoch in ``--metrics``, without times."""
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [
        {key: value for key, value in line.items() if key not in ("kind", "seconds", "elapsed")}
        for line in lines
        if line["kind"] == "epoch"
    ]


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> Training:
    folder = tmp_path_factory.mktemp("uncut")
    return train(2, folder, "mnist", *EPOCHS, f"--metrics={folder / 'metrics.jsonl'}")


@pytest.mark.parametrize("event", ["update:22", "update:66", "evaluation:44", "lost:44"])
def test_the_end_of_an_epoch_that_was_interrupted_is_made_up(
    event: str, uncut: Training, tmp_path: Path
) -> None:
    """A save that was begun before the evaluation is complete when a rank is lost in it."""
    options = (*EPOCHS, "--checkpoint-every=22", f"--metrics={tmp_path / 'metrics.jsonl'}")
    line = (*options, f"--checkpoint-dir={tmp_path / 'checkpoints'}", "--quiet")
    outcome = ranks(2, FAULTY, f"stop:{event}", *line)
    assert outcome.code == 75 or event == "lost:44", outcome.err[-3000:]
    newest = sorted((tmp_path / "checkpoints").glob("step-*"))[-1]
    state = json.loads((newest / "state.json").read_text())
    assert (state["step"], state["stopped"]) == (int(event[-2:]), None)
    resumed = train(2, tmp_path, "mnist", *options, "--resume=must")
    for record, expected in zip(epochs(tmp_path), epochs(uncut.folder), strict=True):
        assert record == pytest.approx(expected, rel=1e-12)
    assert_bit_equal(uncut, resumed)


@pytest.mark.parametrize("lasting", [False, True])
def test_the_training_continues_after_a_save_that_failed(lasting: bool, tmp_path: Path) -> None:
    options = ("--model=small", "--num-steps=20", "--checkpoint-every=6", "--keep=9")
    folder = tmp_path / "checkpoints"
    summary = tmp_path / "summary.json"
    line = (*options, f"--checkpoint-dir={folder}", f"--summary={summary}")
    outcome = ranks(2, FAULTY, f"full:5:{99 if lasting else 15}", *line)
    saved = sorted(path.name for path in folder.iterdir())
    assert saved == ([] if lasting else ["step-000000018", "step-000000020"])
    assert outcome.code == (1 if lasting else 0), outcome.err
    text = "checkpoint of step {} cannot be written to {}: File too large. Free some space"
    steps = (6, 12, 18, 20) if lasting else (6, 12)
    lines = [line for line in outcome.said if "cannot be written" in line]
    assert len(lines) == len(steps), outcome.err
    for step, line in zip(steps, lines, strict=True):
        assert text.format(step, folder) in line
        assert (". The next save tries again" in line) == (step < 20)
    result = json.loads(summary.read_text())
    assert (result["stopped"], result["steps_completed"]) == ("steps", 20)
    assert result["checkpoint"] == (None if lasting else str(folder / "step-000000020"))


def test_a_full_disk_does_not_hide_why_the_training_ended(tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    line = ("--model=small", f"--checkpoint-dir={tmp_path / 'saved'}", f"--summary={summary}")
    outcome = ranks(2, FAULTY, "full:2:99,nan", *line, code=1)
    warning, error = outcome.said
    assert "checkpoint of step 3 cannot be written" in warning
    assert "error: the gradients of step 4 (epoch 1) are not finite" in error
    assert json.loads(summary.read_text())["stopped"] == "diverged"
