"""Images decoded by DALI: the same training on any number of ranks, and from packed data."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from hvdtrain.commands.pack.packing import Packing
from hvdtrain.commands.pack.source import PackOptions
from tests.conftest import ROOT, ranks
from tests.parallel.conftest import assert_bit_equal, assert_close, train

dali = pytest.importorskip("nvidia.dali")

# Where DALI is, which need not be in this environment.
PATHS = os.pathsep.join([str(ROOT), str(Path(dali.__file__).parents[2])])
START = functools.partial(ranks, PYTHONPATH=PATHS)
LINE = ("--model=resnet18", "--image-size=32", "--global-batch-size=8", "--sync-batchnorm")
LINE += ("--num-steps=7", "--workers=0", "--lr-scaling=none", "--warmup-epochs=0")


def test_ranks_and_packing_make_no_difference(few_images: Path, tmp_path: Path) -> None:
    """Forty images in batches of eight; the third rank has fewer in each."""
    line = (*LINE, "--precision=fp64", "--decoder=dali")
    one = train(1, tmp_path / "1", "resnet", *line, f"--data={few_images}", start=START)
    for number in (2, 3):
        folder = tmp_path / str(number)
        other = train(number, folder, "resnet", *line, f"--data={few_images}", start=START)
        assert_close(one, other, 1e-9)
        assert other.summary["samples_trained"] == one.summary["samples_trained"] == 56
        assert other.summary["eval_samples"] == one.summary["eval_samples"]
        assert other.summary["eval_loss"] == pytest.approx(one.summary["eval_loss"], rel=1e-9)
    Packing(few_images, tmp_path / "out", PackOptions(2**16, workers=1)).run()
    packed = train(1, tmp_path / "p", "resnet", *line, f"--data={tmp_path / 'out'}", start=START)
    assert_bit_equal(one, packed)


def test_a_resumed_training_says_that_the_decoder_changes(few_images: Path, tmp_path: Path) -> None:
    words = ("-m", "hvdtrain.resnet", *LINE[:3], "--workers=0", f"--data={few_images}")
    words += (f"--checkpoint-dir={tmp_path}", "--precision=fp32")
    note = "images are decoded by pillow from here on, and were by dali: "
    for decoder, steps, noted in (("dali", 2, False), ("dali", 3, False), ("auto", 4, True)):
        outcome = START(2, *words, f"--decoder={decoder}", f"--num-steps={steps}", code=0)
        assert outcome.out.count(note) == noted
        assert outcome.out.count("resumed from") == (steps > 2)
