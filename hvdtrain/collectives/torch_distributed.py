"""Collectives of torch.distributed: Gloo in host memory, NCCL or XCCL on GPUs."""

from __future__ import annotations

import atexit
import hashlib
import os
import secrets
import socket
import time
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
from hvdtrain.system.machine.network import (
    INTERFACE,
    address_for_all,
    addresses,
    interface_towards,
)
from hvdtrain.system.runtime.detect import BY_HAND, SPAWN, TORCHRUN, LaunchInfo, detect

OWN_RENDEZVOUS = (SPAWN, TORCHRUN, BY_HAND)  # launchers that provide a rendezvous
RELEASE_SECONDS = 0.05  # seconds
POLL = 0.05  # seconds between reads of the store
Store = Any  # of torch.distributed, whose stores have no types
FOREVER = timedelta(days=365)  # late ranks are waited for, lost ranks are detected


class TorchDistributed(Communicator):
    """The default process group, which is initialized here.

    torchrun provides a rendezvous; otherwise rank 0 chooses a port, and MPI broadcasts it.

    Args:
        gpu: use GPUs and their back end (NCCL, Intel's XCCL) for tensors; bytes and vectors still
            use Gloo.
        timeout: timeout of the rendezvous and of each collective.
    """

    def __init__(self, *, gpu: bool, timeout: timedelta = FOREVER) -> None:
        self.gpu = gpu
        launch = detect(os.environ)
        if gpu:
            accelerator.take(launch.local_rank % accelerator.count())
        backend = "gloo"
        if gpu:
            backend = f"cpu:gloo,{accelerator.kind()}:{accelerator.backend()}"
        if not dist.is_initialized():
            store, rank, size = dist.HashStore(), 0, 1  # type: ignore[attr-defined]
            if launch.launcher in OWN_RENDEZVOUS:
                store, rank, size = _open_store(launch, timeout)
            elif launch.size > 1:
                store, rank, size = _store_by_mpi(timeout)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timeout
            )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # A separate group: if, by a programming error, one rank sums gradients while another one
        # gathers bytes, both must wait until it is reported; in one group Gloo would abort.
        self._control = dist.new_group(backend="gloo", timeout=timeout)
        # A thread of Gloo releases the tensors of the last call some time after it has returned; if
        # Python is already finalizing (before 3.13), that aborts the process.
        atexit.register(time.sleep, RELEASE_SECONDS)

    @override
    def gather(self, data: bytes) -> list[bytes]:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self._control)
        longest = max(int(length) for length in lengths)
        if not longest:
            return [b""] * self.size
        padded = torch.from_numpy(np.frombuffer(bytearray(data.ljust(longest)), np.uint8))
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(gathered, padded, group=self._control)
        return [
            received[: int(length)].numpy().tobytes()
            for received, length in zip(gathered, lengths, strict=True)
        ]

    @override
    def broadcast(self, data: Bytes) -> Bytes:
        received = torch.from_numpy(data.copy())
        dist.broadcast(received, src=0, group=self._control)
        return received.numpy()

    @override
    def sum(self, values: Vector) -> Vector:
        total = torch.from_numpy(values.copy())
        dist.all_reduce(total, group=self._control)
        return total.numpy()

    @override
    def sum_tensor(self, tensor: Tensor, name: str) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

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
        operations: Operations = {
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
            received = self.tensor(count, 0.0)
            operations["send and receive"] = lambda: self._shift(whole, received)
        return operations

    def _shift(self, mine: Tensor, received: Tensor) -> None:
        """Send ``mine`` to the next rank, and receive from the previous one."""
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


def _store_of_rank_0(
    host: str, port: int, size: int, timeout: timedelta, server: socket.socket | None
) -> Store:
    """Return the store that listens on ``server`` of rank 0; None on the other ranks.

    Without a socket of our own it would listen on all interfaces.
    """
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        size,
        is_master=server is not None,
        timeout=timeout,
        master_listen_fd=server.detach() if server else None,
    )


