"""GPUs that this process may use: how many, what NVIDIA's driver says of each, TensorFlow's own.

The driver itself is asked, no framework. The order, and what ``CUDA_VISIBLE_DEVICES`` leaves, are
those of every CUDA program.
"""

from __future__ import annotations

import ctypes
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DRIVER = "libcuda.so.1"
DEVICES = Path("/dev")
NAME_LENGTH = 256
CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
VISIBLE = (  # what a user or a launcher leaves of them; Intel's tiles count as GPUs
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one part of a partitioned one."""

    name: str  # as its maker calls it
    uuid: str  # the same for every process that uses it
    memory: int  # bytes
    capability: int  # compute capability, such as 90


@dataclass(frozen=True)
class Driver:
    """What the driver says."""

    cuda: str  # the newest CUDA that it can run, such as 13.0
    gpus: tuple[Gpu, ...]  # in CUDA's order


def count_gpus(environ: Mapping[str, str], devices: Path = DEVICES) -> int:
    """Count the GPUs that a rank here may use: as CUDA_VISIBLE_DEVICES or its like say, else all.

    AMD's and Intel's are counted only where their variable names them: the graphics unit of a
    processor looks the same.
    """
    chosen = next((environ[name] for name in VISIBLE if name in environ), None)
    if chosen is not None:
        return len([name for name in chosen.split(",") if name.strip() not in ("", "-1")])
    return len(list(devices.glob("nvidia[0-9]*")))


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
    major, minor = (_attribute(cuda, device, number) for number in CAPABILITY)
    spelled = f"GPU-{uuid.UUID(bytes=identity.raw)}"
    return Gpu(name.value.decode(errors="replace"), spelled, memory.value, 10 * major + minor)


def _attribute(cuda: ctypes.CDLL, device: ctypes.c_int, number: int) -> int:
    value = ctypes.c_int()
    cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
    return value.value


def identities(count: int, environ: Mapping[str, str]) -> list[str]:
    """Return what tells the ``count`` GPUs apart that a framework sees on one host.

    Where the driver is not NVIDIA's, the choice made by the environment and the place in it.
    """
    driver = find_driver()
    if driver and len(driver.gpus) == count:
        return [gpu.uuid for gpu in driver.gpus]
    chosen = ",".join(f"{name}={environ[name]}" for name in VISIBLE if environ.get(name))
    return [f"{chosen or 'all GPUs'}, number {place}" for place in range(count)]


def tensorflow_processor(tf: Any) -> tuple[str | None, int]:
    """Return what tells TensorFlow's GPU from others, or None, and its threads, 0 on a GPU.

    Args:
        tf: TensorFlow; it is handed in, as whoever watches a script must not import it first.
    """
    if visible := tf.config.get_visible_devices("GPU"):
        # Its name counts within the GPUs that the environment leaves: 0 on every rank, perhaps.
        known = identities(len(tf.config.list_physical_devices("GPU")), os.environ)
        return known[int(visible[0].name.rpartition(":")[2])], 0
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    threads = threads or int(os.environ.get("TF_NUM_INTRAOP_THREADS") or 0)
    return None, threads or len(os.sched_getaffinity(0))  # 0: all that there are
