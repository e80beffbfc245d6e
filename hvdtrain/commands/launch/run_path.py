"""Makes the run path of a shared library or program relative to the file: ``$ORIGIN``.

A library that was compiled in an environment may name the environment's directories as those of the
libraries that it needs. In a copy it would still load them from the original, or load one library
twice, from both. The new text takes the bytes of the old one, as CMake and chrpath do it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection
from pathlib import PurePosixPath
from typing import IO

ELF64 = b"\x7fELF\x02\x01"  # 64 bits, little-endian
PT_LOAD, PT_DYNAMIC = 1, 2  # types of segments
DT_STRTAB, DT_RPATH, DT_RUNPATH = 5, 15, 29  # tags of dynamic entries
LONGEST = 2**16  # bytes of a run path
MOST = 2**20  # bytes of a table


def relocated(file: IO[bytes], name: str, prefixes: Collection[str]) -> tuple[int, bytes] | None:
    """Return the offset and the content of the run path for a copy, or None to leave it.

    Args:
        file: the library; its position changes.
        name: its path in the environment.
        prefixes: the paths of the environment.
    """
    found = find(file)
    if found is None:
        return None
    offset, old = found
    entries = [_relative(entry, name, prefixes) for entry in os.fsdecode(old).split(":") if entry]
    new = os.fsencode(":".join(dict.fromkeys(entries)))
    if not any(os.fsencode(prefix) in old for prefix in prefixes) or len(new) > len(old):
        return None
    return offset, new.ljust(len(old), b"/")


def _relative(entry: str, name: str, prefixes: Collection[str]) -> str:
    for prefix in prefixes:
        if entry == prefix or entry.startswith(f"{prefix}/"):
            inside = os.path.relpath(f"/{entry[len(prefix) :]}", PurePosixPath("/", name).parent)
            return f"$ORIGIN/{inside}"
    return entry


def find(file: IO[bytes]) -> tuple[int, bytes] | None:
    """Return the offset of the run path in a file, and its content; None: it has none."""
    try:
        return _find(file)
    except (struct.error, OverflowError):  # no valid ELF file
        return None


def _find(file: IO[bytes]) -> tuple[int, bytes] | None:
    header = _at(file, 0, 64)
    if not header.startswith(ELF64):
        return None
    (table,) = struct.unpack_from("<Q", header, 32)
    width, count = struct.unpack_from("<HH", header, 54)
    rows = _at(file, table, width * count)
    # Of each segment: type, flags, offset, address, physical address, bytes in the file.
    segments = [struct.unpack_from("<IIQQQQ", rows, index * width) for index in range(count)]
    dynamic = next((row for row in segments if row[0] == PT_DYNAMIC), None)
    if dynamic is None:
        return None
    content = _at(file, dynamic[2], dynamic[5])
    tags = dict(struct.iter_unpack("<qQ", content[: len(content) // 16 * 16]))
    place = tags.get(DT_RUNPATH, tags.get(DT_RPATH))
    strings = tags.get(DT_STRTAB, 0)
    for kind, _, offset, address, _, size in segments:
        if kind == PT_LOAD and place is not None and address <= strings < address + size:
            start = strings - address + offset + place
            text, zero, _ = _at(file, start, LONGEST).partition(b"\0")
            return (start, text) if zero else None
    return None


def _at(file: IO[bytes], offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(min(size, MOST))
