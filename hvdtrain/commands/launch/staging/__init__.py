"""Copy a job's Python environment to local disks of its hosts, and start the ranks there.

With ``--stage-env``: a thousand ranks that import PyTorch open millions of files, which a shared
file system serves one by one. So the environment is packed as a tar file, which ``__main__.py``
unpacks on each host.

Unlike conda-pack and venv-pack, this rewrites no path in a file, since the hosts also see the
original: a path there leads to the same content, only slower. Python itself derives the paths of
all modules from that of its executable. For the same reason links may lead out of a copy. Only
``pyvenv.cfg`` names the interpreter, which is copied with its standard library.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import shutil
import stat
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.commands.launch.argv import Launch
from hvdtrain.commands.launch.hosts import Host, RankLayout
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.files import cache_root
from hvdtrain.system.output.text import duration, plural, size
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import CommandResult, run
from hvdtrain.system.runtime.scratch import LOCK
from hvdtrain.system.runtime.spawn import StopSignals

log = logging.getLogger(__name__)

CONFIG = "pyvenv.cfg"  # of a virtual environment
BASE = ".base"  # its interpreter, in a copy
SYSTEM = ("/usr", "/bin", "/lib", "/lib64")  # local on every host
CONDA_OWN = ("pkgs", "envs", "conda-bld")  # in conda's base environment: not part of it
NO_LIBRARY = (("site-packages",), ("test",))  # beside the standard library
HOME = re.compile(r"^(home\s*=\s*)(.*?)\s*$", re.MULTILINE)  # of the interpreter, in CONFIG
VERSION = re.compile(r"^version(?:_info)?\s*=\s*(\d+\.\d+)", re.MULTILINE)
AT_ONCE = 32  # files whose status is queried at a time
STAGE = (sys.executable, "-m", "hvdtrain.commands.launch.staging")
# A rank, and what it starts, hold a lock on a file of the copy. If the job is killed before it
# removes the copy, the user's next start on a host does so, unless it is locked (``scratch.py``).
HOLD = ("sh", "-c", 'exec 9< "$0" && flock -s 9 && exec "$@"')
# Variables with paths of files that are read; others may name a directory to write to.
PATHS = re.compile("CONDA_PREFIX|LD_(LIBRARY_PATH|PRELOAD)|PATH|PYTHON(HOME|PATH)|VIRTUAL_ENV")
# The beginning of a script in Python; if the path is long, a shell starts it in the second line.
SCRIPT = re.compile(rb"#!(?:.*\n'''exec')?.*[/ ]python[\d.]*[\"\s]")
# A line of ``runtime.exit``; the rank is that of the only process on a host.
ERROR = re.compile(r"hvdtrain: (?:rank \d+ on (\S+): )?error: (?:rank \d+ on (\S+): )?(.+)")
REMOVAL_TIMEOUT = 120.0  # seconds to remove the copies
FAILED = 20.0  # seconds after a failure: a host may be lost

Names = tuple[str, ...]  # of a path, relative to a tree
Member = tuple[tarfile.TarInfo, Path]  # of an archive, and the file in it, or where the link leads


@dataclass(frozen=True)
class Tree:
    """A directory that is copied."""

    root: Path  # without links
    into: Path  # its path in the copy
    is_copied: Callable[[Names], bool]  # otherwise the copy gets a link to the original


def refuse_value(command: Sequence[str]) -> None:
    """Raise UsageError for ``--stage-env try``, which would be read as the program."""
    word, *rest = command or [""]
    if word in ("must", "try") and rest[:1] in ([], ["--"]):
        raise UsageError(f"--stage-env {word}: it takes no value: omit {word!r}")


def members(prefix: Path) -> list[Member]:
    """Return the members of the archive of an environment, sorted by name.

    Raises:
        OSError: a directory cannot be read.
    """
    trees = [Tree(Path(os.path.realpath(prefix)), Path(), lambda names: names[0] not in CONDA_OWN)]
    if base := _base(prefix):
        trees.append(base)
    paths = [(tree, names) for tree in trees for names in _walk(tree)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        listed = list(pool.map(lambda item: _member(item[0], item[1], trees), paths))
    return sorted((member for member in listed if member), key=lambda member: member[0].name)


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


def _member(tree: Tree, names: Names, trees: list[Tree]) -> Member | None:
    """Return a member of the archive; None: it is no file, or is gone."""
    name, path = Path(tree.into, *names), tree.root.joinpath(*names)
    if not tree.is_copied(names):
        return _link(name, path)
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            path = Path(os.path.realpath(path))
            for copied in trees:
                if path.is_relative_to(copied.root):
                    inside = copied.into / path.relative_to(copied.root)
                    return _link(name, Path(os.path.relpath(inside, name.parent)))
            if any(path.is_relative_to(folder) for folder in SYSTEM) or not path.is_file():
                return _link(name, path)
            status = path.stat()
    except FileNotFoundError:  # other jobs write bytecode
        return None
    member = tarfile.TarInfo(str(name))
    member.size, member.mtime = status.st_size, status.st_mtime
    member.mode = stat.S_IMODE(status.st_mode) & 0o755 | 0o600
    return (member, path) if stat.S_ISREG(status.st_mode) else None


def _link(name: Path, target: Path) -> Member:
    member = tarfile.TarInfo(str(name))
    member.type, member.linkname = tarfile.SYMTYPE, str(target)
    return member, target


@contextlib.contextmanager
def packed(prefix: Path, folder: Path) -> Iterator[tuple[Path, int, str]]:
    """Pack an environment in ``folder``; yield the path, size and SHA-256 of the archive.

    It is removed at the end.

    Raises:
        UsageError: a file cannot be read, or the archive not be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="environment-", dir=folder) as scratch:
            archive = Path(scratch, "tar")
            with terminal.working(f"packing {prefix}"), archive.open("w+b") as file:
                listed = members(prefix)
                total = sum(member.size for member, _ in listed)
                log.info("packing %s: %s, %s", prefix, plural(len(listed), "file"), size(total))
                with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
                    for member, path in listed:
                        _add(tar, member, path)
                file.seek(0)
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            yield archive, archive.stat().st_size, sha256
    except OSError as error:
        where = error.filename or f"{folder} (HVDTRAIN_CACHE)"
        raise UsageError(f"--stage-env: {where}: {error.strerror or error}") from error


