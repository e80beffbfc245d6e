"""Step 7, one writer: one checkpoint, written by one rank, whole, that reads back to the same."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np

from hvdtrain.environment.verification.bench import Bench, Facts, largest, samples
from hvdtrain.environment.verification.rows import Row, listed, number, row, several
from hvdtrain.environment.verification.written import watch_writes

STEP = 7


def measure(bench: Bench) -> Facts:
    """Save, see who wrote what, and load into a network with other weights."""
    exchange = bench.adapter.communicator
    made = tempfile.mkdtemp(prefix="hvdtrain-verify-") if bench.rank == 0 else ""
    directory = Path(exchange.gather(made.encode())[0].decode())
    try:
        return _save_and_load(bench, directory)
    finally:
        exchange.gather(b"")  # nobody reads or writes there any more
        shutil.rmtree(directory, ignore_errors=True)


def _save_and_load(bench: Bench, directory: Path) -> Facts:
    model = bench.kit.network(seed=200)
    optimizer = bench.kit.adam(model)
    bench.kit.update(model, optimizer, *samples(200, 5))
    kept = bench.kit.state(model, optimizer)
    failure = ""
    with watch_writes() as written:
        try:
            bench.adapter.save_checkpoint(directory, model, optimizer, state={"step": 1})
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    # Every rank has written what it will before one looks at it.
    bench.adapter.communicator.gather(b"")
    found = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    other = bench.kit.network(seed=300)
    fresh = bench.kit.adam(other)
    state = bench.adapter.load_checkpoint(directory, other, fresh, origin={})
    read = bench.kit.state(other, fresh)
    return {
        "failure": failure,
        "written": sum(1 for path in written if Path(path).is_relative_to(directory)),
        "found": found,
        "bytes": size,
        "tensors": len(kept),
        "loaded": state is not None,
        "difference": (
            max(largest(a - b) for a, b in zip(kept, read, strict=True))
            if [a.shape for a in kept] == [b.shape for b in read]
            else float(np.inf)
        ),
    }


def judge(everyone: list[Facts]) -> Row:
    """Rank 0's directory holds one checkpoint; only one rank wrote; what was read was saved."""
    root = everyone[0]
    writers = [rank for rank, facts in enumerate(everyone) if facts["written"]]
    wrong = []
    if len(writers) != 1:
        wrong.append(f"{listed(writers)} wrote" if writers else "no rank wrote")
    if len(root["found"]) != 1:
        wrong.append(f"{', '.join(root['found']) or 'nothing'} where one checkpoint was due")
    failures = [
        f"rank {rank}: {facts['failure']}"
        for rank, facts in enumerate(everyone)
        if facts["failure"]
    ]
    wrong += failures[:1]
    if not root["loaded"]:
        wrong.append("no checkpoint could be read")
    elif root["difference"] != 0:
        wrong.append(f"read back with a difference of {number(root['difference'])}")
    evidence = (
        f"rank {writers[0]} of {len(everyone)} wrote "
        f"{several(everyone[writers[0]]['written'], 'file')}, {root['bytes']:,} bytes; read back: "
        f"max difference {number(root['difference'])}, {root['tensors']} tensors"
        if not wrong
        else "; ".join(wrong)
    )
    return row(STEP, not wrong, evidence, writers=writers, found=root["found"])
