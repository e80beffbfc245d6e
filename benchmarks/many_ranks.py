"""What rank 0 does for each other rank, in seconds, with simulated peers; it must not be quadratic.

python -m benchmarks.many_ranks [--ranks 64 256 1024 4096]

The collectives answer as if N ranks, eight per host, had sent what rank 0 sends; the transport is
left out, and all that rank 0 computes from the answers is measured. The connections of the failure
detector are real: a process connects as the first rank of each other host does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import torch
from typing_extensions import override

from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.adapters.pytorch.framework import PyTorchFramework
from hvdtrain.adapters.strategy import Single
from hvdtrain.collectives.base import Communicator, SingleRank
from hvdtrain.config.options import Options
from hvdtrain.steps.summary import Summary
from hvdtrain.system.runtime import handshake
from hvdtrain.training import checks
from hvdtrain.training.summary import with_usage
from hvdtrain.training.throughput import Clock
from hvdtrain.workloads.mnist.data import MnistOptions
from hvdtrain.workloads.mnist.task import WORKLOAD

PER_HOST = 8
TOGETHER = 64  # peers that connect at the same time
RUNS = 3  # of which the fastest counts: others use the cores, too
SECONDS = 1.0  # at most, for up to 4,096 ranks
GROWTH = 1.5  # of the time, at most, relative to that of the number of ranks
HOST = socket.gethostname()


class Peers(SingleRank):
    """Rank 0 of many, whose peers send what it sends, from other hosts."""

    def __init__(self, size: int) -> None:
        self.size = size

    @override
    def gather(self, data: bytes) -> list[bytes]:
        mine = HOST.encode()
        hosts = [b"%s-%d" % (mine, rank // PER_HOST) for rank in range(self.size)]
        return [data.replace(mine, host) for host in hosts]


class RankZero(Single):
    """The strategy of rank 0 of many."""

    peers = 1

    @override
    def connect(self) -> Communicator:
        return Peers(self.peers)

    @override
    def distribute(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        return model, optimizer


def be_peers(endpoint: bytes, hosts: int, ready: Any) -> None:
    """Connect as the first rank of each other host; stay until the end of the process."""
    ready.send(True)
    ready.recv()  # the start of this process is not measured
    root = json.loads(endpoint)
    secret = bytes.fromhex(root["secret"])

    def connect(host: int) -> Any:
        return handshake.connect([("127.0.0.1", root["port"])], PER_HOST * host, secret)

    with ThreadPoolExecutor(TOGETHER) as threads:
        connections = list(threads.map(connect, range(1, hosts)))
    ready.send(all(connections))
    with contextlib.suppress(EOFError):
        ready.recv()  # until rank 0 has ended


@contextlib.contextmanager
def measured(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Add the seconds of a block."""
    began = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began


def start_and_save(ranks: int) -> NoReturn:
    """Print the seconds of rank 0 by step of the start, of a check and of a save, and exit."""
    environ = {"SIZE": ranks, "RANK": 0, "LOCAL_SIZE": PER_HOST, "LOCAL_RANK": 0}
    os.environ.update({f"OMPI_COMM_WORLD_{name}": str(value) for name, value in environ.items()})
    seconds: dict[str, float] = {}
    RankZero.peers = ranks
    adapter = CommonAdapter(PyTorchFramework, RankZero)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    task = WORKLOAD.build(MnistOptions(framework="pytorch", device="cpu"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with measured("initialize", seconds):
        adapter.initialize()
    started = start_peers(adapter, ranks // PER_HOST)
    with measured("failure detector", seconds):
        started.send(True)
        assert started.recv(), "a peer was refused"
    with measured("pin_device", seconds):
        adapter.pin_device()
    with measured("options and data", seconds):
        checks.check_options(adapter, Options(), "")
        checks.check_data(adapter, task)
    with measured("shard_data", seconds):
        adapter.shard_data(10 * ranks, global_batch=ranks, digest="0" * 64)
    with measured("distribute_optimizer", seconds):
        model, optimizer = adapter.distribute_optimizer(model, optimizer)
    with measured("broadcast_state", seconds):
        adapter.broadcast_state(model, optimizer)
    with measured("agreement", seconds):
        adapter.communicator.together(lambda: None)
    with tempfile.TemporaryDirectory() as folder, measured("save_checkpoint", seconds):
        adapter.save_checkpoint(Path(folder), model, optimizer, state={"step": 1})
    with measured("summary", seconds):
        with_usage(Summary(), adapter, Clock())
    steps = ", ".join(f"{name} {value:.3f}" for name, value in seconds.items())
    print(f"{sum(seconds.values()):.3f} s for {ranks} ranks: {steps}", flush=True)
    os._exit(0)  # its peers end with it, which the failure detector would report


def start_peers(adapter: CommonAdapter, hosts: int) -> Any:
    """Start the process of the peers of the failure detector; return the pipe to it."""
    detector = adapter._detector
    assert detector
    ours, theirs = multiprocessing.Pipe()
    words = (detector.endpoint(), hosts, theirs)
    multiprocessing.get_context("spawn").Process(target=be_peers, args=words, daemon=True).start()
    assert ours.recv()
    return ours


def measure(ranks: int) -> float:
    """Print and return the seconds of rank 0 of ``ranks``, in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, f"--one={ranks}"]
    line = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(line, end="", flush=True)
    return float(line.split()[0])


def main() -> int:
    """Measure each number of ranks; return 1 if the most take too long, or grow too fast."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is None:
        seconds = {n: min(measure(n) for _ in range(RUNS)) for n in sorted(options.ranks)}
        *_, before, most = [min(seconds), *seconds]
        growth = seconds[most] / seconds[before]
        slow = seconds[most] > SECONDS or growth > GROWTH * most / before
        verdict = "TOO SLOW" if slow else "in time"
        print(f"{verdict}: {seconds[most]:.3f} s, {growth:.1f} times those of {before} ranks")
        return int(slow)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    start_and_save(options.one)


if __name__ == "__main__":
    sys.exit(main())
