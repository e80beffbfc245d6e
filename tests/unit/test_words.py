"""What the file of options that a command names says to a ladder."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.measure.words import check_words, with_batch

PROGRAM = ("python", "-m", "hvdtrain.mnist")


def command(folder: Path, text: str, *words: str) -> list[str]:
    file = folder / "options.yaml"
    file.write_text(text)
    return [*PROGRAM, f"--config={file}", *words]


@pytest.mark.parametrize("option", ["summary", "metrics", "checkpoint-dir", "checkpoint_dir"])
def test_a_file_can_hide_nothing(option: str, tmp_path: Path) -> None:
    words = command(tmp_path, f"num-steps: 50\n{option}: x\n")
    name = option.replace("_", "-")
    with pytest.raises(UsageError, match=f"--{name} in .*/options.yaml: .*; leave it out"):
        check_words(words, "weak", {})


def test_the_batch_may_stand_in_the_file(tmp_path: Path) -> None:
    total = command(tmp_path, "global-batch-size: 256\n")
    check_words(total, "strong", {})
    assert with_batch(total, "strong", 2) == total
    with pytest.raises(UsageError, match="or its file of options, keeps the batch of all ranks"):
        check_words(total, "weak", {})
    # The line wins, as it does in the trainers.
    check_words([*total, "--batch-size", "8"], "weak", {})
    own = command(tmp_path, "batch_size: 8\n")
    check_words(own, "strong", {})
    assert with_batch(own, "strong", 2) == [*own, "--global-batch-size", "16"]


@pytest.mark.parametrize("text", ["", "a list", "[1, 2]", "{", "timeline:\n", "\0"])
def test_what_another_program_may_mean_by_config(text: str, tmp_path: Path) -> None:
    check_words(command(tmp_path, text), "weak", {})
    check_words([*PROGRAM, "--config", str(tmp_path / "none")], "weak", {})
    check_words([*PROGRAM, "--config"], "weak", {})
