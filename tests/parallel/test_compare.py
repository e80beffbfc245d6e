"""A real comparison on the embedded digits, checked against the summaries of its runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Outcome, run

VERB = [sys.executable, "-m", "hvdtrain.cli", "compare", "--repeat", "1", "--json"]
TRAIN = ["python", "-m", "hvdtrain.mnist", "--model", "small", "--num-steps", "24"]
PLAIN = ["--dropout", "0", "--precision", "fp64", "--batch-size", "33"]
OVER_TWO = ["horovod", "ddp", "mpi"]


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "compare.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    folder = tmp_path_factory.mktemp("compare")
    strategies = ["--strategies", ",".join([*OVER_TWO, "single", "data-parallel"])]
    target = ["--target", "accuracy=0.01"]
    outcome = run([*VERB, *strategies, *target, "--out", str(folder), "--", *TRAIN, *PLAIN], code=0)
    return folder, outcome


def test_the_rows_agree_with_the_runs(compared: tuple[Path, Outcome]) -> None:
    folder, outcome = compared
    *rows, missing = json.loads(outcome.out)["rows"]  # nothing else is on standard output
    assert [row["strategy"] for row in rows] == ["single", *OVER_TWO]
    assert not missing["available"]
    assert missing["reason"].startswith("--strategy data-parallel")
    runs = {
        line["method"]["strategy"]: line["summary"] for line in lines(folder) if line["summary"]
    }
    single = runs["single"]
    assert (single["world_size"], single["gradient_messages"]) == (1, None)
    for row in rows:
        summary = runs[row["strategy"]]
        rate = summary["images_per_second_mean"]
        assert (row["available"], row["precision"], row["compression"]) == (True, "fp64", "none")
        assert (row["ranks"], summary["global_batch_size"]) == (summary["world_size"], 66)
        assert row["images_per_second"] == rate
        assert row["speedup"] == rate / single["images_per_second_mean"]
        assert row["epoch_seconds"] == pytest.approx(1500 / rate)
        assert row["peak_memory_bytes"] == summary["peak_memory_bytes"] > 100 * 2**20
        assert row["setup_seconds"] == summary["seconds_to_first_step"] > 0.5
        assert row["loss_distance"] < 1e-9  # N ranks compute the same as one
        assert row["utilisation"] == summary["utilisation_mean"] > 0.05
        assert summary["training_samples"] == 1500
        assert 0 < row["target_seconds"] < summary["seconds_total"]  # the end of the only epoch
        assert row["target_speedup"] == rows[0]["target_seconds"] / row["target_seconds"]
        # 21,840 parameters in fp64; with two ranks each sends them once.
        sent = row["bytes_per_step"]
        assert sent == 0 if row["ranks"] == 1 else 8 * 21_840 <= sent < 8 * 22_200


def test_a_method_that_the_trainer_rejects_is_not_available(tmp_path: Path) -> None:
    options = ["--strategies", "single", "--precision", "fp16", "--out", str(tmp_path)]
    outcome = run([*VERB, *options, "--", *TRAIN], CUDA_VISIBLE_DEVICES="", code=0)
    (row,) = json.loads(outcome.out)["rows"]
    assert (row["available"], row["precision"], row["images_per_second"]) == (False, "fp16", None)
    assert row["reason"] == "--precision fp16 needs a GPU: use bf16 or fp32 on a CPU"


@pytest.mark.parametrize(("code", "expected"), [(3, 1), (2, 2)])
def test_a_command_that_fails(code: int, expected: int, tmp_path: Path) -> None:
    program = ["python", "-c", f"print('no luck'); raise SystemExit({code})", "--batch-size", "4"]
    outcome = run([*VERB, "--strategies", "single", "--out", str(tmp_path), "--", *program])
    assert outcome.code == expected, outcome.err
    if expected == 1:
        assert json.loads(outcome.out)["rows"][0]["reason"].startswith("failed: exit code 3")
    else:
        assert "the command cannot be run, even in a single process" in outcome.err
