"""Utilization and energy of a GPU, from NVIDIA's management library (NVML).

Needs ``hvdtrain[nvidia]``. Without it, for GPUs of other vendors and for MIG instances, all values
are None.
"""

from __future__ import annotations

import importlib
import statistics
from typing import Any


class GpuMeter:
    """Measure a GPU from the creation of the meter.

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
