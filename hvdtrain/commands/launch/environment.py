"""The Python environment of a job as one file: ``--stage-env``.

A thousand ranks that import PyTorch open millions of files, which a shared file system serves one
by one. So the environment is packed once, as a tar file, and unpacked in a local directory of each
host by ``environment_host.py``.

Unlike conda-pack and venv-pack, this rewrites no path in a file, since the hosts also see the
original: a path there leads to the same content, only slower. Python itself derives the paths of
all modules from that of its executable. For the same reason links may lead out of a copy. Only
``pyvenv.cfg`` names the interpreter, which is copied with its standard library.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

from hvdtrain.errors import UsageError
from hvdtrain.system.files import claim_folder, lock
from hvdtrain.system.output.text import plural, size
from hvdtrain.system.runtime import terminal

log = logging.getLogger(__name__)

ERROR = "hvdtrain: --stage-env: "  # begins the line with an error of a host
FORMAT = 3  # of archives
FOLDER = "environments"  # in the cache
CONFIG = "pyvenv.cfg"  # of a virtual environment
BASE = ".base"  # the interpreter of a virtual environment, in its copy
SYSTEM = ("/usr", "/bin", "/lib", "/lib64")  # local on every host
CONDA_OWN = ("pkgs", "envs", "conda-bld")  # in conda's base environment: not part of it
NO_LIBRARY = (("site-packages",), ("test",))  # beside the standard library
HOME = re.compile(r"^(home\s*=\s*)(.*?)\s*$", re.MULTILINE)  # of the interpreter, in CONFIG
VERSION = re.compile(r"^version(?:_info)?\s*=\s*(\d+\.\d+)", re.MULTILINE)
AT_ONCE = 32  # files whose status is queried at a time
RECENT = 3600.0  # seconds since the last use of an archive, in which a job may still read it
UNUSED = 30 * 86400.0  # seconds since the last use of an archive that nobody needs

Names = tuple[str, ...]  # of a path, relative to a tree


@dataclass(frozen=True)
class Tree:
    """A directory that is copied."""

    root: Path  # without links
    into: Path  # its path in the copy
    is_copied: Callable[[Names], bool]  # otherwise the copy gets a link to the original


@dataclass(frozen=True)
class Entry:
    """A file or a link of a copy."""

    name: str  # its path in the copy
    path: Path  # of the file
    status: os.stat_result | None = None  # of the file
    target: str = ""  # of the link


@dataclass(frozen=True)
class Archive:
    """A packed environment: ``ENVIRONMENT-DIGEST-SHA256.tar``."""

    path: Path
    size: int = 0  # bytes

    @property
    def digest(self) -> str:
        """The digest of the names, modes, sizes and times of all files."""
        return self.path.stem.split("-")[1]

    @property
    def sha256(self) -> str:
        """The SHA-256 of the archive."""
        return self.path.stem.split("-")[2]


def find_program(words: Sequence[str], environ: Mapping[str, str]) -> Path:
    """Return the absolute path of a command's program."""
    return Path(shutil.which(words[0], path=environ.get("PATH")) or words[0]).absolute()


def environment_of(program: Path) -> Path:
    """Return the virtual or conda environment of a program.

    Raises:
        UsageError: it is in none.
    """
    prefix = program.parent.parent
    if not ((prefix / CONFIG).is_file() or (prefix / "conda-meta").is_dir()):
        raise UsageError(
            f"--stage-env: {program} is in no virtual environment and no conda environment: "
            "start the program of one, e.g. its python, or omit the option"
        )
    return prefix


