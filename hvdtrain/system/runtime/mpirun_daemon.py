"""End Open MPI's mpirun or daemon above a rank if it would wait for a lost host indefinitely.

After a failure mpirun orders its daemons to end and waits for all of them. If a daemon cannot be
reached, mpirun never ends, nor does the job.

This file is also the program that does so, as the rank itself is ended: it imports only the
standard library at module level, to start fast.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

NAMES = ("prterun", "prted", "mpirun", "mpiexec", "orterun", "orted")
# Prefix of namespaces whose daemons serve several jobs (`prte` and `prun`).
SHARED = "prte-"

FORWARD = 1.0  # seconds for mpirun to forward the rank's output
TIMES = 3  # number of SIGINTs: orderly end, warning, immediate end
APART = 0.3  # seconds between them


def end_daemon() -> bool:
    """End the mpirun or the daemon that started this rank, in ``FORWARD`` seconds.

    Its ranks should not exit earlier: an mpirun on a third host learns of the loss only from this
    daemon, and only while it does not wait for an orderly end yet.

    Returns:
        Whether it will be ended; False if another launcher started this rank.
    """
    import psutil

    from hvdtrain.system.runtime.command import Command, leave_behind

    if os.environ.get("PMIX_NAMESPACE", "").startswith(SHARED):
        return False
    try:
        above = [process for process in psutil.Process().parents() if process.name() in NAMES]
    except psutil.Error:
        return False
    if above:
        leave_behind(Command((sys.executable, "-I", "-S", __file__, str(above[0].pid))))
    return bool(above)


def main(process: int) -> None:
    """End ``process`` and its children.

    An ssh to a lost host does not end by itself and keeps mpirun's output open, so that a reader,
    as in ``mpirun ... | tee log``, would not end either.
    """
    time.sleep(FORWARD)
    started = _children(process)
    with contextlib.suppress(OSError):  # it has ended
        for _ in range(TIMES):
            os.kill(process, signal.SIGINT)
            time.sleep(APART)
    for child in started:
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)  # the ssh of `hvdtrain launch` ignores SIGTERM


def _children(process: int) -> list[int]:
    """Return the ids of the live children of ``process``."""
    children = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            after_name = file.read_text().rpartition(")")[2].split()  # state, parent, ...
            if int(after_name[1]) == process:
                children.append(int(file.parent.name))
    return children


if __name__ == "__main__":
    main(int(sys.argv[1]))
