"""The collectives of torch.distributed: Gloo in host memory, NCCL or its like on GPUs."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from typing_extensions import override

from hvdtrain.collectives.base import Bytes, Communicator, Operations, Tensor, Vector
from hvdtrain.errors import UsageError
from hvdtrain.system.machine import accelerator
from hvdtrain.system.machine.network import address_for_all, addresses, interface_towards
from hvdtrain.system.runtime.detect import BY_HAND, SPAWN, TORCHRUN, detect

OWN_RENDEZVOUS = (SPAWN, TORCHRUN, BY_HAND)  # launchers that say where it is
GIVES_BACK = 0.05  # seconds
POLL = 0.05  # seconds between two looks at what the other ranks have written
Store = Any  # of torch.distributed, which does not tell mypy of its stores
INTERFACE = "GLOO_SOCKET_IFNAME"
FOREVER = timedelta(days=365)  # a rank that is late is waited for; one that is dead, detected


class Members(Communicator):
    """Ranks of torch.distributed: all of them, or some that have a group of their own.

    Attributes:
        ranks: their ranks among all, by rank here.
        group: of them, for tensors; None: of all.
    """

    ranks: Sequence[int]
    group: Any = None
    _control: Any  # for bytes and vectors

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
        dist.broadcast(received, src=self.ranks[0], group=self._control)
        result: Bytes = received.numpy()
        return result

    @override
    def sum(self, values: Vector) -> Vector:
        total = torch.from_numpy(values.copy())
        dist.all_reduce(total, group=self._control)
        result: Vector = total.numpy()
        return result

    @override
    def sum_tensor(self, tensor: Tensor, name: str) -> Tensor:
        dist.all_reduce(tensor, group=self.group)
        return tensor


class TorchDistributed(Members):
    """The default process group, which starting this one makes.

    torchrun tells the ranks of a rendezvous; otherwise rank 0 picks a port, and MPI broadcasts it.

    Args:
        gpu: tensors are on GPUs, and their own back end sums them (NCCL, Intel's XCCL); bytes and
            vectors stay with Gloo.
        timeout: for the ranks to find one another, and for each collective.
    """

    def __init__(self, *, gpu: bool, timeout: timedelta = FOREVER) -> None:
        self.gpu = gpu
        launch = detect(os.environ)
        if gpu:
            accelerator.take(launch.local_rank % accelerator.count())
        own = f"{accelerator.kind()}:{accelerator.backend()}"
        backend = f"cpu:gloo,{own}" if gpu else "gloo"
        if dist.is_initialized():
            pass
        elif launch.launcher in OWN_RENDEZVOUS:
            store, rank, size = _open_store(timeout)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timeout
            )
        else:
            rank, size, host, port = 0, 1, "127.0.0.1", _free_port()
            if launch.size > 1:
                from hvdtrain.collectives.mpi4py import Mpi4py

                mpi = Mpi4py()
                rank, size, host = mpi.rank, mpi.size, _host_of_rank_0(mpi)
                port = int(mpi.broadcast_bytes(b"%d" % port))
            dist.init_process_group(
                backend,
                init_method=f"tcp://{host}:{port}",
                rank=rank,
                world_size=size,
                timeout=timeout,
            )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.ranks = range(self.size)
        # Where one rank sums gradients and another gathers bytes, by a mistake in a program, both
        # are to wait until that is told: in one group Gloo would end the process.
        self._control = dist.new_group(backend="gloo", timeout=timeout)
        # A thread of Gloo gives the tensors of the last call back to Python, some time after that
        # has returned; once Python is ending it aborts the process (before 3.13).
        atexit.register(time.sleep, GIVES_BACK)

    def split(self, groups: Sequence[Sequence[int]]) -> Some:
        """Return the one of ``groups`` of ranks that this rank is in; all ranks call it alike."""
        made = [Some(ranks) for ranks in groups]
        return next(one for one in made if self.rank in one.ranks)

    @override
    def tensor(self, length: int, value: float) -> Tensor:
        device = accelerator.kind() if self.gpu else "cpu"
        return torch.full((length,), value, dtype=torch.float32, device=device)

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
            accelerator.synchronize()

    @override
    def close(self) -> None:
        dist.destroy_process_group()


class Some(Members):
    """Some of the ranks; those that are not among them make it too."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks, self.size = ranks, len(ranks)
        self.group = dist.new_group(ranks, timeout=FOREVER)
        self._control = dist.new_group(ranks, backend="gloo", timeout=FOREVER)
        self.rank = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else -1


def _open_store(timeout: timedelta) -> tuple[Store, int, int]:
    """Return a store for the ranks that were started together, and rank and size; all call it.

    torchrun asks its ranks to end where the world changes, so they have to hear signals meanwhile.
    """
    # Where rank 0 is late, or gone, this waits in C++, where the main thread would hear nothing.
    waiting = ThreadPoolExecutor(1).submit(next, rendezvous("env://", timeout=timeout))
    store, rank, size = waiting.result()
    store.set_timeout(timeout)
    prefix = f"hvdtrain/{agree_on_rendezvous(store, rank, size, timeout)}"
    return dist.PrefixStore(prefix, store), rank, size  # type: ignore[attr-defined]


def agree_on_rendezvous(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return a name for the ranks that were started together, the same on all of them.

    The store of torchrun's agent outlives the ranks, and in it the addresses of those that are no
    more. How often each agent has restarted its own ranks, which is all that torchrun tells, does
    not tell them apart: agents that join later begin at 0, and not every new start is counted. So
    each rank draws a name, and shows which names it sees; where all show the same ones, each of
    them has seen a name drawn in this start.

    Raises:
        TimeoutError: a rank has not come.
    """
    store.set(f"hvdtrain/name/{rank}", secrets.token_hex(8))
    names = [f"hvdtrain/name/{one}" for one in range(size)]
    shown = [f"hvdtrain/seen/{one}" for one in range(size)]
    end = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < end:
        if store.check(names):
            seen = hashlib.sha256(b"".join(store.multi_get(names))).hexdigest()
            store.set(f"hvdtrain/seen/{rank}", seen)
            if store.check(shown) and set(store.multi_get(shown)) == {seen.encode()}:
                return seen
        time.sleep(POLL)
    raise TimeoutError(f"not all of {size} ranks came within {timeout.total_seconds():g} s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _host_of_rank_0(mpi: Communicator) -> str:
    """Return where all ranks reach rank 0, and let Gloo use that network; all ranks call it.

    Left alone Gloo takes the address that this host's name has, which may be that of another
    network, of loopback (Debian), or none. ``GLOO_SOCKET_IFNAME`` names another interface.

    Raises:
        UsageError: on a rank that finds no way to rank 0.
    """
    interface = os.environ.get(INTERFACE)
    mine = json.dumps([socket.gethostname(), addresses(interface)]).encode()
    hosts: dict[str, list[str]] = dict(json.loads(told) for told in mpi.gather(mine))
    if len(hosts) == 1:
        return "127.0.0.1"
    found = address_for_all(hosts) or next(iter(hosts))
    if not (interface or (interface := interface_towards(found))):
        raise UsageError(
            f"{socket.gethostname()} does not reach {found}, where rank 0 is: name the interface "
            f"that connects the hosts, as in {INTERFACE}=eth0"
        )
    os.environ[INTERFACE] = interface
    return found