def editable_installs(prefix: Path) -> list[str]:
    """Return the directories of editable installs, which ranks import from there.

    A record that cannot be read is skipped, as the list is only for the user's information.
    """
    directories = []
    for record in prefix.glob("lib/python*/site-packages/*.dist-info/direct_url.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(record.read_bytes())
            if content["dir_info"]["editable"]:
                directories.append(unquote(urlparse(str(content["url"])).path))
    return sorted(directories)


# Which files


def list_files(prefix: Path) -> list[Entry]:
    """Return the files and links of a copy, sorted by name.

    Raises:
        OSError: a directory cannot be read.
    """
    trees = [Tree(Path(os.path.realpath(prefix)), Path(), lambda names: names[0] not in CONDA_OWN)]
    if base := _base(prefix):
        trees.append(base)
    paths = [(tree, names) for tree in trees for names in _walk(tree)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        entries = list(pool.map(lambda item: _entry(item[0], item[1], trees), paths))
    return sorted((entry for entry in entries if entry), key=lambda entry: entry.name)


def _base(prefix: Path) -> Tree | None:
    """Return the interpreter of a virtual environment, unless the hosts have their own."""
    config = os.fsdecode((prefix / CONFIG).read_bytes()) if (prefix / CONFIG).is_file() else ""
    home, version = HOME.search(config), VERSION.search(config)
    root = Path(os.path.realpath(home[2])).parent if home else Path("/usr")
    if version is None or any(root.is_relative_to(folder) for folder in SYSTEM):
        return None
    python = f"python{version[1]}"

    def is_copied(names: Names) -> bool:
        if names[0] == "bin":
            return len(names) == 1 or names[1].startswith("python")
        in_library = names[0].startswith("lib") and names[1:2] in ((), (python,))
        return in_library and names[2:3] not in NO_LIBRARY

    return Tree(root, Path(BASE), is_copied) if any(root.glob(f"lib*/{python}/os.py")) else None


def _walk(tree: Tree, names: Names = ()) -> Iterator[Names]:
    """Yield the paths that are not directories, or not copied."""
    with os.scandir(tree.root.joinpath(*names)) as entries:
        for entry in entries:
            below = (*names, entry.name)
            if entry.is_dir(follow_symlinks=False) and tree.is_copied(below):
                yield from _walk(tree, below)
            else:
                yield below


def _entry(tree: Tree, names: Names, trees: list[Tree]) -> Entry | None:
    """Return an entry of the copy; None: it is no file, or is gone."""
    name, path = Path(tree.into, *names), tree.root.joinpath(*names)
    if not tree.is_copied(names):
        return Entry(str(name), path, target=str(path))
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            path = Path(os.path.realpath(path))
            for copied in trees:
                if path.is_relative_to(copied.root):
                    inside = copied.into / path.relative_to(copied.root)
                    return Entry(str(name), path, target=os.path.relpath(inside, name.parent))
            if any(path.is_relative_to(folder) for folder in SYSTEM) or not path.is_file():
                return Entry(str(name), path, target=str(path))
            status = path.stat()
        return Entry(str(name), path, status) if stat.S_ISREG(status.st_mode) else None
    except FileNotFoundError:  # other jobs write bytecode
        return None


# The archive


def pack(prefix: Path, cache: Path) -> Archive:
    """Return the archive of an environment, from the cache unless a file has changed.

    Raises:
        UsageError: a file cannot be read, or the cache not be written.
    """
    folder = cache / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        claim_folder(folder, "--stage-env: ")
        with terminal.working(f"listing the files of {prefix}"):
            entries = list_files(prefix)
        owner = _digest(f"{FORMAT} {prefix}")
        digest = _digest("".join(f"{e.name}\0{e.target}\0{_facts(e.status)}\0" for e in entries))
        # At first without the lock: compute nodes may not be allowed to write there.
        path = _cached(folder, owner, digest)
        if path is None:
            with lock(folder / "lock", "packs an environment"):
                path = _cached(folder, owner, digest)
                if path is None:
                    _clear(folder, owner)
                    path = _pack(entries, prefix, folder, f"{owner}-{digest}")
        return Archive(path, path.stat().st_size)
    except OSError as error:
        where = error.filename or folder
        raise UsageError(f"--stage-env: {where}: {error.strerror or error}") from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:20]


def _facts(status: os.stat_result | None) -> tuple[int, ...]:
    """Return what changes with the content of a file.

    The inode, as conda may replace a file by one of the same size and time.
    """
    return (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino) if status else ()


def _cached(folder: Path, owner: str, digest: str) -> Path | None:
    path = next(folder.glob(f"{owner}-{digest}-*.tar"), None)
    if path:
        with contextlib.suppress(OSError):
            os.utime(path)  # see ``_clear``
    return path


def _clear(folder: Path, owner: str) -> None:
    """Remove archives of the environment as it was, and those that have not been used for long.

    Jobs may still read those that were used recently.
    """
    for path in (*folder.glob("*.tar"), *folder.glob("*.partial")):
        limit = RECENT if path.name.startswith(owner) or path.suffix == ".partial" else UNUSED
        if time.time() - path.stat().st_mtime > limit:
            path.unlink()


def _pack(entries: list[Entry], prefix: Path, folder: Path, name: str) -> Path:
    """Write the archive; return its path, which it gets when it is complete."""
    total = sum(entry.status.st_size for entry in entries if entry.status)
    needed, free = total + 1024 * len(entries), shutil.disk_usage(folder).free
    if free < needed:
        raise UsageError(
            f"--stage-env: {size(needed)} are needed in {folder}, {size(free)} are free: free some "
            "space, or set HVDTRAIN_CACHE to another directory"
        )
    log.info("packing %s: %s, %s", prefix, plural(len(entries), "file"), size(total))
    with tempfile.NamedTemporaryFile(suffix=".partial", dir=folder, delete=False) as file:
        partial = Path(file.name)
        try:
            with terminal.working(f"packing {prefix}"):
                with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
                    for entry in entries:
                        _add(tar, entry)
                file.seek(0)
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
            return partial.rename(folder / f"{name}-{sha256}.tar")
        finally:
            partial.unlink(missing_ok=True)


def _add(tar: tarfile.TarFile, entry: Entry) -> None:
    """Add a file or link to an archive.

    Raises:
        UsageError: the file has changed since it was listed, or changes meanwhile.
    """
    member = tarfile.TarInfo(entry.name)
    if entry.status is None:
        member.type, member.linkname = tarfile.SYMTYPE, entry.target
        tar.addfile(member)
        return
    member.size, member.mtime = entry.status.st_size, int(entry.status.st_mtime)
    member.mode = stat.S_IMODE(entry.status.st_mode) & 0o755 | 0o600
    with entry.path.open("rb") as file:
        try:
            tar.addfile(member, file)
        finally:
            if _facts(os.fstat(file.fileno())) != _facts(entry.status):
                raise UsageError(
                    f"--stage-env: {entry.path} has changed while it was packed: run it again"
                )
