"""Checkpoints that the trainers write in the background."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.numpy

from tests.parallel.conftest import train

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
        assert 0 < saved.summary["saves"]["goodput"] < 1
    first, second = (content(tmp_path / name) for name in ("async", "sync"))
    assert first.keys() == second.keys() and len({key[:26] for key in first}) == 4
    assert first == second


def test_the_interval_that_loses_least_is_chosen_by_all_ranks(tmp_path: Path) -> None:
    """A job that fails before its next step saves after each; by default it need not."""
    options = (
        "--model=small",
        "--num-steps=30",
        "--batch-size=16",
        "--checkpoint-every=auto",
        "--keep=99",
    )
    often = train(3, tmp_path, "mnist", *options, "--mtbf=1e-7").summary["saves"]
    steps = [path.name for path in (tmp_path / "checkpoints").glob("step-*")]
    assert "step-000000010" in steps  # the first, which measures the cost
    assert len(steps) == often["count"] == 21 and often["every"] == 1
    seldom = train(3, tmp_path, "mnist", *options, "--resume=never").summary["saves"]
    assert seldom["count"] == 2  # that one, and the last
    assert seldom["every"] > 1000
