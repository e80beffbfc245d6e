"""``mpirun -n 2 python -m hvdtrain.mnist``: train on handwritten digits."""

from __future__ import annotations

import sys

from hvdtrain.system.runtime import terminal

if __name__ == "__main__" and not {"-h", "--help", "--quiet"} & set(sys.argv):
    terminal.begin("mnist")

from hvdtrain.system.runtime.exit import run_and_exit
from hvdtrain.training import trainer
from hvdtrain.workloads.mnist.task import WORKLOAD


def main() -> int:
    """Train; return the exit code."""
    return trainer.main(WORKLOAD, sys.argv[1:])


if __name__ == "__main__":
    run_and_exit(main)
