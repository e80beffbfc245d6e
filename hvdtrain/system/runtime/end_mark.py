"""The mark by which rank 0 says how it has ended, for whoever started the job.

A launcher's own exit code is not enough: where a host dies and its network stays up, the mpirun of
Open MPI 5 ends with 0 in the middle of the job. So `hvdtrain launch` and job scripts give rank 0 a
file. It holds the exit code that the job has as long as rank 0 does not say another one: nothing
for a program that is not ours, 1 from the start of a training on, at its end that of rank 0.

The file of `launch` is in its memory and has no name, so nothing is left behind. It can be opened
on the same machine only: elsewhere rank 0 leaves no mark.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from hvdtrain.errors import EXIT_FAILURE, EXIT_OK
from hvdtrain.system.runtime.detect import is_restarted
from hvdtrain.system.runtime.exit import process_status

FILE = "HVDTRAIN_END_MARK"  # variable with the path of the file
NAME = "hvdtrain-end"  # of the file in memory
LONGEST = 16  # bytes of a mark


class EndMark:
    """A file in memory for the mark of one job; to be used in a ``with`` statement."""

    def __enter__(self) -> Self:
        self._handle = os.memfd_create(NAME)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    @property
    def environment(self) -> dict[str, str]:
        """What the launcher has to be given."""
        return {FILE: f"/proc/{os.getpid()}/fd/{self._handle}"}

    def read(self) -> int | None:
        """Return the exit code in it; None: no rank 0 of ours has been here."""
        content = os.pread(self._handle, LONGEST, 0).strip()
        return int(content) if content.isdigit() else None


def leave_mark(environ: Mapping[str, str] = os.environ) -> None:
    """Let this process, rank 0, say how it ends; where ranks are started anew, it says nothing."""
    path = environ.get(FILE)
    if not path or is_restarted(environ):
        return
    process, last = os.getpid(), list[int]()

    def end(code: int) -> None:
        # After `exit.leave` comes `atexit`, in a forked process too.
        if not last and os.getpid() == process:
            last.append(code)
            _write(path, code)

    _write(path, EXIT_FAILURE)
    process_status.at_exit.append(end)
    # A script that does not end by `exit.leave` comes to here, also after an exception.
    atexit.register(lambda: end(EXIT_FAILURE if hasattr(sys, "last_value") else EXIT_OK))


def _write(path: str, code: int) -> None:
    """Replace what the file holds; at no moment it is empty again."""
    with contextlib.suppress(OSError):  # of a launcher on another host
        if path.startswith("/proc/") and NAME not in str(Path(path).readlink()):
            return  # another process there, which has the same number
        handle = os.open(path, os.O_WRONLY | os.O_NOCTTY)
        with contextlib.closing(os.fdopen(handle, "wb", buffering=0)) as file:
            file.truncate(file.write(f"{code}\n".encode()))
