"""The accelerator that PyTorch computes on: CUDA's, ROCm's (which PyTorch calls cuda) or Intel's.

The one place that knows of ``torch.accelerator``, which begins with PyTorch 2.6, and of what stood
for it before. A number counts what this process can see: where the launcher shows each rank one
device alone, that one is number 0 on all ranks.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

CPU = "cpu"
OLD = ("cuda", "xpu")  # before 2.6, in this order
BACKENDS = {"cuda": "nccl", "xpu": "ccl"}  # of torch.distributed, before 2.6; ROCm's is nccl, too


def kind() -> str:
    """Return what PyTorch calls the accelerator that it can use here, such as ``cuda``; or cpu."""
    if hasattr(torch, "accelerator"):
        if not torch.accelerator.is_available():
            return CPU
        found = torch.accelerator.current_accelerator()
        return found.type if found else CPU
    return next((name for name in OLD if getattr(torch, name).is_available()), CPU)


def module(device: str | None = None) -> Any:
    """Return what PyTorch has for a kind of device, such as ``torch.cuda``; by default this one."""
    return getattr(torch, device or kind())


def count() -> int:
    """Return how many accelerators this process can see; 0: it computes on the CPU."""
    found = kind()
    return 0 if found == CPU else int(module(found).device_count())


def name(number: int) -> str:
    """Return what its maker calls accelerator ``number``."""
    return str(module().get_device_name(number))


def take(number: int) -> torch.device:
    """Compute on accelerator ``number`` from now on; return it."""
    found = kind()
    module(found).set_device(number)
    return torch.device(found, number)


def peak_memory() -> int:
    """Return the bytes that tensors have taken at most: of one accelerator, that with the most."""
    return max(map(module().max_memory_allocated, range(count())), default=0)


def synchronize() -> None:
    """Wait until the accelerator has done all that it was asked for; on a CPU there is nothing."""
    found = kind()
    if found != CPU:
        module(found).synchronize()


def seed(number: int) -> None:
    """Seed the generators of all accelerators that this process can see."""
    found = kind()
    if found != CPU:
        module(found).manual_seed_all(number)


def use_tf32(wanted: bool) -> None:
    """Let products and convolutions of fp32 take TF32, 10 bits of mantissa, or not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of 2.9: there is a newer way, too
        torch.set_float32_matmul_precision("high" if wanted else "highest")
        torch.backends.cudnn.allow_tf32 = wanted


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor``, of the host, on ``device``; a copy to an accelerator is not waited for."""
    return tensor if device.type == CPU else tensor.pin_memory().to(device, non_blocking=True)


class Copies:
    """Copies from the host on a stream of their own, while ``device`` computes what came before.

    What lies in pinned memory is not waited for. On a CPU a copy is the tensor itself.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = None if device.type == CPU else module(device.type)
        self._own = self._streams.Stream(device) if self._streams else None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` on the device."""
        if self._streams is None or tensor.device.type != CPU:
            return tensor.to(self.device)
        with self._streams.stream(self._own):
            copied = tensor.to(self.device, non_blocking=True)
        computing = self._streams.current_stream()
        computing.wait_stream(self._own)
        copied.record_stream(computing)  # or its memory would be taken for the next copy too early
        return copied


def backend() -> str:
    """Return what torch.distributed sums the accelerator's tensors with; empty: it cannot."""
    found = kind()
    if found == CPU:
        return ""
    default = getattr(dist, "get_default_backend_for_device", BACKENDS.get)
    chosen = str(default(found) or "")
    return chosen if chosen and dist.is_backend_available(chosen) else ""
