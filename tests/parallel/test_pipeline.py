"""A pipeline on real ranks: what one process computes, over several groups of stages, too.

What it has in common with every strategy (uneven parts, resumed runs, checkpoints that move, loops
of users) the tests of those show.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import LONG, on_demand
from tests.parallel import resident
from tests.parallel.conftest import (
    assert_bit_equal,
    assert_close,
    assert_one_line,
    completed,
    run_script,
    train,
)
from tests.parallel.test_equality import EXACT, RESNET, SMALL
from tests.parallel.test_integrity import flip, train_on_a_bad_sample

PIPELINE = "--strategy=pipeline"
TWO_GROUPS = (PIPELINE, "--stages=2")  # of 4 ranks


@pytest.mark.parametrize("batch", [107, *([97, 1499] if LONG else [])])
def test_groups_of_stages(batch: int, tmp_path: Path) -> None:
    # Of 1,500 images such batches leave 2, 45 and 1: micro-batches and parts that are empty.
    options = (
        *(f"--global-batch-size={batch}", "--epochs=2", "--clip-norm=0.3", "--dropout=0"),
        *("--lr=0.01", *SMALL, *EXACT),
    )
    one = train(1, tmp_path / "1", "mnist", *options)
    line = (*options, *TWO_GROUPS, "--micro-batches=3", "--check-replicas=7")
    four = train(4, tmp_path / "4", "mnist", *line)
    assert_close(one, four, 1e-9)
    for key in ("samples_trained", "eval_samples", "eval_accuracy", "global_batch_size"):
        assert one.summary[key] == four.summary[key]
    assert four.summary["parameter_norm"] == pytest.approx(one.summary["parameter_norm"], rel=1e-9)
    bubble = four.summary["bubble"]
    assert (bubble["stages"], bubble["micro_batches"], bubble["formula"]) == (2, 3, 1 / 4)
    assert 0 < bubble["measured"] < 1


def test_a_group_takes_the_batch_of_a_rank(tmp_path: Path) -> None:
    options = ("--num-steps=2", "--batch-size=30", *SMALL)
    four = train(4, tmp_path, "mnist", *options, *TWO_GROUPS).summary
    assert (four["global_batch_size"], four["devices"], four["samples_trained"]) == (60, 4, 120)
    assert four["bubble"]["micro_batches"] == 8  # four for each stage
    # Each of the first group's ranks has written what it has.
    files = sorted(path.name for path in Path(four["checkpoint"]).glob("model-*"))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_batchnorm_sees_micro_batches(few_images: Path, tmp_path: Path) -> None:
    # 40 images in batches of 13: three micro-batches of 5, 4 and 4, and at the end one of 1.
    options = (
        *(f"--data={few_images}", *RESNET, "--global-batch-size=13", "--epochs=1", "--lr=0.01"),
        *EXACT,
    )
    alone = train(1, tmp_path / "1", "resnet", *options, "--accumulate-steps=3")
    line = (*options, PIPELINE, "--micro-batches=3")
    for number in (2, 3) if LONG else (2,):
        other = train(number, tmp_path / str(number), "resnet", *line)
        assert_close(alone, other, 1e-9)
        assert other.summary["eval_loss"] == pytest.approx(alone.summary["eval_loss"], rel=1e-9)
    if LONG:  # each group has statistics of its own, as each rank of another strategy has
        whole = (*options, "--num-steps=3")  # without the last step, of which a rank has none
        two = train(2, tmp_path / "ddp", "resnet", *whole, "--strategy=ddp", "--accumulate-steps=3")
        four = train(4, tmp_path / "4", "resnet", *line, "--num-steps=3", "--stages=2")
        assert_close(two, four, 1e-9)


def test_a_resumed_training_of_two_groups_is_bit_equal(tmp_path: Path) -> None:
    options = (*TWO_GROUPS, "--epochs=4", "--batch-size=64", *SMALL)  # with dropout
    uncut = train(4, tmp_path / "uncut", "mnist", *options, "--num-steps=20")
    train(4, tmp_path / "cut", "mnist", *options, "--num-steps=7")
    resumed = train(4, tmp_path / "cut", "mnist", *options, "--num-steps=20", "--resume=must")
    assert_bit_equal(uncut, resumed)


@on_demand
def test_half_precision_trains(tmp_path: Path) -> None:
    """What stages hand over under autocast is of 16 bits."""
    options = (PIPELINE, "--model=small", "--epochs=2", "--precision=bf16")
    assert train(2, tmp_path, "mnist", *options).summary["eval_accuracy"] > 0.5


def test_predictions_are_those_of_one_process(tmp_path: Path) -> None:
    options = ("--model=small", "--precision=fp64")
    saved = train(2, tmp_path, "mnist", *options, PIPELINE, "--num-steps=5").newest
    files = []
    for number, way in ((1, "--strategy=single"), (3, PIPELINE), (4, "--stages=2")):
        files.append(tmp_path / f"{number}.csv")
        line = (*options, way, *(TWO_GROUPS if number == 4 else ()), f"--checkpoint={saved}")
        completed(number, "-m", "hvdtrain.mnist", *line, f"--predict={files[-1]}")
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()
    assert len(files[0].read_text().splitlines()) == 1 + 297


def test_one_flipped_bit_is_found_in_its_stage() -> None:
    outcome = flip(4, 3, *TWO_GROUPS, "--check-replicas=4")
    words = "(rank 3) differs from rank 1's, first in 3.weight: "
    assert_one_line(outcome, 1, "after step 7 in stage 1 the model of ", words)


@pytest.mark.parametrize("number", [2, 4] if LONG else [4])
def test_an_update_that_is_not_finite_is_left_out_in_all_stages(
    number: int, tmp_path: Path
) -> None:
    line = ("--global-batch-size=100", "--on-nan=skip", *EXACT)
    alone = train_on_a_bad_sample(1, tmp_path / "1", *line)
    other = train_on_a_bad_sample(number, tmp_path / str(number), *line, *TWO_GROUPS)
    assert other.summary["steps_skipped"] == alone.summary["steps_skipped"] == 3
    assert_close(alone, other, 1e-9)


@pytest.mark.parametrize(
    ("number", "stages"), [(2, 2), (3, 1), *([(3, 3), (4, 2)] if LONG else [])]
)
def test_tied_weights_frozen_statistics_and_odd_types(
    number: int, stages: int, tmp_path: Path
) -> None:
    """Of several groups some have no sample in the last part of an epoch."""
    run_script(number, "stages.py", str(stages), str(tmp_path), folder=tmp_path)


@pytest.mark.parametrize(
    ("number", "words", "said"),
    [
        (3, ("--stages=2",), "--stages 2: 3 ranks cannot be divided into groups of 2: start"),
        (2, ("--compile",), "--compile is not for --strategy pipeline; use ddp"),
        (2, ("--sync-batchnorm",), "--sync-batchnorm is not for --strategy pipeline: BatchNorm"),
    ],
)
def test_what_cannot_be_had_is_told(number: int, words: tuple[str, ...], said: str) -> None:
    program = ("-m", "hvdtrain.mnist", "--model=small", PIPELINE)
    assert_one_line(resident.ranks(number, *program, *words), 2, said)
