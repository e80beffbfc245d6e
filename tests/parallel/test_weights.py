"""Losses that are means over tokens, pixels or boxes, whose numbers differ from rank to rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.parallel.conftest import LONG, SCRIPTS, SIZES, WAYS, assert_close, run_script, train

EXACT = ("--precision=fp64", "--lr-scaling=none", "--lr=0.3", "--warmup-epochs=0", "--epochs=3")


@pytest.mark.parametrize(("strategy", "number"), SIZES)
def test_loops_in_pytorch_equal_one_process(strategy: str, number: int, tmp_path: Path) -> None:
    """Padding, weights of classes, pixels, boxes; accumulated and clipped; two denominators."""
    run_script(number, "weighted_pytorch.py", strategy, str(tmp_path), folder=tmp_path)


@pytest.mark.parametrize(
    ("strategy", "number"),
    [
        (name, number)
        for name in ("single", "horovod", "mpi")
        for number in (1, 2, 3)
        if (name == "single") == (number == 1) and (LONG or (name, number) != ("mpi", 2))
    ],
)
def test_loops_in_tensorflow_equal_one_process(strategy: str, number: int, tmp_path: Path) -> None:
    """Eager and traced, accumulated by Keras, with a loss scale; parts of nothing but padding."""
    script = "weighted_tensorflow.py"
    run_script(number, script, strategy, str(tmp_path), folder=tmp_path, framework="tensorflow")


@pytest.mark.parametrize("way", WAYS)
def test_a_task_whose_samples_have_weights(way: tuple[str, ...], tmp_path: Path) -> None:
    task = str(SCRIPTS / "weighted_task.py")
    options = (task, *way, *EXACT, "--clip-norm=0.2", "--global-batch-size=12")
    one = train(1, tmp_path / "1", "train", *options)
    two = train(2, tmp_path / "2", "train", *options, "--accumulate-steps=3")
    three = train(3, tmp_path / "3", "train", *options)
    for other in (two, three):
        assert_close(one, other, 1e-9)
        for name in ("train_loss", "eval_loss"):
            assert other.summary[name] == pytest.approx(one.summary[name], rel=1e-9)
    if "tensorflow" not in way[0]:
        assert one.summary["eval_loss"] == pytest.approx(mean_over_words(one.tensors()), rel=1e-9)


def mean_over_words(weights: dict[str, np.ndarray]) -> float:
    """The mean cross-entropy of the words of the test set, in NumPy."""
    from tests.parallel.scripts.weighted_task import TRAINING, WORDS, X

    hidden = np.tanh(X[TRAINING:] @ weights["0.weight"].T + weights["0.bias"])
    logits = hidden @ weights["2.weight"].T + weights["2.bias"]
    log_shares = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    words = WORDS[TRAINING:]
    chosen = np.take_along_axis(log_shares, np.maximum(words, 0)[..., None], -1)[..., 0]
    return float(-chosen[words >= 0].mean())
