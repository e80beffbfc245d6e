"""``--evaluate-only`` and ``--predict``: one file at any number of ranks, and what is refused."""

from __future__ import annotations

import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.steps.summary import Summary
from hvdtrain.workloads.mnist.data import embedded_digits
from tests.conftest import LONG, ROOT, Outcome
from tests.parallel import resident
from tests.parallel.conftest import FRAMEWORKS, SOME, assert_one_line, train

DIGITS = ("--model=small", "--precision=fp64")
OWN = {"pytorch": "own_task.py", "tensorflow": "own_task_tf.py"}
EVALUATION = ("eval_loss", "eval_accuracy", "eval_metrics", "eval_samples")


def evaluate(number: int, *words: str, code: int = 0) -> Outcome:
    outcome = resident.ranks(number, "-m", *words, "--quiet", code=code)
    return outcome


def without_probability(file: Path) -> list[str]:
    return [line.rpartition(",")[0] for line in file.read_text().splitlines()]


def assert_evaluation(text: str, found: Summary, trained: dict[str, Any]) -> None:
    """The file has a line per digit; file and summary tell what the training found at its end."""
    header, *lines = text.splitlines()
    assert header == "sample,label,prediction,probability"
    assert all(re.fullmatch(r"\d+,\d,\d,(0\.\d{9,}|1\.0{8})", one) for one in lines)
    rows = [one.split(",") for one in lines]
    assert [int(row[0]) for row in rows] == list(range(297))
    assert [int(row[1]) for row in rows] == embedded_digits()[1].labels.tolist()
    right = sum(row[1] == row[2] for row in rows)
    assert found.eval_accuracy == right / 297
    for key in EVALUATION:  # on as many ranks, the batches are those of the evaluation in training
        assert getattr(found, key) == trained[key]
    assert (found.steps_completed, found.samples_trained) == (8, trained["samples_trained"])
    assert (found.stopped, found.train_loss, found.images_per_second_mean) == (
        *("finished", None, None),
    )


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_digits_at_1_2_and_3_ranks(framework: str, tmp_path: Path) -> None:
    """297 samples; one file goes through a link, one is a pipe, one is of another strategy."""
    line = (*DIGITS, f"--framework={framework}", "--ema=0.9")
    trained = train(2, tmp_path, "mnist", *line, "--num-steps=8").summary
    where, summary = f"--checkpoint={trained['checkpoint']}", tmp_path / "evaluated.json"
    target, link, pipe = tmp_path / "target.csv", tmp_path / "link.csv", tmp_path / "pipe"
    target.write_text("what was here before\n")
    link.symlink_to(target)
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()), daemon=True)
    reader.start()

    evaluate(1, "hvdtrain.mnist", *line, where, f"--predict={pipe}")
    reader.join(timeout=10)
    evaluate(2, "hvdtrain.mnist", *line, where, f"--predict={link}", f"--summary={summary}")
    evaluate(3, "hvdtrain.mnist", *line, where, f"--predict={tmp_path / 'three.csv'}")

    assert link.is_symlink()
    text = target.read_text()
    assert received == [text.encode()]
    assert (tmp_path / "three.csv").read_text() == text
    if framework == "pytorch":
        # They wrap the model, share the state of the optimizer, and cut both in parts.
        for strategy in ("ddp", "zero", "fsdp"):
            file, told = tmp_path / f"{strategy}.csv", tmp_path / f"{strategy}.json"
            other = (*line, f"--strategy={strategy}", f"--predict={file}", f"--summary={told}")
            evaluate(2, "hvdtrain.mnist", *other, where)
            assert file.read_text() == text
            norm = Summary.read(told).parameter_norm
            assert norm == pytest.approx(trained["parameter_norm"], rel=1e-12)

    assert_evaluation(text, Summary.read(summary), trained)

    # The weights of fp64 in fp32: the last digits may differ, the classes do not.
    for number in (2, 3) if LONG else (3,):
        file = f"--predict={tmp_path / f'fp32-{number}.csv'}"
        evaluate(number, "hvdtrain.mnist", *line, "--precision=fp32", where, file)
        single = without_probability(tmp_path / f"fp32-{number}.csv")
        assert single == without_probability(target)
    assert not list(tmp_path.glob(".*partial*"))


