"""A file of lines of JSON that grows by one as each run ends, and survives a crash."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.errors import UsageError

log = logging.getLogger(__name__)

One = TypeVar("One")
NO_RUN = (ValueError, KeyError, TypeError, OverflowError)  # what reading a broken line raises


def read(path: Path, parse: Callable[[Any], One], what: str) -> list[One]:
    """Return what ``parse`` makes of each line; nothing where the file is not there.

    A last line that is cut, as a crash leaves it, is passed over: that run is not done.

    Args:
        path: the file.
        parse: of the content of a line; raises one of ``NO_RUN`` where that is none.
        what: the kind of study that the lines are of.

    Raises:
        UsageError: it cannot be read, or another line is broken.
    """
    try:
        lines = path.read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(parse(json.loads(line)))
        except NO_RUN as error:
            if number == len(lines) and not line.endswith("\n"):
                log.warning("%s: the last line is cut, so its run is repeated", path)
                break
            raise UsageError(
                f"{path}, line {number}: not a run of a {what} ({error!r}); remove the line, and "
                f"the {what} repeats its run"
            ) from error
    return found


def append(path: Path, content: Mapping[str, Any], parse: Callable[[Any], object]) -> None:
    """Add a line; what a crash cut off at the end of the file goes, if it is no run."""
    with path.open("a+b") as file:
        file.seek(0)
        lines = file.read().splitlines(keepends=True)
        line = json.dumps(content).encode() + b"\n"
        if lines and not lines[-1].endswith(b"\n"):
            try:
                parse(json.loads(lines[-1]))  # as `read` counts it
                line = b"\n" + line
            except NO_RUN:
                file.truncate(sum(map(len, lines[:-1])))
        file.write(line)
