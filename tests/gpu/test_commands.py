"""Trainings and commands on one accelerator, and two ranks that share it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.numpy

from hvdtrain.commands.doctor.checks.loading import has_nccl
from hvdtrain.commands.timeline.verdict import analyse
from tests.conftest import ranks, run
from tests.gpu.conftest import (
    DEVICE,
    FEW,
    HVDTRAIN,
    SMALL,
    STRATEGIES,
    needs_gpu,
    needs_horovod,
    train,
)

SCRIPTS = Path(__file__).parent / "scripts"
SHARED = {"HVDTRAIN_ALLOW": "shared-gpu"}
PLAIN = ("--precision=fp32", "--compression=none")
EXACT = ("--precision=fp64", "--lr-scaling=none", "--warmup-epochs=0", "--seed=1", *SMALL)


def test_doctor_finds_no_error() -> None:
    outcome = run([*HVDTRAIN, "doctor", "-n", "1", "--json"])
    report = json.loads(outcome.out)
    assert [one for one in report["findings"] if one["state"] == "error"] == []
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_step_takes_effect(strategy: str) -> None:
    outcome = run([*HVDTRAIN, "verify", "-n", "1", "--strategy", strategy, "--json"], code=0)
    assert "failed" not in [row["state"] for row in json.loads(outcome.out)["rows"]]


def test_each_step_takes_effect_on_two_ranks_that_share_a_gpu() -> None:
    """By MPI in host memory: NCCL refuses two ranks on one GPU."""
    outcome = run([*HVDTRAIN, "verify", "-n", "2", "--strategy", "mpi", "--json"], **SHARED, code=0)
    assert "failed" not in [row["state"] for row in json.loads(outcome.out)["rows"]]


@needs_gpu
def test_two_ranks_on_one_gpu_are_refused_unless_that_is_wanted() -> None:
    outcome = run([*HVDTRAIN, "verify", "-n", "2", "--strategy", "mpi"], CUDA_VISIBLE_DEVICES="0")
    assert outcome.code != 0
    assert "HVDTRAIN_ALLOW=shared-gpu" in outcome.out + outcome.err


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_computes_what_one_process_does(strategy: str, tmp_path: Path) -> None:
    options = ("--global-batch-size=107", "--num-steps=30", *EXACT)
    alone = train(1, tmp_path / "alone", "mnist", "--strategy=single", *options)
    number = 2 if strategy == "mpi" else 1
    other = train(number, tmp_path / "other", "mnist", f"--strategy={strategy}", *options, **SHARED)
    assert other["world_size"] == number
    assert other["eval_samples"] == alone["eval_samples"] == 297
    for key in ("parameter_norm", "train_loss", "eval_loss"):
        assert other[key] == pytest.approx(alone[key], rel=1e-9)


def saved(strategy: str, folder: Path, *options: str) -> list[Path]:
    """Train a residual network on one rank; return the checkpoints, the oldest first."""
    kept = folder / "checkpoints"
    network = ("--model=resnet18", "--image-size=64", "--batch-size=8", "--synthetic")
    line = (f"--strategy={strategy}", *network, "--deterministic", f"--checkpoint-dir={kept}")
    train(1, folder, "resnet", *line, *options)
    return sorted(kept.glob("step-*"))


def assert_same(checkpoint: Path, other: Path) -> None:
    for name in ("model", "training"):
        one, two = (
            safetensors.numpy.load_file(folder / f"{name}.safetensors")
            for folder in (checkpoint, other)
        )
        assert one.keys() == two.keys()
        for tensor, value in one.items():
            assert value.tobytes() == two[tensor].tobytes(), f"{name}: {tensor} differs"


@pytest.mark.parametrize("strategy", FEW)
def test_resumed_is_bit_equal(strategy: str, tmp_path: Path) -> None:
    uncut = saved(strategy, tmp_path / "uncut", "--num-steps=8")
    saved(strategy, tmp_path / "cut", "--num-steps=3")
    resumed = saved(strategy, tmp_path / "cut", "--num-steps=8", "--resume=must")
    assert_same(uncut[-1], resumed[-1])


@needs_gpu
def test_the_loss_scale_is_resumed(tmp_path: Path) -> None:
    uncut = saved("ddp", tmp_path / "uncut", "--precision=fp16", "--num-steps=8")
    line = ("ddp", tmp_path / "cut", "--precision=fp16")
    saved(*line, "--num-steps=3")
    resumed = saved(*line, "--num-steps=8", "--resume=must")
    assert_same(uncut[-1], resumed[-1])
    scales = [
        json.loads((saves[-1] / "state.json").read_text())["loss_scale"]
        for saves in (uncut, resumed)
    ]
    assert scales[0] == scales[1] is not None


@pytest.mark.parametrize("strategy", FEW)
def test_a_save_in_the_background_has_the_state_of_its_step(strategy: str, tmp_path: Path) -> None:
    """The accelerator writes the copies itself; no later update may change them."""
    line = ("--num-steps=8", "--checkpoint-every=2", "--keep=9")
    background = saved(strategy, tmp_path / "async", *line, "--save=async")
    waited = saved(strategy, tmp_path / "sync", *line, "--save=sync")
    assert [folder.name for folder in background] == [folder.name for folder in waited]
    assert len(waited) == 4
    for pair in zip(background, waited, strict=True):
        assert_same(*pair)


@needs_gpu
def test_the_summary_tells_the_memory_that_was_taken(tmp_path: Path) -> None:
    line = ("--model=resnet18", "--strategy=single", "--synthetic", "--num-steps=6")
    peaks = [
        train(1, tmp_path, "resnet", *line, f"--batch-size={batch}")["peak_memory_bytes"]
        for batch in (32, 64)
    ]
    # Parameters, momentum and gradients take 3 x 4 x 11.7 million bytes, activations far more.
    assert peaks[0] > 2**28
    assert 1.3 < peaks[1] / peaks[0] < 2.2


@needs_horovod
def test_horovod_sums_on_the_device_and_its_timeline_tells_how(tmp_path: Path) -> None:
    from hvdtrain.system.machine import accelerator  # which imports torch

    path, number = tmp_path / "timeline.json", max(1, accelerator.count())
    once = {"HOROVOD_TIMELINE": str(path), "HOROVOD_CACHE_CAPACITY": "0"}
    outcome = ranks(number, str(SCRIPTS / "allreduce.py"), **once, code=0)
    assert outcome.out.split() == ["sums", str(float(sum(range(1, number + 1))))]
    facts, _ = analyse(path)
    assert facts.ranks == number
    summed = {row.name: row.times for row in facts.tensors if "gradients" in row.name}
    assert list(summed.values()) == [5] * 3
    if DEVICE == "cuda" and has_nccl():
        assert b"NCCL_ALLREDUCE" in path.read_bytes()


def test_strategies_are_compared(tmp_path: Path) -> None:
    verb = (*HVDTRAIN, "compare", "--json", "--repeat=1", "--ranks=1", f"--out={tmp_path}")
    command = ("python", "-m", "hvdtrain.mnist", *SMALL, "--num-steps=24", *PLAIN)
    outcome = run([*verb, "--strategies=single,ddp,fsdp", "--", *command], code=0)
    rows = json.loads(outcome.out)["rows"]
    assert [row["strategy"] for row in rows] == ["single", "ddp", "fsdp"]
    assert all(row["available"] and row["images_per_second"] > 0 for row in rows), rows


@pytest.mark.parametrize(
    "precision",
    [
        ("fp32",),
        pytest.param(("fp32", "--tf32"), marks=needs_gpu),
        ("bf16",),
        pytest.param(("fp16",), marks=needs_gpu),
    ],
    ids=" ".join,
)
def test_it_learns_the_embedded_digits(precision: tuple[str, ...], tmp_path: Path) -> None:
    epochs, accuracy = (4, 0.8) if DEVICE == "cpu" else (8, 0.9)
    chosen = ("--precision", *precision, f"--epochs={epochs}", "--strategy=single")
    summary = train(1, tmp_path, "mnist", *chosen)
    assert summary["eval_accuracy"] > accuracy
    assert summary["precision"].startswith(precision[0])


def test_compiled_it_computes_the_same(tmp_path: Path) -> None:
    line = ("--strategy=single", "--precision=fp32", "--num-steps=12", *SMALL)
    plain, compiled = (train(1, tmp_path, "mnist", *line, *more) for more in ((), ("--compile",)))
    assert compiled["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-3)
