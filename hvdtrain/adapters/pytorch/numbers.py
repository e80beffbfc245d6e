"""Numbers that a script reads from sharded tensors, e.g. the norm of a gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hvdtrain.collectives.torch_distributed import FOREVER
from hvdtrain.system.runtime.waits import Waits

READING = "item() of a sharded tensor"
ITEM = torch.ops.aten._local_scalar_dense.default  # what item(), float() and bool() call


def read_whole(device: str, waits: Waits) -> None:
    """Let ``item()`` of a parameter, sum, norm or maximum return the whole; all ranks must call it.

    PyTorch returns that of this rank's rows. The numbers have a process group of their own: a rank
    that reads one alone must not receive the gradients of others.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers  # there is no public API for it
    if ITEM in handlers:
        return
    mesh: Any = DeviceMesh.from_group(dist.new_group(timeout=FOREVER), device)

    def item(_: Any, values: tuple[Any, ...], __: Any) -> Any:
        value, local = values[0], values[0].to_local()
        is_whole = all(placement.is_replicate() for placement in value.placements)
        if not is_whole and value.device_mesh.mesh.tolist() == mesh.mesh.tolist():
            shape, stride = value.shape, value.stride()
            with waits.during(READING):
                sharded = DTensor.from_local(
                    local, mesh, value.placements, shape=shape, stride=stride
                )
                local = sharded.full_tensor()
        return local.item()

    handlers[ITEM] = item  # type: ignore[assignment]
