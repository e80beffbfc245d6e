"""hvdtrain.keras: a plain ``model.fit`` over the ranks is that of one process."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.conftest import LONG, ROOT
from tests.parallel import resident
from tests.parallel.conftest import run_script

# Ways to train (functions of the script): all of them over two ranks, those that depend on the
# number of ranks over three, too.
WAYS = {1: "plain,rates", 2: "all", 3: "plain,datasets,own_loop,resumed"}


@pytest.mark.parametrize("number", WAYS)
def test_fit_is_that_of_one_process(number: int, tmp_path: Path) -> None:
    """Uneven tails, clipping, accumulation, several steps a call, callbacks, resume, and misuse."""
    words = (str(tmp_path), "all" if LONG else WAYS[number])
    run_script(number, "keras_fit.py", *words, folder=tmp_path, framework="tensorflow")


def test_horovods_own_wrapper_trains_two_models(tmp_path: Path) -> None:
    """With ``horovod.tensorflow.keras`` the weights go apart: why this package is there."""
    run_script(2, "keras_horovod.py", str(tmp_path), folder=tmp_path, framework="tensorflow")
    weights = [(tmp_path / f"{rank}-of-2").read_text() for rank in range(2)]
    assert weights[0] != weights[1]


def test_the_homework_with_fit(tmp_path: Path) -> None:
    script = str(ROOT / "homework" / "tensorflow2_keras_mnist_hvd.py")
    options = ["--epochs=2", "--lr=0.02", "--warmup-epochs=1", f"--out={tmp_path}"]
    outcome = resident.ranks(2, script, *options, framework="tensorflow")
    assert outcome.code == 0, outcome.err[-3000:]
    assert [line.split(":")[0] for line in outcome.out.splitlines()] == ["epoch 1", "epoch 2"]
    with (tmp_path / "metrics_2.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[1]["train_loss"]) < float(rows[0]["train_loss"])
    assert (tmp_path / "model.weights.h5").is_file()


@pytest.mark.parametrize(
    ("sets", "when"),
    [([[0, 1], [2]], "start"), ([[0, 2], [1, 3]], "dynamic")][: None if LONG else 1],
)
def test_process_sets_train_a_model_each(sets: list[list[int]], when: str, tmp_path: Path) -> None:
    """Each as one process on the data of the set; one rank fails at the end, and so the job."""
    number = sum(map(len, sets))
    words = (str(tmp_path), json.dumps(sets), when)
    run_script(number, "keras_sets.py", *words, folder=tmp_path, framework="tensorflow", code=1)
