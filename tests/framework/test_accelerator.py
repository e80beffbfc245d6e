"""Which accelerator PyTorch has, by what the PyTorch of today and that of yesterday say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hvdtrain.system.machine import accelerator


@pytest.mark.skipif(accelerator.count() > 0, reason="for a machine without a GPU")
def test_a_machine_without_one() -> None:
    assert (accelerator.kind(), accelerator.count(), accelerator.backend()) == ("cpu", 0, "")
    accelerator.synchronize()
    accelerator.seed(1)
    here, ones = torch.device("cpu"), torch.ones(2)
    assert accelerator.send(ones, here) is accelerator.Copies(here)(ones) is ones


@pytest.fixture
def two_of_intels(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The calls for two simulated GPUs, by PyTorch's names."""
    calls: list[object] = []
    xpu = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_name=lambda number: f"Max 1550, tile {number}",
        set_device=calls.append,
        max_memory_allocated=lambda number: 1000 + number,
        manual_seed_all=calls.append,
        synchronize=lambda: calls.append("synchronize"),
    )
    monkeypatch.setattr(torch, "xpu", xpu)
    monkeypatch.setattr(
        torch,
        "accelerator",
        SimpleNamespace(is_available=lambda: True, current_accelerator=lambda: torch.device("xpu")),
        raising=False,
    )
    return calls


@pytest.mark.parametrize("old", [False, True])
def test_two_gpus_of_intel(
    old: bool, two_of_intels: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    there: set[str] = set()
    monkeypatch.setattr(dist, "is_backend_available", there.__contains__)
    if old:  # before 2.6
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.delattr(torch, "accelerator")
        monkeypatch.delattr(dist, "get_default_backend_for_device")
    assert (accelerator.kind(), accelerator.count()) == ("xpu", 2)
    assert accelerator.name(1) == "Max 1550, tile 1"
    assert accelerator.take(1) == torch.device("xpu", 1)
    assert accelerator.peak_memory() == 1001
    accelerator.seed(7)
    accelerator.synchronize()
    assert two_of_intels == [1, 7, "synchronize"]
    assert accelerator.backend() == ""
    there |= {"xccl", "ccl"}
    assert accelerator.backend() == ("ccl" if old else "xccl")


def test_tf32_is_taken_where_it_is_asked_for() -> None:
    """PyTorch's own default is TF32 for convolutions, and not for products."""
    try:
        for wanted in (True, False):
            accelerator.use_tf32(wanted)
            assert torch.backends.cuda.matmul.allow_tf32 is wanted
            assert torch.backends.cudnn.allow_tf32 is wanted
    finally:
        accelerator.use_tf32(False)
