"""JSON Lines files of results: a line is appended as each run ends, and a crash is tolerated."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import typed
from hvdtrain.system.files import read_regular

log = logging.getLogger(__name__)

Record = TypeVar("Record")
INVALID = (ValueError, KeyError, TypeError, AttributeError)  # raised by parsing an invalid line


def encode(record: Any) -> dict[str, object]:
    """Return the JSON of a dataclass; its ``summary`` is that of a trainer, null for NaN."""
    content = dataclasses.asdict(record)
    return {**content, "summary": record.summary.to_json()} if content["summary"] else content


def read(path: Path, kind: type[Record], study: str) -> list[Record]:
    """Return the records in a file; an empty list if it does not exist.

    An incomplete last line, as after a crash, is skipped: its run is repeated.

    Args:
        path: the file.
        kind: the dataclass of a record.
        study: the kind of study, for messages.

    Raises:
        UsageError: it cannot be read, or another line is invalid.
    """
    try:
        lines = read_regular(path).decode().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(typed(kind, json.loads(line)))
        except INVALID as error:
            if number == len(lines) and not line.endswith("\n"):
                log.warning("%s: the last line is incomplete; its run is repeated", path)
                break
            raise UsageError(
                f"{path}, line {number}: not a run of a {study} ({error!r}); remove the line to "
                "repeat its run"
            ) from error
    return records


def append(path: Path, record: Any) -> None:
    """Append a record; an incomplete last line, as after a crash, is replaced.

    Raises:
        UsageError: the file cannot be opened, or is a link, which others may have put there.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror}): remove it, or use another directory"
        ) from error
    with os.fdopen(handle, "a+b") as file:
        file.seek(0)
        lines = file.read().splitlines(keepends=True)
        line = json.dumps(encode(record)).encode() + b"\n"
        if lines and not lines[-1].endswith(b"\n"):
            try:
                typed(type(record), json.loads(lines[-1]))  # as `read` counts it
                line = b"\n" + line
            except INVALID:
                file.truncate(sum(map(len, lines[:-1])))
        file.write(line)
