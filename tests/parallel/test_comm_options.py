"""How gradients travel, on real ranks: their type, in closed forms; buckets; what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.config.strategies import STRATEGIES
from tests.conftest import LONG
from tests.parallel import resident
from tests.parallel.conftest import train

COMPRESSED = Path(__file__).parent / "scripts" / "compressed.py"
WAYS = [
    (framework, name)
    for name, one in STRATEGIES.items()
    for framework in one.adapters
    if one.compressions
]


@pytest.mark.parametrize("number", [2, 3] if LONG else [3])
@pytest.mark.parametrize(("framework", "strategy"), WAYS)
def test_gradients_of_16_bits(framework: str, strategy: str, number: int, tmp_path: Path) -> None:
    words = (str(COMPRESSED), framework, strategy, str(tmp_path))
    outcome = resident.ranks(number, *words, framework=framework)
    assert outcome.code == 0, outcome.err[-3000:]
    done = sorted(path.name for path in tmp_path.iterdir())
    assert done == [f"{rank}-of-{number}" for rank in range(number)]


def test_a_training_in_16_bits_sends_half_and_says_so(tmp_path: Path) -> None:
    options = ("--model=small", "--num-steps=3")
    plain = train(2, tmp_path / "none", "mnist", *options).summary
    half = train(2, tmp_path / "fp16", "mnist", *options, "--compression=fp16").summary
    assert (plain["compression"], half["compression"]) == ("none", "fp16")
    assert half["gradient_messages"]["bytes"] * 2 == plain["gradient_messages"]["bytes"]


def test_bf16_is_refused_where_it_cannot_be_summed() -> None:
    outcome = resident.ranks(2, "-m", "hvdtrain.mnist", "--compression=bf16")
    assert outcome.code == 2
    (line,) = outcome.said
    assert "--compression bf16: Horovod" in line and "--compression fp16" in line


@pytest.mark.parametrize(
    ("framework", "strategy"),
    [("pytorch", "horovod"), ("pytorch", "ddp"), ("tensorflow", "mpi")],
)
def test_buckets_are_as_large_as_asked_for(framework: str, strategy: str, tmp_path: Path) -> None:
    parameters = 8  # of the small net
    way = (f"--framework={framework}", f"--strategy={strategy}", "--model=small", "--num-steps=3")
    size = 0.5 * 4 * 21_840 / 2**20  # half of the parameters
    for threshold, expected in ((0, parameters), (size, 2)):
        folder = tmp_path / str(expected)
        done = train(2, folder, "mnist", *way, f"--fusion-threshold-mb={threshold}").summary
        assert done["gradient_messages"]["count"] == expected


def test_horovod_tunes_itself(tmp_path: Path) -> None:
    record = tmp_path / "tuned.csv"
    words = (
        "-m",
        "hvdtrain.mnist",
        "--model=small",
        "--num-steps=10",
        "--autotune",
        "--check-replicas=5",
    )
    outcome = resident.ranks(2, *words, HOROVOD_AUTOTUNE_LOG=str(record))
    assert outcome.code == 0, outcome.err[-3000:]
    assert outcome.err.count("--autotune: Horovod decides by timings") == 1
    assert "tensor_fusion_threshold" in record.read_text()


def test_a_lever_that_is_not_there_is_told() -> None:
    outcome = resident.ranks(2, "-m", "hvdtrain.mnist", "--hierarchical-allreduce")
    assert outcome.code == 2
    (line,) = outcome.said
    assert line.startswith("hvdtrain: error: --hierarchical-allreduce is not available: ")


ADASUM = Path(__file__).parent / "scripts" / "adasum.py"


@pytest.mark.parametrize(
    ("framework", "number"), [("pytorch", 4), ("tensorflow", 2), *([("tensorflow", 4)] * LONG)]
)
def test_adasum(framework: str, number: int, tmp_path: Path) -> None:
    words = (str(ADASUM), framework, str(tmp_path))
    outcome = resident.ranks(number, *words, framework=framework)
    assert outcome.code == 0, outcome.err[-3000:]
    done = sorted(path.name for path in tmp_path.iterdir())
    assert done == [f"{rank}-of-{number}" for rank in range(number)]


def test_a_training_with_adasum(tmp_path: Path) -> None:
    # The recipe of the embedded digits learns more slowly than 100 updates tell.
    recipe = ("--model=small", "--batch-size=64", "--lr=0.03", "--warmup-epochs=0.5")
    options = ("--num-steps=100", "--reduction=adasum", "--check-replicas=20")
    done = train(2, tmp_path, "mnist", *recipe, *options).summary
    assert (done["reduction"], done["gradient_messages"]["count"]) == ("adasum", 8)
    assert done["eval_accuracy"] > 0.8  # of ten classes
    outcome = resident.ranks(3, "-m", "hvdtrain.mnist", *options)
    assert outcome.code == 2
    (line,) = outcome.said
    assert "--reduction adasum" in line and line.endswith("power of two, not 3: start 2 or 4")
