"""Who can sum float32 vectors over all ranks: MPI itself, Horovod, torch.distributed."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil

from hvdtrain.launch.detect import detect

RENDEZVOUS = timedelta(seconds=15)  # for torch.distributed to find its ranks


class Backend(ABC):
    """Somebody who sums float32 vectors over all ranks; all ranks call each method together."""

    @abstractmethod
    def vector(self, length: int, value: float) -> Any:
        """``length`` times ``value``, where the backend wants it."""

    @abstractmethod
    def reduce(self, vector: Any) -> None:
        """Sum in place, and wait until the sum is there."""

    def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Give back what it holds."""


class Mpi4py(Backend):
    """MPI itself, on host memory."""

    def __init__(self, world: Any) -> None:
        from mpi4py import MPI

        self.world, self.in_place = world, MPI.IN_PLACE

    def vector(self, length: int, value: float) -> Any:
        """See ``Backend``."""
        import numpy as np

        return np.full(length, value, np.float32)

    def reduce(self, vector: Any) -> None:
        """See ``Backend``."""
        self.world.Allreduce(self.in_place, vector)


class Horovod(Backend):
    """Horovod with PyTorch; on a GPU where it has operations for it."""

    def __init__(self, world: Any) -> None:
        import horovod.torch as hvd
        import torch

        hvd.init()
        if hvd.size() != world.size:
            raise RuntimeError(f"its world is {hvd.size()}, MPI's is {world.size}")
        self.hvd, self.torch, self.device = hvd, torch, "cpu"
        if hvd.nccl_built() and torch.cuda.device_count():
            self.device = f"cuda:{hvd.local_rank() % torch.cuda.device_count()}"

    def vector(self, length: int, value: float) -> Any:
        """See ``Backend``."""
        return self.torch.full((length,), value, dtype=self.torch.float32, device=self.device)

    def reduce(self, vector: Any) -> None:
        """See ``Backend``."""
        self.hvd.allreduce_(vector, op=self.hvd.Sum, name=f"measured.{len(vector)}")
        if self.device != "cpu":
            self.torch.cuda.synchronize()

    def close(self) -> None:
        """See ``Backend``."""
        self.hvd.shutdown()


class Distributed(Backend):
    """torch.distributed over Gloo (host memory) or NCCL (GPUs)."""

    def __init__(self, world: Any, name: str) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.device = torch, dist, "cpu"
        if name == "nccl":
            place = detect(os.environ).local_rank % torch.cuda.device_count()
            self.device = f"cuda:{place}"
            torch.cuda.set_device(self.device)
        hosts = set(world.allgather(socket.gethostname()))
        address = world.bcast(_free_address(alone=len(hosts) == 1))
        dist.init_process_group(
            name,
            init_method=f"tcp://{address}",
            rank=world.rank,
            world_size=world.size,
            timeout=RENDEZVOUS,
        )

    def vector(self, length: int, value: float) -> Any:
        """See ``Backend``."""
        return self.torch.full((length,), value, dtype=self.torch.float32, device=self.device)

    def reduce(self, vector: Any) -> None:
        """See ``Backend``."""
        self.dist.all_reduce(vector)
        if self.device != "cpu":
            self.torch.cuda.synchronize()

    def close(self) -> None:
        """See ``Backend``."""
        self.dist.destroy_process_group()


def _free_address(*, alone: bool) -> str:
    """A host and port where torch.distributed can meet; on this host, by a name that others know.

    ``alone``: all ranks are here. ``GLOO_SOCKET_IFNAME`` names the interface that they share.
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    if alone:
        return f"127.0.0.1:{port}"
    interface = psutil.net_if_addrs().get(os.environ.get("GLOO_SOCKET_IFNAME", ""), [])
    addresses = [one.address for one in interface if one.family == socket.AF_INET]
    return f"{addresses[0] if addresses else socket.gethostname()}:{port}"


def missing(name: str) -> str:
    """Why backend ``name`` cannot be measured here at all; empty where it can."""
    if name == "mpi4py":
        return ""
    try:
        import torch
    except ImportError as error:
        return f"PyTorch is not there: {error}"
    if name == "horovod":
        try:
            import horovod.torch  # noqa: F401
        except ImportError as error:
            return f"Horovod for PyTorch is not there: {error}"
    if name == "gloo" and not torch.distributed.is_gloo_available():
        return "this PyTorch has no Gloo"
    if name == "nccl" and not (torch.cuda.device_count() and torch.distributed.is_nccl_available()):
        return "no GPU, or no NCCL in this PyTorch"
    return ""


BACKENDS: dict[str, Callable[[Any], Backend]] = {
    "mpi4py": Mpi4py,
    "horovod": Horovod,
    "gloo": lambda world: Distributed(world, "gloo"),
    "nccl": lambda world: Distributed(world, "nccl"),
}
