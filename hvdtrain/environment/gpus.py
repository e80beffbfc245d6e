"""The NVIDIA GPUs that this process may use, asked of the driver itself: no framework needed.

The order, and what ``CUDA_VISIBLE_DEVICES`` leaves, are those of every CUDA program.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

DRIVER = "libcuda.so.1"
NAME_LENGTH = 256
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one part of a partitioned one."""

    name: str
    """As its maker calls it."""
    uuid: str
    """The same for every process that uses it."""
    memory: int
    """Bytes."""


@dataclass(frozen=True)
class Driver:
    """What the driver says."""

    cuda: str
    """The newest CUDA that it can run, such as 13.0."""
    gpus: tuple[Gpu, ...]
    """In CUDA's order."""


def find_driver(library: str = DRIVER) -> Driver | None:
    """Ask the driver; None where there is none, or no GPU that it can use."""
    try:
        cuda = ctypes.CDLL(library)
        number = ctypes.c_int()
        if cuda.cuInit(0) or cuda.cuDriverGetVersion(ctypes.byref(number)):
            return None
        version = f"{number.value // 1000}.{number.value % 1000 // 10}"
        if cuda.cuDeviceGetCount(ctypes.byref(number)):
            return None
        return Driver(version, tuple(_describe(cuda, place) for place in range(number.value)))
    except (OSError, AttributeError):
        return None


def _describe(cuda: ctypes.CDLL, place: int) -> Gpu:
    device, memory = ctypes.c_int(), ctypes.c_size_t()
    name, identity = ctypes.create_string_buffer(NAME_LENGTH), ctypes.create_string_buffer(16)
    cuda.cuDeviceGet(ctypes.byref(device), place)
    cuda.cuDeviceGetName(name, NAME_LENGTH, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    # The second form tells the parts of a partitioned GPU apart; drivers before 11.4 lack it.
    ask = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
    ask(identity, device)
    spelled = f"GPU-{uuid.UUID(bytes=identity.raw)}"
    return Gpu(name.value.decode(errors="replace"), spelled, memory.value)


def identities(count: int, environ: Mapping[str, str]) -> list[str]:
    """What tells the ``count`` GPUs that a framework sees apart, on one host.

    Where the driver is not NVIDIA's, the choice made by the environment and the place in it.
    """
    driver = find_driver()
    if driver and len(driver.gpus) == count:
        return [gpu.uuid for gpu in driver.gpus]
    chosen = ",".join(f"{name}={environ[name]}" for name in VISIBLE if environ.get(name))
    return [f"{chosen or 'all GPUs'}, number {place}" for place in range(count)]
