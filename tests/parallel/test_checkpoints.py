"""Checkpoints that move: written by any strategy on any number of ranks, resumed by any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tests.parallel.conftest import SIZES, STRATEGIES, completed, train

MOVES = str(Path(__file__).parent / "scripts" / "moves.py")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A checkpoint of each strategy on each number of ranks, of the same training."""
    folders = []
    for name, number in SIZES:
        folders.append(tmp_path_factory.mktemp(f"{name}-{number}-"))
        completed(number, MOVES, name, "save", str(folders[-1]))
    return folders


@pytest.mark.parametrize(("strategy", "number"), SIZES)
def test_any_goes_on_from_any(strategy: str, number: int, saved: list[Path]) -> None:
    completed(number, MOVES, strategy, "load", *map(str, saved))
    assert all((folder / f"{strategy}-{number}").exists() for folder in saved)


def test_each_tensor_is_whole_in_one_file_of_one_rank(saved: list[Path]) -> None:
    """As any reader of the safetensors convention finds it: by the index."""
    folders = {folder.name.rpartition("-")[0]: next(folder.glob("step-*")) for folder in saved}
    whole = safetensors.numpy.load_file(folders[f"{STRATEGIES[0]}-1"] / "model.safetensors")
    for name in ("zero-2", "zero-3", "fsdp-2", "fsdp-3"):
        folder, number = folders[name], int(name[-1])
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = {one.name for one in folder.glob("model-*.safetensors")}
        assert files == {f"model-{k:05d}-of-{number:05d}.safetensors" for k in range(1, number + 1)}
        assert set(index["weight_map"].values()) == files
        assert index["metadata"]["total_size"] == sum(one.nbytes for one in whole.values())
        held = {file: safetensors.numpy.load_file(folder / file) for file in files}
        for tensor, value in whole.items():
            (owner,) = [file for file, tensors in held.items() if tensor in tensors]
            assert index["weight_map"][tensor] == owner
            assert np.allclose(held[owner][tensor], value, rtol=0, atol=1e-12)


def test_a_run_resumed_beyond_its_last_step_saves_nothing(tmp_path: Path) -> None:
    options = ("--model=small", "--checkpoint-every=2")
    first = train(1, tmp_path, "mnist", *options, "--num-steps=3")
    shutil.rmtree(first.newest)  # what is left, of step 2, was made before an evaluation
    again = train(1, tmp_path, "mnist", *options, "--num-steps=1")
    assert again.summary["steps_completed"] == 2
    assert again.summary["eval_accuracy"] is not None
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-000000002"]