@pytest.mark.parametrize("framework", SOME)
def test_images_at_1_and_3_ranks(framework: str, few_images: Path, tmp_path: Path) -> None:
    """Ten real JPEGs, then two, fewer than ranks; the newest checkpoint of a directory."""
    line = (
        *("--model=resnet18", "--image-size=32", f"--framework={framework}", "--precision=fp64"),
        *("--batch-size=1", "--workers=0"),
    )
    steps = (f"--data={few_images}", "--num-steps=3", "--check-replicas=1")
    train(2, tmp_path, "resnet", *line, *steps)
    two = tmp_path / "two"
    shutil.copytree(few_images, two, symlinks=True)
    for place, label in enumerate(sorted((two / "val").iterdir())):
        if place not in (2, 7):
            shutil.rmtree(label)
    rows = {}
    for number, data in ((1, few_images), (3, few_images), (3, two)):
        file = tmp_path / "predicted.csv"
        where = f"--checkpoint={tmp_path / 'checkpoints'}"
        line_of = (*line, f"--data={data}", f"--predict={file}", where)
        evaluate(number, "hvdtrain.resnet", *line_of)
        rows[number, data] = [row.split(",")[1:] for row in file.read_text().splitlines()[1:]]
    alone = rows[1, few_images]
    assert [int(row[0]) for row in alone] == list(range(10))  # labels
    assert rows[3, few_images] == alone
    assert rows[3, two] == [alone[2], alone[7]]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_task_of_ones_own_names_its_columns(framework: str, tmp_path: Path) -> None:
    line = (
        *("hvdtrain.train", str(ROOT / "examples" / OWN[framework])),
        *(f"--framework={framework}", "--precision=fp64"),
        f"--checkpoint-dir={tmp_path / 'checkpoints'}",
    )
    evaluate(2, *line, "--epochs=1", "--global-batch-size=88")
    for number in (1, 2, 3):
        evaluate(number, *line, f"--predict={tmp_path / f'{number}.csv'}")
    text = (tmp_path / "1.csv").read_text()
    assert (tmp_path / "2.csv").read_text() == (tmp_path / "3.csv").read_text() == text
    header, *lines = text.splitlines()
    assert (header, len(lines)) == ("sample,measured,predicted", 89)
    assert all(re.fullmatch(r"\d+(,-?\d\.\d+){2}", one) for one in lines), lines[0]


def test_what_cannot_be_evaluated_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    saved = train(1, tmp_path, "mnist", *DIGITS, "--num-steps=0").newest
    damaged = tmp_path / "step-000000001"
    shutil.copytree(saved, damaged)
    with (damaged / "model.safetensors").open("ab") as file:
        file.write(b"x")
    out = tmp_path / "out.csv"
    for line, words in (
        ((f"--checkpoint={tmp_path / 'nothing'}",), "nothing: No such file or directory"),
        ((f"--checkpoint={saved / 'state.json'}",), "state.json: Not a directory"),
        ((f"--checkpoint={tmp_path / 'empty'}",), "there is no checkpoint in"),
        ((f"--checkpoint={damaged}",), "step-000000001 is damaged (ValueError: the checksum of"),
        ((f"--checkpoint={saved}", "--model=tutorial"), "model 'small' there, 'tutorial' here"),
        ((f"--checkpoint={saved}", "--ema=0.9"), "optimizer 'sgd' there, 'sgd --ema' here"),
    ):
        (tmp_path / "empty").mkdir(exist_ok=True)
        number = 2 if "tutorial" in line[-1] else 1
        outcome = evaluate(number, "hvdtrain.mnist", *DIGITS, *line, f"--predict={out}", code=2)
        assert_one_line(outcome, 2, words)
        assert not out.exists()
