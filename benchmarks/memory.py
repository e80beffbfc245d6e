"""Peak memory per rank of each strategy, with AdamW on a large net, beside what theory gives.

python -m benchmarks.memory [--ranks 2 4] [--megabytes 320]

Theory counts P bytes of parameters, as many of gradients, and 2 P of optimizer state: whole on each
rank, or in parts (Rajbhandari et al., SC 2020). With FSDP, one block of the net is whole besides,
parameters and gradients. Measured is the largest resident memory of any rank while it trains, less
what it had before it made the net. What is freed goes back to the system at once
(``MALLOC_MMAP_THRESHOLD_``), or the gaps in glibc's heap, which FSDP leaves, would be measured too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import BIN, environment

WIDTH, BATCH, STEPS = 1024, 2, 3
STRATEGIES = ("ddp", "zero", "fsdp")
BLOCK = 4 * WIDTH * (WIDTH + 1)  # bytes of a layer of float32


def theory(strategy: str, ranks: int, whole: int) -> float:
    """Bytes per rank of parameters, gradients and optimizer state."""
    if strategy == "fsdp":
        return 4 * whole / ranks + 2 * BLOCK
    return 2 * whole + 2 * whole / (ranks if strategy == "zero" else 1)


def resident(key: str) -> int:
    """Return a figure of this process's memory in bytes, such as ``VmHWM``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def train(strategy: str, layers: int) -> None:
    """Train on this rank; rank 0 prints the peak of the rank that had most."""
    import torch

    from hvdtrain import adapter

    hvd = adapter("pytorch", strategy)
    hvd.initialize()
    hvd.pin_device()
    before = resident("VmRSS")
    net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    model, optimizer = hvd.distribute_optimizer(net, optimizer)
    hvd.broadcast_state(model, optimizer)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew here
    shards = hvd.shard_data(hvd.world.size * BATCH * STEPS, global_batch=hvd.world.size * BATCH)
    for part in shards.epoch(0):
        optimizer.zero_grad()
        model(torch.ones(part.count, WIDTH)).square().mean().backward()
        optimizer.step()
    peaks = hvd.communicator.gather(str(resident("VmHWM") - before).encode())
    if hvd.world.is_writer:
        print(json.dumps({"peak": max(map(int, peaks))}), flush=True)


def measure(strategy: str, ranks: int, layers: int) -> int:
    """Return the peak in bytes."""
    line = [
        str(BIN / "mpirun"),
        "--oversubscribe",
        "-n",
        str(ranks),
        sys.executable,
        "-m",
        "benchmarks.memory",
    ]
    done = subprocess.run(
        [*line, "--train", strategy, "--layers", str(layers)],
        env=environment(OMP_NUM_THREADS="1", MALLOC_MMAP_THRESHOLD_="65536"),
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    return int(json.loads(done.stdout.splitlines()[-1])["peak"])


def main() -> None:
    """Measure, or be one of the ranks that are measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=float, default=320, help="of parameters")
    parser.add_argument("--train", choices=STRATEGIES, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.layers)
        return
    layers = round(options.megabytes * 1e6 / BLOCK)
    whole = layers * BLOCK
    print(f"AdamW, {whole / 1e6:.0f} MB of parameters; per rank, in MB")
    print(f"{'strategy':10} {'ranks':>5} {'peak':>7} {'theory':>7} {'ratio':>6}")
    for ranks in options.ranks:
        for strategy in STRATEGIES:
            peak, due = measure(strategy, ranks, layers), theory(strategy, ranks, whole)
            figures = f"{peak / 1e6:7.0f} {due / 1e6:7.0f} {peak / due:6.2f}"
            print(f"{strategy:10} {ranks:5} {figures}", flush=True)


if __name__ == "__main__":
    main()
