"""The accelerator of PyTorch: CUDA, ROCm (PyTorch calls it cuda) or Intel XPU.

The only module that uses ``torch.accelerator`` (since PyTorch 2.6) and its predecessors. Device
numbers count the devices visible to this process: if the launcher shows each rank only its device,
that is number 0 on all ranks.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

CPU = "cpu"
OLD = ("cuda", "xpu")  # before 2.6, in this order
BACKENDS = {"cuda": "nccl", "xpu": "ccl"}  # of torch.distributed, before 2.6; nccl for ROCm, too


def kind() -> str:
    """Return PyTorch's name of the available accelerator, e.g. ``cuda``; else ``cpu``."""
    if hasattr(torch, "accelerator"):
        if not torch.accelerator.is_available():
            return CPU
        device = torch.accelerator.current_accelerator()
        return device.type if device else CPU
    return next((name for name in OLD if getattr(torch, name).is_available()), CPU)


def module(device: str | None = None) -> Any:
    """Return PyTorch's module of a device type, e.g. ``torch.cuda``; default: the available one."""
    return getattr(torch, device or kind())


def count() -> int:
    """Return the number of accelerators visible to this process; 0: CPU only."""
    device_type = kind()
    return 0 if device_type == CPU else int(module(device_type).device_count())


def name(number: int) -> str:
    """Return the product name of accelerator ``number``."""
    return str(module().get_device_name(number))


def take(number: int) -> torch.device:
    """Make accelerator ``number`` the current device and return it."""
    device_type = kind()
    module(device_type).set_device(number)
    return torch.device(device_type, number)


def peak_memory() -> int:
    """Return the peak memory of tensors in bytes, the maximum over the accelerators."""
    return max(map(module().max_memory_allocated, range(count())), default=0)


def synchronize() -> None:
    """Wait for all work queued on the accelerator; no-op on a CPU."""
    device_type = kind()
    if device_type != CPU:
        module(device_type).synchronize()


def copy_to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Start copying a tensor of an accelerator; return the copy, and the event of its end."""
    copy = tensor.to(CPU, non_blocking=True)
    event = module(tensor.device.type).Event()
    event.record()
    return copy, event


def seed(number: int) -> None:
    """Seed the generators of all visible accelerators."""
    device_type = kind()
    if device_type != CPU:
        module(device_type).manual_seed_all(number)


def use_tf32(wanted: bool) -> None:
    """Allow or forbid TF32 (10-bit mantissa) in fp32 matrix products and convolutions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch 2.9 recommends a newer API
        torch.set_float32_matmul_precision("high" if wanted else "highest")
        torch.backends.cudnn.allow_tf32 = wanted


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the host's ``tensor`` on ``device``; a copy to an accelerator is asynchronous."""
    return tensor if device.type == CPU else tensor.pin_memory().to(device, non_blocking=True)


class Copies:
    """Copies from the host on a separate stream, overlapped with computation on ``device``.

    Copies from pinned memory are asynchronous. On a CPU a copy is the tensor itself.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = None if device.type == CPU else module(device.type)
        self._stream = self._streams.Stream(device) if self._streams else None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` on the device."""
        if self._streams is None or tensor.device.type != CPU:
            return tensor.to(self.device)
        with self._streams.stream(self._stream):
            copied = tensor.to(self.device, non_blocking=True)
        computing = self._streams.current_stream()
        computing.wait_stream(self._stream)
        copied.record_stream(computing)  # else its memory would be reused by the next copy
        return copied


def backend() -> str:
    """Return torch.distributed's back end for the accelerator's tensors; empty: none."""
    device_type = kind()
    if device_type == CPU:
        return ""
    default = getattr(dist, "get_default_backend_for_device", BACKENDS.get)
    chosen = str(default(device_type) or "")
    return chosen if chosen and dist.is_backend_available(chosen) else ""
