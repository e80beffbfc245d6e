"""Which files this process opens to write, seen by the interpreter's own audit events."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_listeners: list[Callable[[str], None]] = []
_installed = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not _listeners:
        return
    path, _, flags = arguments
    nameless = flags & os.O_TMPFILE == os.O_TMPFILE
    if isinstance(path, str | bytes | os.PathLike) and flags & WRITES and not nameless:
        name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 (Path would touch the disk)
        for listener in _listeners:
            listener(name)


def on_write(listener: Callable[[str], None]) -> None:
    """From now on tell ``listener`` each path that Python code opens to write.

    Files that a C++ library opens by itself are not seen.
    """
    global _installed
    if not _installed:
        sys.addaudithook(_audit)  # it cannot be taken away again
        _installed = True
    _listeners.append(listener)


@contextmanager
def watch_writes() -> Iterator[list[str]]:
    """Within it, collect the paths that this process opens to write."""
    paths: list[str] = []
    on_write(paths.append)
    try:
        yield paths
    finally:
        _listeners.remove(paths.append)
