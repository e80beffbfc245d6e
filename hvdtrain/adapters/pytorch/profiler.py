"""PyTorch's profiler."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from hvdtrain.adapters.framework import RANK, STEP, Profiler


class TorchProfiler(Profiler):
    """torch.profiler, until ``stop``; ``facts`` of the rank, if torch.distributed has none."""

    def __init__(self, facts: Mapping[str, object]) -> None:
        # It would print a line at the start and the end of each profile.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._profile = torch.profiler.profile()
        self._profile.start()
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            self._profile.add_metadata_json(RANK, json.dumps(facts))

    @override
    def step(self, number: int) -> AbstractContextManager[Any]:
        return torch.profiler.record_function(f"{STEP}#{number}")

    @override
    def mark(self, name: str) -> AbstractContextManager[Any]:
        return torch.profiler.record_function(name)

    @override
    def stop(self, path: Path) -> None:
        self._profile.stop()
        self._profile.export_chrome_trace(str(path))
