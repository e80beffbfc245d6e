"""The Python environment of a job as one file: ``--stage-env``.

A thousand ranks that import PyTorch open millions of files, which a shared file system serves one
by one. So the environment is packed once, into an archive named by a digest of its files' names,
sizes and times: the contents of all files, one after the other, and beside it a description with
their names and the checksum. ``environment_host.py`` sends both to the hosts, which unpack small
files six times as fast as with ``tarfile``.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import shutil
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from hvdtrain.commands.launch import run_path
from hvdtrain.commands.launch.environment_files import Change, EnvironmentFiles, list_files
from hvdtrain.errors import UsageError
from hvdtrain.system.files import claim_folder, lock, read_regular, replacing
from hvdtrain.system.output.text import plural, size
from hvdtrain.system.runtime import terminal

log = logging.getLogger(__name__)

PIECE = 2**20  # bytes written at a time
FOLDER = "environments"  # in the cache
SUFFIX = ".files"  # of archives
OLD = 3600.0  # seconds since the last use of an archive, in which no job still reads it


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A file of an environment."""

    name: str
    size: int
    mode: int
    time: int  # of the last change, in seconds


@dataclass(frozen=True)
class Manifest:
    """The description of an archive."""

    digest: str
    prefix: str  # the environment
    members: tuple[Member, ...]
    links: dict[str, str]  # with their targets
    bytes: int  # of all files
    space: int  # bytes that they occupy on a disk
    sha256: str  # of the archive
    libraries: tuple[str, ...] = ()  # folders of the copy for LD_LIBRARY_PATH
    prefixes: tuple[str, ...] = ()  # all paths of the environment
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Archive:
    """A packed environment."""

    path: Path
    manifest: Manifest
    seal: str  # the SHA-256 of its description, by which hosts check what they receive


def find_program(words: Sequence[str], environ: Mapping[str, str]) -> Path:
    """Return the absolute path of a command's program."""
    return Path(shutil.which(words[0], path=environ.get("PATH")) or words[0]).absolute()


def environment_of(program: Path) -> Path:
    """Return the virtual or conda environment of a program.

    Raises:
        UsageError: it is in none.
    """
    prefix = program.parent.parent
    if not ((prefix / "pyvenv.cfg").is_file() or (prefix / "conda-meta").is_dir()):
        raise UsageError(
            f"--stage-env: {program} is in no virtual environment and no conda environment: "
            "start the program of one, e.g. its python, or omit the option"
        )
    return prefix


def pack(prefix: Path, cache: Path) -> Archive:
    """Return the archive of an environment, from the cache unless a file has changed.

    Raises:
        UsageError: the environment cannot be copied, or the cache not be written.
    """
    folder = cache / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        claim_folder(folder, "--stage-env: ")
        with terminal.working(f"listing the files of {prefix}"):
            contents = list_files(prefix)
        path = folder / f"{contents.digest}{SUFFIX}"
        if archive := _cached(path):  # also where compute nodes cannot write to the home directory
            return archive
        with lock(folder / "lock", "packs an environment"):
            if archive := _cached(path):
                return archive
            _clear(folder, prefix)
            _pack(contents, path)
        return read_archive(path)
    except OSError as error:
        where = error.filename or folder
        raise UsageError(f"--stage-env: {where}: {error.strerror or error}") from error


def _cached(path: Path) -> Archive | None:
    """Return an archive; None: there is none, or only a part."""
    with contextlib.suppress(UsageError):
        archive = read_archive(path)
        with contextlib.suppress(OSError):
            os.utime(path)  # see ``_clear``
        return archive
    return None


def _pack(contents: EnvironmentFiles, path: Path) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < contents.size:
        raise UsageError(
            f"--stage-env: {size(contents.size)} are needed in {path.parent}, {size(free)} are "
            "free: free some space, or set HVDTRAIN_CACHE to another directory"
        )
    members = tuple(_members(contents))
    log.info(
        "packing %s: %s, %s", contents.prefix, plural(len(members), "file"), size(contents.size)
    )
    with terminal.working(f"packing {contents.prefix}"):
        prefixes = tuple(sorted(contents.spellings(), key=len, reverse=True))
        changes = tuple(contents.changes(prefixes))
        description(path).unlink(missing_ok=True)
        with replacing(path) as file:
            sha256 = _write(file, contents, members, prefixes)
    manifest = Manifest(
        digest=path.stem,
        prefix=str(contents.prefix),
        members=members,
        links=contents.links,
        bytes=contents.size,
        space=contents.space,
        sha256=sha256,
        libraries=contents.libraries,
        prefixes=prefixes,
        changes=changes,
    )
    with replacing(description(path)) as file:
        file.write(msgspec.json.encode(manifest))


def _clear(folder: Path, prefix: Path) -> None:
    """Remove archives of the same environment as it was, and of environments that are gone.

    Call it with the lock. Another host may still be reading one that was used recently.
    """
    for file in (*folder.glob(f"*{SUFFIX}"), *folder.glob(".*.partial-*")):
        if time.time() - file.stat().st_mtime < OLD:
            continue
        with contextlib.suppress(UsageError):
            packed = Path(read_archive(file).manifest.prefix)
            if packed != prefix and packed.is_dir():
                continue
        file.unlink(missing_ok=True)
        description(file).unlink(missing_ok=True)


def description(path: Path) -> Path:
    """Return the path of the description of an archive."""
    return path.with_suffix(".json")


def read_archive(path: Path) -> Archive:
    """Return an archive with its description.

    Raises:
        UsageError: one of them is missing or damaged.
    """
    try:
        text = read_regular(description(path))
        manifest = msgspec.json.decode(text, type=Manifest)
        path.stat()
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"--stage-env: {path} is damaged ({error}): remove it") from error
    return Archive(path, manifest, hashlib.sha256(text).hexdigest())


def _members(contents: EnvironmentFiles) -> Iterator[Member]:
    for name in sorted(contents.files):
        if not name.isprintable():
            raise UsageError(f"--stage-env: {contents.files[name]}: its name is not printable")
        status = contents.status[name]
        mode = stat.S_IMODE(status.st_mode) & 0o755 | 0o600
        yield Member(name, status.st_size, mode, int(status.st_mtime))


def _write(
    file: IO[bytes],
    contents: EnvironmentFiles,
    members: Sequence[Member],
    prefixes: Collection[str],
) -> str:
    """Write the contents of all files; return their SHA-256.

    Raises:
        UsageError: a file cannot be read, or has become shorter since it was listed.
    """
    digest = hashlib.sha256()
    for member in members:
        path, left = contents.files[member.name], member.size
        with _opened(path, member.name, prefixes) as source:
            while left:
                piece = source.read(min(left, PIECE))
                if not piece:
                    raise UsageError(
                        f"--stage-env: {path} has changed while it was packed: run it again"
                    )
                digest.update(piece)
                file.write(piece)
                left -= len(piece)
    return digest.hexdigest()


@contextlib.contextmanager
def _opened(path: Path, name: str, prefixes: Collection[str]) -> Iterator[IO[bytes]]:
    """Open a file to pack; the run path of a library becomes relative.

    Raises:
        UsageError: it cannot be opened.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise UsageError(f"--stage-env: {path}: {error.strerror}: run it again") from error
    with file:
        found = run_path.relocated(file, name, prefixes)
        file.seek(0)
        if found is None:
            yield file
        else:
            offset, text = found
            content = bytearray(file.read())
            content[offset : offset + len(text)] = text
            yield io.BytesIO(content)
