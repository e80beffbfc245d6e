"""How busy a GPU is and what energy it takes, by NVIDIA's management library (NVML).

Its Python module comes with ``hvdtrain[nvidia]``. Where it is not there, or the GPU is not NVIDIA's
or is a part of one (MIG), nothing is known.
"""

from __future__ import annotations

import importlib
import statistics
from typing import Any


class GpuMeter:
    """Watches one GPU from when it is made.

    Args:
        identity: what the driver calls it, such as ``GPU-8f6e...``.
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
        except Exception:  # its errors are of a class of its own, which may not be there
            return

    def _ask(self, question: str) -> Any:
        """Return the answer; after a question without one, nothing is known any more."""
        try:
            return getattr(self._library, question)(self._gpu) if self._library else None
        except Exception:  # a training does not end for it
            self._library = None
            self._busy.clear()
            return None

    def look(self) -> None:
        """Note how busy the GPU is now: a call of about a millisecond, to be made now and then."""
        if rates := self._ask("nvmlDeviceGetUtilizationRates"):
            self._busy.append(rates.gpu / 100)

    @property
    def recent(self) -> float | None:
        """The fraction of the last look's time in which the GPU computed anything."""
        return self._busy[-1] if self._busy else None

    @property
    def busy(self) -> float | None:
        """The mean of all looks."""
        return statistics.fmean(self._busy) if self._busy else None

    @property
    def joules(self) -> float | None:
        """The energy that the GPU has taken so far."""
        now = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if now is None else float(now - self._begun) / 1000  # from mJ
