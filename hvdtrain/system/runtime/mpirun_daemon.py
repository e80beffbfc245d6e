"""Open MPI's own process above a rank, ended where it would wait for a lost host for ever.

Once a rank has failed, mpirun orders its daemons to end and waits until all have done so. Where one
is out of reach it never ends, and the job with it neither.

This file is also the program that does it, since the rank is ended on the way: it imports nothing
but the standard library at its head, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

NAMES = ("prterun", "prted", "mpirun", "mpiexec", "orterun", "orted")
# Names of jobs whose daemons serve other jobs too (`prte` and `prun`) begin with this.
SHARED = "prte-"

FORWARD = 1.0  # seconds for it to pass on what the rank has said
TIMES = 3  # the first SIGINT asks for an orderly end, the second warns, the third takes effect
APART = 0.3  # seconds between them


def end_daemon() -> bool:
    """End the mpirun or the daemon that started this rank, ``FORWARD`` seconds from now.

    The ranks below it should not leave before: where mpirun runs on a third host it learns of the
    loss only by this daemon, and only as long as it does not wait for an orderly end already.

    Returns:
        Whether it will be ended; not where another launcher started this rank.
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
    """End ``process``, and what it has started and would leave behind.

    An ssh to a lost host never ends by itself, and holds mpirun's output open: whoever reads that
    to its end, such as ``mpirun ... | tee log``, would wait as long.
    """
    time.sleep(FORWARD)
    started = _children(process)
    with contextlib.suppress(OSError):  # it has ended
        for _ in range(TIMES):
            os.kill(process, signal.SIGINT)
            time.sleep(APART)
    for child in started:
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)  # the ssh of `hvdtrain launch` is deaf to TERM


def _children(process: int) -> list[int]:
    """Return ids of the processes that ``process`` has started and that live."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ends just now
            after_name = file.read_text().rpartition(")")[2].split()  # state, parent, ...
            if int(after_name[1]) == process:
                found.append(int(file.parent.name))
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]))