def _add(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    """Add a file or link to an archive.

    Raises:
        UsageError: the file has changed since it was listed, or changes meanwhile.
    """
    if member.issym():
        tar.addfile(member)
        return
    with path.open("rb") as file:
        try:
            tar.addfile(member, file)
        finally:
            now = os.fstat(file.fileno())
            if (now.st_size, now.st_mtime) != (member.size, member.mtime):
                raise UsageError(f"--stage-env: {path} has changed while it was packed: try again")


class StagedEnvironment:
    """The copies of a job's environment on its hosts."""

    def __init__(self, launch: Launch) -> None:
        """Find the environment of the program of ``launch``.

        Raises:
            UsageError: it is in none.
        """
        self._launch, program = launch, launch.words[0]
        executable = shutil.which(program, path=launch.environ.get("PATH"))
        self._program = Path(executable or program).absolute()
        self.prefix = prefix = self._program.parent.parent
        if not ((prefix / CONFIG).is_file() or (prefix / "conda-meta").is_dir()):
            raise UsageError(
                f"--stage-env: {self._program} is in no virtual environment and no conda "
                "environment: start the program of one, e.g. its python, or omit the option"
            )
        directory = launch.environ.get("TMPDIR") or tempfile.gettempdir()
        self._copy = Path(directory).absolute() / f"hvdtrain-{secrets.token_hex(4)}"
        self.folder = self._copy / "env"

    def stage(self, archive: tuple[Path, int, str]) -> None:
        """Make the copies.

        Raises:
            HvdtrainError: that failed on a host.
        """
        began = time.monotonic()
        hosts = plural(len(self._launch.layout.hosts) or 1, "host")
        words = (*STAGE, str(self.folder), *map(str, archive))
        with terminal.working(f"sending the environment to {hosts}"):
            result = run(self._per_host(*words).command)
        if not result.ok:
            raise HvdtrainError(f"--stage-env: {_reason(result)}")
        took = duration(time.monotonic() - began)
        log.info("hvdtrain: environment staged in %s on %s, in %s", self.folder, hosts, took)

    def remove(self, timeout: float) -> None:
        """Remove the copies."""
        # PRRTE may hang if processes that are no MPI ranks end while others are being started.
        words = ("sh", "-c", 'rm -rf -- "$0" && sleep 0.5', str(self._copy))
        result = run(self._per_host(*words).command, timeout=timeout)
        if not result.ok:
            log.warning("hvdtrain: %s may be left on a host", self._copy)

    def _per_host(self, *words: str) -> Launch:
        """Return the job that runs one process per host."""
        hosts = tuple(Host(host.name, 1) for host in self._launch.layout.hosts)
        layout = RankLayout(len(hosts) or 1, hosts)
        return replace(self._launch, words=words, layout=layout, bind=False, tag=False)

    @property
    def launch(self) -> Launch:
        """The job whose ranks start from the copies."""
        read = {n: value for n, value in self._launch.environ.items() if PATHS.fullmatch(n)}
        moved = {n: self._moved(value) for n, value in read.items() if self._moved(value) != value}
        program = str(self.folder / self._program.relative_to(self.prefix))
        with self._program.open("rb") as file:  # a script names the original interpreter
            is_python = SCRIPT.match(file.read(1024))
        python = (str(self.folder / "bin" / "python"),) if is_python else ()
        words = (*HOLD, str(self._copy / LOCK), *python, program, *self._launch.words[1:])
        return replace(self._launch, words=words, variables={**self._launch.variables, **moved})

    def _moved(self, value: str) -> str:
        """Return the value of a variable, with the paths of the environment in the copy."""
        for prefix in {str(self.prefix), os.path.realpath(self.prefix)}:
            pattern = rf"(?<![^:]){re.escape(prefix)}(?=[/:]|$)"
            value = re.sub(pattern, lambda _: str(self.folder), value)
        return value


def _reason(result: CommandResult) -> str:
    """Return why copies could not be made."""
    for line in result.output.splitlines():
        if error := ERROR.fullmatch(line):
            return f"host {host}: {error[3]}" if (host := error[1] or error[2]) else error[3]
    sys.stderr.write(result.output)  # mpirun has failed, or a process has died
    program = Path(result.command.argv[0]).name
    return f"{program} ended with code {result.exit_code}; its output is above"


@contextlib.contextmanager
def staged(launch: Launch, signals: StopSignals) -> Iterator[Launch]:
    """Return the job whose ranks start from copies of their environment, removed at the end.

    Raises:
        UsageError: the environment cannot be packed.
        HvdtrainError: it cannot be copied to a host.
        KeyboardInterrupt: meanwhile a signal has requested a stop.
    """
    environment = StagedEnvironment(launch)
    timeout = FAILED
    with contextlib.ExitStack() as stack:
        with signals.interrupting(), packed(environment.prefix, cache_root(launch.environ)) as tar:
            stack.callback(lambda: environment.remove(timeout))
            environment.stage(tar)
        yield environment.launch
        timeout = REMOVAL_TIMEOUT
