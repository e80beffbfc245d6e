"""GPUs available to this process, from the environment and NVIDIA's driver.

The driver is queried directly, without a framework. Order and ``CUDA_VISIBLE_DEVICES`` have the
same effect as in every CUDA program.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import statistics
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DRIVER = "libcuda.so.1"
DEVICES = Path("/dev")
NAME_LENGTH = 256
CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
VISIBLE = (  # set by user or launcher to select GPUs; Intel's tiles count as GPUs
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)


@dataclass(frozen=True)
class Gpu:
    """A GPU, or an instance of a partitioned GPU."""

    name: str  # product name
    uuid: str  # the same for every process that uses it
    memory: int  # bytes
    capability: int  # compute capability, e.g. 90


@dataclass(frozen=True)
class Driver:
    """Driver version and GPUs."""

    cuda: str  # the newest supported CUDA version, e.g. 13.0
    gpus: tuple[Gpu, ...]  # in CUDA's order


def count_gpus(environ: Mapping[str, str], devices: Path = DEVICES) -> int:
    """Count the GPUs that a rank here may use: those in CUDA_VISIBLE_DEVICES etc., else all.

    GPUs of AMD and Intel are counted only if their variable names them, as graphics units of
    processors look the same.
    """
    chosen = next((environ[name] for name in VISIBLE if name in environ), None)
    if chosen is not None:
        return len([name for name in chosen.split(",") if name.strip() not in ("", "-1")])
    return len(list(devices.glob("nvidia[0-9]*")))


def gpu_of_rank(local_rank: int, visible: int) -> int:
    """Return which of the ``visible`` GPUs a local rank uses; 0 if there is none.

    Whether ranks then share a GPU is checked by all together: ``steps/integrity.py``.
    """
    return local_rank % max(1, visible)


def find_driver(library: str = DRIVER) -> Driver | None:
    """Query the driver; return None if there is no driver or no usable GPU."""
    try:
        cuda = ctypes.CDLL(library)
        number = ctypes.c_int()
        if cuda.cuInit(0) or cuda.cuDriverGetVersion(ctypes.byref(number)):
            return None
        version = f"{number.value // 1000}.{number.value % 1000 // 10}"
        if cuda.cuDeviceGetCount(ctypes.byref(number)):
            return None
        return Driver(version, tuple(_describe(cuda, index) for index in range(number.value)))
    except (OSError, AttributeError):
        return None


def _describe(cuda: ctypes.CDLL, index: int) -> Gpu:
    device, memory = ctypes.c_int(), ctypes.c_size_t()
    name, identity = ctypes.create_string_buffer(NAME_LENGTH), ctypes.create_string_buffer(16)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, NAME_LENGTH, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    # Version 2 distinguishes the instances of a partitioned GPU; drivers before 11.4 lack it.
    get_uuid = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
    get_uuid(identity, device)
    major, minor = ctypes.c_int(), ctypes.c_int()
    for value, number in zip((major, minor), CAPABILITY, strict=True):
        cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
    return Gpu(
        name=name.value.decode(errors="replace"),
        uuid=f"GPU-{uuid.UUID(bytes=identity.raw)}",
        memory=memory.value,
        capability=10 * major.value + minor.value,
    )


def identities(count: int, environ: Mapping[str, str]) -> list[str]:
    """Return an identity per GPU, for the ``count`` GPUs that a framework sees on a host.

    Without NVIDIA's driver it consists of the environment's selection and the index in it.
    """
    driver = find_driver()
    if driver and len(driver.gpus) == count:
        return [gpu.uuid for gpu in driver.gpus]
    chosen = ",".join(f"{name}={environ[name]}" for name in VISIBLE if environ.get(name))
    return [f"{chosen or 'all GPUs'}, number {index}" for index in range(count)]


def pytorch_processor(torch: Any, device: Any) -> tuple[str | None, int]:
    """Return the identity of a GPU of PyTorch, or None, and its number of threads, 0 on a GPU.

    Args:
        torch: the PyTorch module; passed in, as it must not be imported before a user's script.
        device: the device that this process computes on, a ``torch.device`` or its name.
    """
    device = torch.device(device)
    module = getattr(torch, device.type, None)
    if device.type == "cpu" or module is None:
        return None, torch.get_num_threads()
    properties = module.get_device_properties(device)
    return str(getattr(properties, "uuid", device)), 0


def tensorflow_processor(tf: Any) -> tuple[str | None, int]:
    """Return the identity of TensorFlow's GPU, or None, and its number of threads, 0 on a GPU.

    Args:
        tf: the TensorFlow module; passed in, as it must not be imported before a user's script.
    """
    if visible := tf.config.get_visible_devices("GPU"):
        # Its number is relative to the GPUs selected by the environment, so maybe 0 on every rank.
        known = identities(len(tf.config.list_physical_devices("GPU")), os.environ)
        return known[int(visible[0].name.rpartition(":")[2])], 0
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    threads = threads or int(os.environ.get("TF_NUM_INTRAOP_THREADS") or 0)
    return None, threads or len(os.sched_getaffinity(0))  # 0: all cores


class GpuMeter:
    """Utilization and energy of a GPU since the creation of the meter, from NVIDIA's NVML.

    Needs ``hvdtrain[nvidia]``. Without it, for GPUs of other vendors and for MIG instances, all
    values are None.

    Args:
        identity: the driver's UUID, e.g. ``GPU-8f6e...``.
    """

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self._busy: list[float] = []
        self._library: Any = None
        try:
            library = importlib.import_module("pynvml")
            library.nvmlInit()
            self._gpu = library.nvmlDeviceGetHandleByUUID(identity)
            self._begun = library.nvmlDeviceGetTotalEnergyConsumption(self._gpu)
            self._library = library
        except Exception:  # pynvml's error class may not be importable
            return

    def _query(self, function: str) -> Any:
        """Return the result of an NVML function; after a failure, None from then on."""
        try:
            return getattr(self._library, function)(self._gpu) if self._library else None
        except Exception:  # a training must not end because of it
            self._library = None
            self._busy.clear()
            return None

    def sample(self) -> None:
        """Sample the utilization; takes about a millisecond."""
        if rates := self._query("nvmlDeviceGetUtilizationRates"):
            self._busy.append(rates.gpu / 100)

    @property
    def recent(self) -> float | None:
        """Return the last sample: the fraction of time in which the GPU was busy."""
        return self._busy[-1] if self._busy else None

    @property
    def busy(self) -> float | None:
        """Return the mean of all samples."""
        return statistics.fmean(self._busy) if self._busy else None

    @property
    def joules(self) -> float | None:
        """Return the energy used since the creation of the meter, in joules."""
        now = self._query("nvmlDeviceGetTotalEnergyConsumption")
        return None if now is None else float(now - self._begun) / 1000  # from mJ
