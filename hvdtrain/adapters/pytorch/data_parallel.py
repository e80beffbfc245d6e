"""The strategy of one process with PyTorch that computes on all GPUs of its host.

``torch.nn.DataParallel`` copies the model to each GPU for each pass, splits the batch, and sums
the gradients on the first GPU. It needs no launcher, and is the slowest strategy: one Python
process serves all GPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from hvdtrain.adapters.strategy import Single
from hvdtrain.collectives.base import Communicator
from hvdtrain.errors import UsageError
from hvdtrain.system.machine import accelerator
from hvdtrain.system.output.text import plural


class DataParallel(Single):
    """One process with two or more GPUs."""

    name = "data-parallel"
    runtime = "the data-parallel strategy"

    @override
    def connect(self) -> Communicator:
        count = accelerator.count()
        if count < 2:
            raise UsageError(
                f"--strategy data-parallel needs two or more GPUs, {plural(count, 'GPU')} visible: "
                "omit the option (CUDA_VISIBLE_DEVICES restricts the visible GPUs)"
            )
        self.gpus_per_rank = count
        return super().connect()

    @override
    def distribute(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        return AutocastDataParallel(model), optimizer

    @override
    def synchronize_batchnorm(self, task: Any) -> None:
        raise UsageError("--sync-batchnorm is not for --strategy data-parallel; use ddp")

    @override
    def compile(self, task: Any) -> None:
        # The copies of a compiled model would compute with the parameters of the original.
        raise UsageError("--compile is not for --strategy data-parallel; use ddp")


class AutocastDataParallel(torch.nn.DataParallel[Any]):
    """Copies of a model, which compute in the calling thread's autocast type.

    PyTorch's ``DataParallel`` passes to its threads whether autocast is enabled, not its type.
    """

    @override
    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        device = accelerator.kind()
        kind, casts = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        cast = [torch.autocast(device, kind, enabled=casts)(replica) for replica in replicas]
        return super().parallel_apply(cast, inputs, kwargs)
