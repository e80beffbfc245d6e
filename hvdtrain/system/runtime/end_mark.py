"""File in which rank 0 records its exit code for the process that started the job.

A launcher's exit code is not reliable: if a host dies while its network stays up, the mpirun of
Open MPI 5 ends with 0 in the middle of the job. So `hvdtrain launch` and job scripts pass a file to
rank 0. It contains the job's exit code as far as known: empty for other programs, 1 from the start
of a training, and that of rank 0 at its end.

The file of `launch` is in memory, so nothing is left behind. It can be opened on the same machine
only: on another one rank 0 leaves no mark.
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
LONGEST = 16  # maximum bytes of a mark


class EndMark:
    """In-memory file for the mark of a job; a context manager."""

    def __enter__(self) -> Self:
        self._handle = os.memfd_create(NAME)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables to pass to the launcher."""
        return {FILE: f"/proc/{os.getpid()}/fd/{self._handle}"}

    def read(self) -> int | None:
        """Return the exit code in it, or None if no rank 0 of hvdtrain has written one."""
        content = os.pread(self._handle, LONGEST, 0).strip()
        return int(content) if content.isdigit() else None


def leave_mark(environ: Mapping[str, str] = os.environ) -> None:
    """Record how this process, rank 0, ends; no-op if ranks are restarted."""
    path = environ.get(FILE)
    if not path or is_restarted(environ):
        return
    process, last = os.getpid(), list[int]()

    def end(code: int) -> None:
        # `atexit` runs after `exit.leave`, and in forked processes too.
        if not last and os.getpid() == process:
            last.append(code)
            _write(path, code)

    _write(path, EXIT_FAILURE)
    process_status.at_exit.append(end)
    # For scripts that end without `exit.leave`, or by an exception.
    atexit.register(lambda: end(EXIT_FAILURE if hasattr(sys, "last_value") else EXIT_OK))


def _write(path: str, code: int) -> None:
    """Replace the file's content without an interval in which it is empty."""
    with contextlib.suppress(OSError):  # the launcher is on another host
        if path.startswith("/proc/") and NAME not in str(Path(path).readlink()):
            return  # another process with the same id
        handle = os.open(path, os.O_WRONLY | os.O_NOCTTY)
        with contextlib.closing(os.fdopen(handle, "wb", buffering=0)) as file:
            file.truncate(file.write(f"{code}\n".encode()))
