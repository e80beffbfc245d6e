"""``mpirun -n 2 python -m hvdtrain.ssd300``: train an SSD300 detector."""

from __future__ import annotations

import sys

from hvdtrain.system.runtime import terminal

if __name__ == "__main__" and not {"-h", "--help", "--quiet"} & set(sys.argv):
    terminal.begin("ssd300")

from hvdtrain.system.runtime.exit import run_and_exit
from hvdtrain.training import trainer
from hvdtrain.workloads.ssd300.task import WORKLOAD


def main() -> int:
    """Train; return the exit code."""
    return trainer.main(WORKLOAD, sys.argv[1:])


if __name__ == "__main__":
    run_and_exit(main)
