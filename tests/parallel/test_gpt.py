"""The GPT of examples/: a mean over tokens, equal at any number of ranks, under each strategy."""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hvdtrain.steps.learning_rate import LearningRate
from hvdtrain.steps.sharding import permutation
from tests.conftest import ROOT
from tests.parallel import resident
from tests.parallel.conftest import STRATEGIES, Tensors, Training, assert_close, difference

EXAMPLES = str(ROOT / "examples")
EPOCHS, CUT = 3, 8  # a checkpoint within the second epoch, of 6 updates each


def text() -> str:
    """Return paragraphs of 1 to 24 letters, some of which are longer than a block."""
    draw = random.Random(0)
    return "\n\n".join("".join(draw.choices("abcd ", k=draw.randint(1, 24))) for _ in range(36))


# 51 documents to train on and 6 to test on: the last micro-batch of an epoch, which is an update,
# and that of the test have one document, which other ranks have no part of.
SMALL = {
    **{"BLOCK": 12, "LAYERS": 2, "HEADS": 2, "DIM": 8, "VOCABULARY": 128},
    **{"BATCH": 5, "ACCUMULATE": 2, "EVERY": 8, "topics": {"": text()}},
}
SCRIPT = f"""
import sys
sys.path.insert(0, {EXAMPLES!r})
import gpt
vars(gpt).update({SMALL!r})
"""
LOOP = f"""{SCRIPT}
gpt.torch.set_default_dtype(gpt.torch.float64)
gpt.main()
"""
TASK = f"""{SCRIPT}
from gpt_task import task
"""


@pytest.fixture
def gpt(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module in this process, small and in double precision."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import gpt

    vars(gpt).update(SMALL)
    torch.set_default_dtype(torch.float64)
    yield gpt
    torch.set_default_dtype(torch.float32)
    del sys.modules["gpt"]


def one_process(gpt: ModuleType) -> tuple[Tensors, float]:
    """Train without hvdtrain, on all documents of an update at once; return weights and perplexity.

    The perplexity is that of documents of which each is alone, without padding.
    """
    torch.manual_seed(0)
    train, test = gpt.documents()
    model = gpt.GPT()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    rate = LearningRate(gpt.RATE, 1.0, EPOCHS, gpt.WARMUP, "cosine")
    for epoch in range(EPOCHS):
        order = permutation(len(train), 0, epoch)
        for start in range(0, len(train), 2 * gpt.BATCH):
            documents = [train[index] for index in order[start : start + 2 * gpt.BATCH]]
            optimizer.zero_grad()
            gpt.token_loss(model, *gpt.padded(documents)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            last = start + gpt.BATCH * (len(documents) > gpt.BATCH)  # micro-batch
            optimizer.param_groups[0]["lr"] = rate(epoch + last / len(train))
            optimizer.step()
    with torch.no_grad():
        losses = [gpt.token_loss(model, *gpt.padded([one]), reduction="sum") for one in test]
    tokens = sum(len(document) + 1 for document in test)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    return weights, math.exp(sum(losses) / tokens)


def loop(number: int, strategy: str, folder: Path, start: Path | None = None) -> Training:
    """Run gpt.py, from the checkpoint ``start``."""
    folder.mkdir()
    (folder / "small.py").write_text(LOOP)
    if start:
        shutil.copytree(start, folder / "checkpoints" / start.name)
    words = [f"--strategy={strategy}", f"--epochs={EPOCHS}", "--checkpoint-dir=checkpoints"]
    outcome = resident.ranks(number, "small.py", *words, cwd=folder, code=0)
    return Training(outcome, folder)


def metrics(training: Training) -> dict[str, float]:
    """The numbers of the newest checkpoint: loss since the one before, perplexity of the test."""
    state = json.loads((training.newest / "state.json").read_text())
    found: dict[str, float] = state["metrics"]
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """The loop on one rank."""
    return loop(1, "horovod", tmp_path_factory.mktemp("gpt") / "one")


def test_one_rank_is_a_plain_loop_without_padding(expected: Training, gpt: ModuleType) -> None:
    train, test = gpt.documents()
    assert [len(documents) % gpt.BATCH for documents in (train, test)] == [1, 1]
    weights, perplexity = one_process(gpt)
    assert metrics(expected)["perplexity"] == pytest.approx(perplexity, rel=1e-9)
    assert difference(expected.tensors(), weights) <= 1e-9


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_loop_is_that_of_one_rank(strategy: str, expected: Training, tmp_path: Path) -> None:
    """At 2 ranks, and resumed by another strategy at 3, within an epoch."""
    two = loop(2, strategy, tmp_path / "2")
    cut = two.folder / "checkpoints" / f"step-{CUT:09d}"
    three = loop(3, STRATEGIES[STRATEGIES.index(strategy) - 1], tmp_path / "3", cut)
    for training in (two, three):
        assert metrics(training) == pytest.approx(metrics(expected), rel=1e-9)
        assert_close(training, expected, 1e-9)
        assert training.outcome.out.splitlines()[-1] == expected.outcome.out.splitlines()[-1]


def test_resumed_is_bit_equal(tmp_path: Path) -> None:
    uncut = loop(2, "horovod", tmp_path / "uncut")
    resumed = loop(2, "horovod", tmp_path / "cut", uncut.folder / f"checkpoints/step-{CUT:09d}")
    assert metrics(resumed) == metrics(uncut)
    assert difference(resumed.tensors(), uncut.tensors()) == 0
    assert "update 16:" in resumed.outcome.out and "update 8:" not in resumed.outcome.out


RECIPE = [
    *("--epochs=3", "--global-batch-size=10", "--accumulate-steps=2", "--clip-norm=1"),
    *("--optimizer=adamw", "--lr=0.003", "--lr-scaling=none", "--lr-schedule=cosine"),
    *("--warmup-epochs=0.5", "--precision=fp64"),
]


def trained(number: int, strategy: str, folder: Path, *options: str) -> Training:
    """Train the task on ``number`` ranks, in double precision."""
    folder.mkdir(exist_ok=True)
    (folder / "small_task.py").write_text(TASK)
    files = ("--summary=summary.json", "--checkpoint-dir=checkpoints")
    line = ("-m", "hvdtrain.train", "small_task.py", *RECIPE, *files, f"--strategy={strategy}")
    return Training(resident.ranks(number, *line, *options, cwd=folder, code=0), folder)


@pytest.fixture(scope="module")
def expected_task(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """The task on one rank."""
    return trained(1, "horovod", tmp_path_factory.mktemp("task") / "one")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_task_is_that_of_one_rank(
    strategy: str, expected_task: Training, tmp_path: Path
) -> None:
    """At 2 ranks until the second epoch, then by another strategy at 3."""
    trained(2, strategy, tmp_path, "--num-steps=8")
    continued = trained(3, STRATEGIES[STRATEGIES.index(strategy) - 1], tmp_path)
    found, one = continued.summary, expected_task.summary
    assert found["world_size"] == 3 and found["steps_completed"] == one["steps_completed"] == 18
    assert found["eval_metrics"] == pytest.approx(one["eval_metrics"], rel=1e-9)
    assert found["eval_metrics"] == pytest.approx({"perplexity": math.exp(one["eval_loss"])})
    for key in ("parameter_norm", "train_loss", "eval_loss"):
        assert found[key] == pytest.approx(one[key], rel=1e-9)
    assert_close(continued, expected_task, 1e-9)
