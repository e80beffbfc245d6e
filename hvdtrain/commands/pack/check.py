"""Check of packed data: read all shards and report those that were changed."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from hvdtrain.errors import UsageError
from hvdtrain.system.output.stderr import Display
from hvdtrain.system.output.text import plural
from hvdtrain.system.output.text import size as shown
from hvdtrain.workloads.data.files import Names
from hvdtrain.workloads.data.packed import Contents, Pack, file_digest, key, suffix


def problems(folder: Path, workers: int) -> list[str]:
    """Return the problems of the packed data in ``folder``; empty if every byte is unchanged.

    Raises:
        UsageError: there is no readable index.
    """
    pack = Pack(folder, complete=False)
    contents, done = pack.contents, 0
    total = sum(shard.size for shard in contents.shards) or 1
    numbers = range(len(contents.shards))
    names = {name: Names(split.names) for name, split in contents.splits.items()}
    messages = []
    try:
        pack.check_index()
    except UsageError as error:
        messages.append(str(error))
    with ThreadPoolExecutor(workers) as pool, Display() as display:
        display.stage(f"reading {plural(len(numbers), 'shard')}, {shown(total)}")
        results = pool.map(lambda number: shard_problem(folder, contents, names, number), numbers)
        for number, problem in zip(numbers, results, strict=True):
            done += contents.shards[number].size
            display.show(f"read {shown(done)} of {shown(total)}", done / total)
            if problem:
                messages.append(f"{folder / contents.shards[number].name}: {problem}")
    return messages


def shard_problem(
    folder: Path, contents: Contents, names: dict[str, Names], number: int
) -> str | None:
    """Return the problem of shard ``number``; None if there is none."""
    shard = contents.shards[number]
    path = folder / shard.name
    try:
        if (size := path.stat().st_size) != shard.size:
            return f"{size:,} bytes instead of {shard.size:,}"
        if file_digest(path) != shard.sha256:
            return "its SHA-256 differs from that in the index"
        with tarfile.open(path, "r:") as tar:
            members = {member.name: (member.offset_data, member.size) for member in tar}
    except OSError as error:
        return error.strerror or str(error)
    except tarfile.TarError as error:
        return str(error)
    for name, offset_and_size in _expected(contents, names, number):
        if members.get(name) != offset_and_size:
            return f"{name} is not at its position in the index"
    return None


def _expected(
    contents: Contents, names: dict[str, Names], number: int
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield name, offset and size of the members of a shard according to the index."""
    for name, file in contents.files.items():
        if file.shard == number:
            yield name, (file.offset, file.size)
    for name, split in contents.splits.items():
        for index in np.flatnonzero(split.shard == number).tolist():
            member = split.member(index)
            yield f"{key(index)}{suffix(names[name][index])}", (member.offset, member.size)
