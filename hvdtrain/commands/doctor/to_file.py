"""Run a program on the ranks, with the standard output of rank 0 in a file.

``python -m hvdtrain.commands.doctor.to_file FILE PROGRAM ...``. Open MPI 5 gives each rank a
terminal as its standard output, and the kernel discards what mpirun has not yet read when the rank
ends: on a busy host a report of several kilobytes arrives cut. Where the directory of FILE does not
exist, as on another host, the output is forwarded by mpirun.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from hvdtrain.system.runtime.detect import detect


def main(file: Path, program: str, words: list[str]) -> None:
    """Run the module ``program`` with the arguments ``words``."""
    if detect(os.environ).is_root and file.parent.is_dir():
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
    sys.argv[1:] = words
    runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
