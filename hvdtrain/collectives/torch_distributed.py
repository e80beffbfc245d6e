"""The collectives of torch.distributed: Gloo in host memory, NCCL on GPUs."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from typing_extensions import override

from hvdtrain.collectives.base import Bytes, Communicator, Operations, Tensor, Vector
from hvdtrain.system.runtime.detect import BY_HAND, RESTARTS_DONE, SPAWN, TORCHRUN, detect

OWN_RENDEZVOUS = (SPAWN, TORCHRUN, BY_HAND)  # launchers that say where the ranks meet
FOREVER = timedelta(days=365)  # a rank that is late is waited for; one that is dead, detected


class TorchDistributed(Communicator):
    """The default process group, which starting this one makes.

    torchrun tells the ranks where they meet; otherwise rank 0 picks a port, and MPI broadcasts it.

    Args:
        gpu: tensors are on GPUs, and NCCL sums them; bytes and vectors stay with Gloo.
        timeout: for the ranks to find one another, and for each collective.
    """

    def __init__(self, *, gpu: bool, timeout: timedelta = FOREVER) -> None:
        self.gpu = gpu
        launch = detect(os.environ)
        if gpu:
            torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
        if dist.is_initialized():
            pass
        elif launch.launcher in OWN_RENDEZVOUS:
            # The store of torchrun's agent outlives a restart of its ranks, and in it the addresses
            # of those that are no more, which a new rank would try to reach.
            attempt = os.environ.get(RESTARTS_DONE, "0")
            store, rank, size = next(rendezvous("env://", timeout=timeout))
            store.set_timeout(timeout)
            store = dist.PrefixStore(f"hvdtrain/{attempt}", store)  # type: ignore[attr-defined]
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timeout
            )
        else:
            rank, size, address = 0, 1, _free_address(alone=True)
            if launch.size > 1:
                from hvdtrain.collectives.mpi4py import Mpi4py

                mpi = Mpi4py()
                hosts = set(mpi.gather(socket.gethostname().encode()))
                mine = _free_address(alone=len(hosts) == 1)
                rank, size = mpi.rank, mpi.size
                address = mpi.broadcast_bytes(mine.encode()).decode()
            dist.init_process_group(
                backend, init_method=f"tcp://{address}", rank=rank, world_size=size, timeout=timeout
            )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Where one rank sums gradients and another gathers bytes, by a mistake in a program, both
        # are to wait until that is told: in one group Gloo would end the process.
        self._control = dist.new_group(backend="gloo", timeout=timeout)

    @override
    def gather(self, data: bytes) -> list[bytes]:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self._control)
        longest = max(int(length) for length in lengths)
        if not longest:
            return [b""] * self.size
        padded = torch.from_numpy(np.frombuffer(bytearray(data.ljust(longest)), np.uint8))
        everyone = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(everyone, padded, group=self._control)
        return [
            one[: int(length)].numpy().tobytes()
            for one, length in zip(everyone, lengths, strict=True)
        ]

    @override
    def broadcast(self, data: Bytes) -> Bytes:
        received = torch.from_numpy(data.copy())
        dist.broadcast(received, src=0, group=self._control)
        result: Bytes = received.numpy()
        return result

    @override
    def sum(self, values: Vector) -> Vector:
        total = torch.from_numpy(values.copy())
        dist.all_reduce(total, group=self._control)
        result: Vector = total.numpy()
        return result

    @override
    def tensor(self, length: int, value: float) -> Tensor:
        device = "cuda" if self.gpu else "cpu"
        return torch.full((length,), value, dtype=torch.float32, device=device)

    @override
    def sum_tensor(self, tensor: Tensor, name: str) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    @override
    def operations(self, count: int) -> Operations:
        whole = self.tensor(count, 0.0)
        length = self.part_of(count)
        part, parts = self.tensor(length, 0.0), self.tensor(length * self.size, 0.0)
        pieces = list(parts.chunk(self.size))
        ours = pieces if self.is_root else None
        others = self.tensor(length * self.size, 0.0)
        found: Operations = {
            "broadcast": lambda: dist.broadcast(whole, src=0),
            "scatter": lambda: dist.scatter(part, ours, src=0),
            "gather": lambda: dist.gather(part, ours, dst=0),
            "reduce": lambda: dist.reduce(whole, dst=0),
            **super().operations(count),
            "allgather": lambda: dist.all_gather(pieces, part),
            "reduce-scatter": lambda: dist.reduce_scatter(part, pieces),
            "alltoall": lambda: dist.all_to_all_single(others, parts),
        }
        if self.size > 1:  # no rank sends to itself
            other = self.tensor(count, 0.0)
            found["send and receive"] = lambda: self._shift(whole, other)
        return found

    def _shift(self, mine: Tensor, received: Tensor) -> None:
        """Send ``mine`` to the next rank, and receive from the one before."""
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        ends = ((dist.isend, mine, following), (dist.irecv, received, previous))
        for request in dist.batch_isend_irecv([dist.P2POp(*end) for end in ends]):
            request.wait()

    @override
    def synchronize(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    @override
    def close(self) -> None:
        dist.destroy_process_group()


def _free_address(*, alone: bool) -> str:
    """Return a host and port of this rank where the others can meet it.

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
