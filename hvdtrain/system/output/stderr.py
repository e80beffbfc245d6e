"""What libraries write to standard error past Python, held back and sorted."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without(drop: Callable[[bytes], Any]) -> Iterator[None]:
    """Hold back what this process writes to standard error, then let out what is wanted of it.

    All of it, where an error is raised meanwhile. Nothing is held back where standard error is
    closed.

    Args:
        drop: tells of a line, its end included, whether nobody asked for it.
    """
    try:
        original = os.dup(2)
    except OSError:
        yield
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        lets_out = True
        try:
            yield
            lets_out = False
        finally:
            sys.stderr.flush()
            os.dup2(original, 2)
            held.seek(0)
            with os.fdopen(original, "wb") as out:  # sys.stderr may be a notebook's
                out.writelines(line for line in held if lets_out or not drop(line))
