"""The end of a training: its table, and what it took of its devices."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain.collectives.base import Communicator
from hvdtrain.steps.summary import Stopped, Summary
from hvdtrain.steps.world import World
from hvdtrain.system.machine.gpus import GpuMeter
from hvdtrain.training.summary import (
    environment,
    evaluation_rows,
    headlines,
    rows,
    with_evaluation,
    with_usage,
)
from hvdtrain.training.throughput import Clock
from tests.unit.conftest import OnRanks

SUMMARY = Summary(
    unit="images",
    samples_trained=12_345,
    steps_completed=1_200,
    epochs_completed=6,
    train_loss=0.12344,
    eval_loss=0.05,
    eval_accuracy=0.9912,
    eval_samples=10_000,
    images_per_second_mean=20_000.0,
    images_per_second_std=12.34,
    seconds_total=61.25,
    seconds_to_first_step=3.0,
    stopped=Stopped.FINISHED,
)


SHOWN = {"accuracy": "99.12 %"}
RATES = [0.7, 20_000.0, 20_500.0]  # one slow step: the deviation is as large as the mean


def table_of(
    rates: list[float] = RATES, measured: dict[str, str] = SHOWN, **changes: Any
) -> dict[str, str]:
    return dict(rows(replace(SUMMARY, **changes), rates, measured))


def test_the_table() -> None:
    table = table_of()
    assert table["trained"] == "12,345 images in 1,200 steps, 6 whole epochs"
    assert table["training loss"] == "0.1234"
    assert table["test accuracy"] == "99.12 % of 10,000"
    assert table["images/s"] == "20,000.0 in the median step, 0.7 to 20,500.0; all ranks"
    assert not {"checkpoint", "GPUs"} & table.keys()
    assert table_of(checkpoint="/c/step-1")["checkpoint"] == "/c/step-1"
    recorded = table_of(timeline="t.json")
    assert recorded["timeline"] == "t.json"
    assert recorded["images/s"].endswith(", without the steps recorded")
    assert table_of([], timeline="t.json")["images/s"] == "- (steps recorded)"


@pytest.mark.parametrize(("number", "shown"), [(1, "1 sample"), (1200, "1,200 samples")])
def test_a_training_sample_and_several(number: int, shown: str) -> None:
    session: Any = SimpleNamespace(
        workload=SimpleNamespace(name="own", unit="samples"),
        plan=SimpleNamespace(global_batch=2000, epochs=1),
        adapter=SimpleNamespace(name="single", world=World(0, 1, 0, 1, "h", 1)),
        task=SimpleNamespace(
            speed_only="",
            notes=(),
            train=SimpleNamespace(samples=number),
            options=SimpleNamespace(model="m", framework="pytorch", precision="fp32"),
        ),
    )
    rate: Any = SimpleNamespace(base=0.1, factor=1.0)
    _, line = headlines(session, "cpu", rate=rate, steps_per_epoch=1, updates=1)
    assert line.startswith(f"{shown}, global batch 2000, 1 step per epoch, 1 epoch, ")
    assert table_of(unit="samples", samples_trained=number)["trained"].startswith(f"{shown} in ")


def test_the_table_of_other_samples_and_metrics() -> None:
    table = table_of(RATES, {"r2": "0.4512", "map": "0.2000"}, unit="patients")
    assert (table["test r2"], table["test map"]) == ("0.4512 of 10,000", "0.2000 of 10,000")
    assert table["trained"].startswith("12,345 patients in")
    assert "patients/s" in table and "test accuracy" not in table


def test_the_table_without_evaluation_and_without_a_step() -> None:
    values = dict.fromkeys(("train_loss", "eval_loss", "seconds_to_first_step"))
    values |= {"samples_trained": 0, "steps_completed": 0, "stopped": Stopped.PREEMPTED}
    table = table_of([], {"accuracy": "-"}, **values)
    assert table.keys() == {"trained", "seconds", "stopped"} and "step" not in table["seconds"]
    assert table["stopped"] == "preempted and saved: run the same command again to continue"


def test_the_table_of_a_run_that_trained_nothing() -> None:
    metrics = {"loss": 0.5, "accuracy": 0.75, "samples": 8}
    summary = with_evaluation(Summary(seconds_total=2.04, checkpoint="c"), metrics)
    table = evaluation_rows(summary, {"accuracy": "75.00 %"}, Path("p.csv"))
    assert table == [
        ("checkpoint", "c"),
        ("test loss", "0.5000"),
        ("test accuracy", "75.00 % of 8"),
        ("seconds", "2.0"),
        ("predictions", "p.csv"),
    ]


def test_no_secret_is_in_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOROVOD_SECRET_KEY", "UCX_TOKEN", "NCCL_PASSWORD", "FI_CREDENTIALS"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "0.1")
    world = World(rank=0, size=1, local_rank=0, local_size=1, host="a", hosts=1)
    assert "'HOROVOD_CYCLE_TIME': '0.1'" in str(environment(world))
    assert "secret" not in str(environment(world))


class Ranked:
    """What is asked of an adapter, with figures that tell the ranks apart."""

    def __init__(self, communicator: Communicator, threads: int) -> None:
        self.communicator, self.threads = communicator, threads
        self.peak_memory_bytes = 1000 + communicator.rank
        self.meter: GpuMeter | None = None


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_largest_memory_and_the_mean_utilisation(on_ranks: OnRanks, size: int) -> None:
    def action(communicator: Communicator) -> Any:
        # Ten steps, of which two are dropped: rank r is busy (r + 1) / 4 of its two threads.
        busy = 0.5 * (communicator.rank + 1)
        clock = Clock(seconds=[9.0] * 2 + [1.0] * 8, processor=[0.0] * 2 + [busy] * 8)
        return with_usage(SUMMARY, Ranked(communicator, threads=2), clock)  # type: ignore[arg-type]

    for summary in on_ranks(size, action):
        assert summary.peak_memory_bytes == 1000 + size - 1
        assert summary.utilisation_mean == pytest.approx((size + 1) / 8)
        assert summary.utilisation_lowest == 0.25


def test_unknown_values_are_none(on_ranks: OnRanks) -> None:
    def on_a_gpu(communicator: Communicator) -> Any:
        clock = Clock(seconds=[1.0], processor=[1.0])
        return with_usage(SUMMARY, Ranked(communicator, threads=0), clock)  # type: ignore[arg-type]

    for summary in on_ranks(2, on_a_gpu):
        assert (summary.utilisation_mean, summary.utilisation_lowest) == (None, None)


class NvidiaLibrary:
    """What ``pynvml`` says of one GPU: 300 J more at each question."""

    def __init__(self) -> None:
        self.energy = 5_000_000  # mJ, before this program

    def nvmlInit(self) -> None:  # noqa: N802 (its names)
        """Do nothing."""

    def nvmlDeviceGetHandleByUUID(self, identity: str) -> str:  # noqa: N802
        """Know the GPUs of a host by name."""
        if not identity.startswith("GPU-"):
            raise RuntimeError("Not Found")
        return identity

    def nvmlDeviceGetUtilizationRates(self, gpu: str) -> Any:  # noqa: N802
        """Say how busy each one is."""
        return SimpleNamespace(gpu=90 if gpu.endswith("0") else 70)

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: str) -> int:  # noqa: N802
        """Go on counting."""
        self.energy += 300_000
        return self.energy


@pytest.mark.parametrize("gpus", [("GPU-0", "GPU-1"), ("GPU-0", "GPU-0"), ("GPU-0", "part 1")])
def test_values_of_nvml_for_gpus(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, str]
) -> None:
    def on_a_gpu(communicator: Communicator) -> Any:
        monkeypatch.setitem(sys.modules, "pynvml", NvidiaLibrary())
        adapter = Ranked(communicator, threads=0)
        adapter.meter = GpuMeter(gpus[communicator.rank])
        adapter.meter.sample()
        clock = Clock(seconds=[1.0, 1.0], images=[8, 16], processor=[0.0, 0.0])
        return with_usage(SUMMARY, adapter, clock)  # type: ignore[arg-type]

    for summary in on_ranks(2, on_a_gpu):
        if gpus[1] == "part 1":  # one that is not known, and so is the whole
            assert summary.joules_per_image is summary.utilisation_mean is None
            continue
        number = len(set(gpus))  # ranks may share one, whose energy counts once
        assert summary.joules_per_image == pytest.approx(number * 300 / 24)
        assert summary.utilisation_lowest == (0.7 if number == 2 else 0.9)


def test_the_table_of_gpus() -> None:
    table = table_of(utilisation_mean=0.93, peak_memory_bytes=3 * 2**29, joules_per_image=0.1234)
    assert table["GPUs"] == "93 % busy, at most 1.5 GiB each, 0.123 J for each of the images"
