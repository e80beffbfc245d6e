"""Filter of the output that libraries write directly to standard error."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without(drop: Callable[[bytes], Any]) -> Iterator[None]:
    """Hold back this process's standard error, and write it at the end without unwanted lines.

    All lines are written if an error is raised. Does nothing if standard error is closed.

    Args:
        drop: returns whether to drop a line, which includes its line end.
    """
    try:
        original = os.dup(2)
    except OSError:
        yield
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        keep_all = True
        try:
            yield
            keep_all = False
        finally:
            sys.stderr.flush()
            os.dup2(original, 2)
            held.seek(0)
            with os.fdopen(original, "wb") as out:  # sys.stderr may be a notebook's
                out.writelines(line for line in held if keep_all or not drop(line))