def _store_by_mpi(timeout: timedelta) -> tuple[Store, int, int]:
    """Return a store for the ranks of MPI, rank and size; all ranks call it."""
    from hvdtrain.collectives.mpi4py import Mpi4py

    mpi = Mpi4py()
    host, listens_at = _host_of_rank_0(mpi)
    server = socket.create_server((listens_at, 0)) if mpi.is_root else None
    port = int(mpi.broadcast_bytes(b"%d" % server.getsockname()[1] if server else b""))
    return _store_of_rank_0(host, port, mpi.size, timeout, server), mpi.rank, mpi.size


def _open_store(launch: LaunchInfo, timeout: timedelta) -> tuple[Store, int, int]:
    """Return a store for the ranks that were started together, rank and size; all ranks call it.

    torchrun ends its ranks by a signal if the world changes, so signals must be handled meanwhile.
    """
    # If rank 0 is late or lost, this waits in C++, where the main thread would handle no signals.
    store, rank, size = ThreadPoolExecutor(1).submit(_rendezvous, launch, timeout).result()
    store.set_timeout(timeout)
    prefix = f"hvdtrain/{agree_on_rendezvous(store, rank, size, timeout)}"
    return dist.PrefixStore(prefix, store), rank, size  # type: ignore[attr-defined]


def _rendezvous(launch: LaunchInfo, timeout: timedelta) -> tuple[Store, int, int]:
    if launch.launcher != SPAWN:
        try:
            return next(rendezvous("env://", timeout=timeout))
        except dist.DistNetworkError as error:
            if not launch.is_root:
                raise
            port, reason = os.environ["MASTER_PORT"], str(error).rpartition("message: ")[2]
            raise UsageError(f"MASTER_PORT={port}: {reason}; set it to another port") from error
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = socket.create_server(address) if launch.is_root else None
    store = _store_of_rank_0(*address, launch.size, timeout, server)
    return store, launch.rank, launch.size


def agree_on_rendezvous(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return a name for the ranks that were started together, the same on all of them.

    The store of torchrun's agent outlives the ranks and still has the addresses of former ones. The
    restart counts of torchrun do not distinguish them: agents that join later begin at 0, and not
    every restart is counted. So each rank draws a random name and publishes a digest of all names;
    if all digests are equal, each rank has seen the names drawn in this start.

    Raises:
        TimeoutError: a rank is missing.
    """
    store.set(f"hvdtrain/name/{rank}", secrets.token_hex(8))
    names = [f"hvdtrain/name/{number}" for number in range(size)]
    shown = [f"hvdtrain/seen/{number}" for number in range(size)]
    end = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < end:
        if store.check(names):
            seen = hashlib.sha256(b"".join(store.multi_get(names))).hexdigest()
            store.set(f"hvdtrain/seen/{rank}", seen)
            if store.check(shown) and set(store.multi_get(shown)) == {seen.encode()}:
                return seen
        time.sleep(POLL)
    raise TimeoutError(f"not all of {size} ranks arrived within {timeout.total_seconds():g} s")


def _host_of_rank_0(mpi: Communicator) -> tuple[str, str]:
    """Return rank 0's address for all ranks, and let Gloo use its network; all ranks call it.

    The second one is that at which rank 0 listens: the same, or empty, which is all, if the hosts
    share no network.

    By default Gloo uses the address of the host's name, which may be of another network, loopback
    (Debian), or missing. ``GLOO_SOCKET_IFNAME`` selects an interface.

    Raises:
        UsageError: on a rank without a route to rank 0.
    """
    interface = os.environ.get(INTERFACE)
    hosts: dict[str, list[str]] = dict(
        mpi.gather_json([socket.gethostname(), addresses(interface)])
    )
    shared = address_for_all(hosts.values()) if len(hosts) > 1 else "127.0.0.1"
    address = shared or next(iter(hosts))
    if not (interface or (interface := interface_towards(address))):
        raise UsageError(
            f"{socket.gethostname()} cannot reach rank 0 at {address}: set the interface that "
            f"connects the hosts, e.g. {INTERFACE}=eth0"
        )
    os.environ[INTERFACE] = interface
    return address, shared or ""
