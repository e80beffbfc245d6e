"""How gradients travel, on real ranks: their type, in closed forms; buckets; what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.config.strategies import STRATEGIES
from tests.conftest import LONG
from tests.parallel import resident
from tests.parallel.conftest import run_script, train

COMPRESSED = [
    (framework, name)
    for name, one in STRATEGIES.items()
    for framework in one.adapters
    if one.compressions
]
SMALL = ("--model=small", "--num-steps=3")
PARAMETERS, TENSORS = 21_840, 8  # of the small net
HALF = f"--fusion-threshold-mb={PARAMETERS / 2 * 4 / 2**20}"


@pytest.mark.parametrize("number", [2, 3] if LONG else [3])
@pytest.mark.parametrize(("framework", "strategy"), COMPRESSED)
def test_gradients_of_16_bits(framework: str, strategy: str, number: int, tmp_path: Path) -> None:
    words = (framework, strategy, str(tmp_path))
    run_script(number, "gradients.py", *words, folder=tmp_path, framework=framework)


@pytest.mark.parametrize(
    ("framework", "strategy", "options", "messages", "size"),
    [
        ("pytorch", "horovod", ["--fusion-threshold-mb=0"], TENSORS, 4),
        ("pytorch", "horovod", ["--compression=fp16"], 1, 2),
        ("pytorch", "ddp", [HALF], 2, 4),
        ("tensorflow", "mpi", [HALF], 2, 4),
    ],
)
def test_messages_are_of_the_number_and_the_type_requested(
    framework: str, strategy: str, options: list[str], messages: int, size: int, tmp_path: Path
) -> None:
    way = (f"--framework={framework}", f"--strategy={strategy}")
    done = train(2, tmp_path, "mnist", *way, *SMALL, *options).summary
    assert done["compression"] == ("fp16" if size == 2 else "none")
    assert done["gradient_messages"]["count"] == messages
    assert 1 <= done["gradient_messages"]["bytes"] / (size * PARAMETERS) < 1.02  # and flags


@pytest.mark.parametrize(
    ("number", "option", "words"),
    [
        (2, "--compression=bf16", ("--compression bf16: Horovod", "--compression fp16")),
        (2, "--hierarchical-allreduce", ("error: --hierarchical-allreduce is not available: ",)),
        (3, "--reduction=adasum", ("--reduction adasum", "power of two, not 3: start 2 or 4")),
    ],
)
def test_an_option_that_is_not_there_is_told(
    number: int, option: str, words: tuple[str, ...]
) -> None:
    outcome = resident.ranks(number, "-m", "hvdtrain.mnist", option)
    assert outcome.code == 2
    (line,) = outcome.said
    assert all(word in line for word in words)


def test_horovod_tunes_itself(tmp_path: Path) -> None:
    record = tmp_path / "tuned.csv"
    words = ("--model=small", "--num-steps=10", "--autotune", "--check-replicas=5")
    outcome = resident.ranks(2, "-m", "hvdtrain.mnist", *words, HOROVOD_AUTOTUNE_LOG=str(record))
    assert outcome.code == 0, outcome.err[-3000:]
    assert outcome.err.count("--autotune: Horovod decides by timings") == 1
    assert "tensor_fusion_threshold" in record.read_text()


@pytest.mark.parametrize(
    ("framework", "number"), [("pytorch", 4), ("tensorflow", 2), *([("tensorflow", 4)] * LONG)]
)
def test_adasum(framework: str, number: int, tmp_path: Path) -> None:
    words = (framework, "horovod", str(tmp_path), "adasum")
    run_script(number, "gradients.py", *words, folder=tmp_path, framework=framework)


def test_a_training_with_adasum(tmp_path: Path) -> None:
    # The recipe of the embedded digits learns more slowly than 100 updates tell.
    recipe = ("--model=small", "--batch-size=64", "--lr=0.03", "--warmup-epochs=0.5")
    options = ("--num-steps=100", "--reduction=adasum", "--check-replicas=20")
    done = train(2, tmp_path, "mnist", *recipe, *options).summary
    assert (done["reduction"], done["gradient_messages"]["count"]) == ("adasum", TENSORS)
    assert done["eval_accuracy"] > 0.8  # of ten classes
