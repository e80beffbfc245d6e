"""Read all of some packed data, and tell which shard is not what it was when it was packed."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from hvdtrain.errors import UsageError
from hvdtrain.system.output.display import Display
from hvdtrain.system.output.text import plural
from hvdtrain.system.output.text import size as shown
from hvdtrain.workloads.data.files import Names
from hvdtrain.workloads.data.packed import Contents, Pack, file_digest, key, suffix


def problems(folder: Path, workers: int) -> list[str]:
    """Return what is wrong with the packed data in ``folder``; nothing: each byte is right.

    Raises:
        UsageError: there is no index that can be read.
    """
    pack = Pack(folder, complete=False)
    contents, done = pack.contents, 0
    total = sum(shard.size for shard in contents.shards) or 1
    numbers = range(len(contents.shards))
    names = {name: Names(split.names) for name, split in contents.splits.items()}
    found = []
    try:
        pack.check_index()
    except UsageError as error:
        found.append(str(error))
    with ThreadPoolExecutor(workers) as pool, Display() as display:
        display.stage(f"reading {plural(len(numbers), 'shard')}, {shown(total)}")
        wrongs = pool.map(lambda number: why_bad(folder, contents, names, number), numbers)
        for number, wrong in zip(numbers, wrongs, strict=True):
            done += contents.shards[number].size
            display.show(f"read {shown(done)} of {shown(total)}", done / total)
            if wrong:
                found.append(f"{folder / contents.shards[number].name}: {wrong}")
    return found


def why_bad(folder: Path, contents: Contents, names: dict[str, Names], number: int) -> str | None:
    """Return what is wrong with shard ``number``; None where nothing is."""
    shard = contents.shards[number]
    path = folder / shard.name
    try:
        if (size := path.stat().st_size) != shard.size:
            return f"it has {size:,} bytes, and had {shard.size:,}"
        if file_digest(path) != shard.sha256:
            return "its SHA-256 is another than when it was packed"
        with tarfile.open(path, "r:") as tar:
            held = {one.name: (one.offset_data, one.size) for one in tar}
    except OSError as error:
        return error.strerror or str(error)
    except tarfile.TarError as error:
        return str(error)
    for name, place in _expected(contents, names, number):
        if held.get(name) != place:
            return f"{name} is not where the index has it"
    return None


def _expected(
    contents: Contents, names: dict[str, Names], number: int
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield name, offset and size of what the index has in a shard."""
    for name, file in contents.files.items():
        if file.shard == number:
            yield name, (file.offset, file.size)
    for name, split in contents.splits.items():
        for index in np.flatnonzero(split.shard == number).tolist():
            member = split.member(index)
            yield f"{key(index)}{suffix(names[name][index])}", (member.offset, member.size)
