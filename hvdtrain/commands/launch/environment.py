"""The Python environment of a job as one file: ``--stage-env``.

A thousand ranks that import PyTorch open millions of files, which a shared file system serves one
by one. So the environment is packed once, into a tar archive named by a digest of its files' names,
sizes and times; ``environment_host.py`` sends it to the hosts and unpacks it there.

The copy is another directory, so what names the old one is adapted, as conda does: the first lines
of scripts, the files that conda lists, editable installs, which are packed, too, and the
interpreter, unless it is part of the system. A link to a file elsewhere becomes that file.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlparse

import msgspec

from hvdtrain.errors import UsageError
from hvdtrain.system.files import claim_folder, lock, replacing
from hvdtrain.system.output.text import plural, size
from hvdtrain.system.runtime import terminal

log = logging.getLogger(__name__)

FORMAT = 1  # of archives
FOLDER = "environments"  # in the cache
MANIFEST = ".hvdtrain-environment.json"  # the first member of an archive
BASE, EDITABLE = ".base", ".editable"  # folders for what is elsewhere, in the copy
SYSTEM = ("/usr", "/bin", "/lib", "/lib64")  # present on every host
SCRIPT = 2**16  # bytes: a longer file in bin/ is no script
AT_ONCE = 16  # directories that are listed at a time


@dataclass(frozen=True)
class Change:
    """Occurrences of a path in a file of the copy, and the path there that replaces it."""

    file: str  # relative to the copy, as ``new``
    old: str
    new: str = ""  # the copy itself
    binary: bool = False  # whether strings end with a zero byte and keep their length


@dataclass(frozen=True)
class Manifest:
    """The description of an archive, which is its first member."""

    digest: str
    prefix: str  # the environment
    files: int
    bytes: int  # of all files
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Archive:
    """A packed environment."""

    path: Path
    manifest: Manifest


@dataclass
class _Contents:
    """The files to pack, by their path in the copy."""

    files: dict[str, Path] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)  # with their targets
    status: dict[str, os.stat_result] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    def digest(self, prefix: Path) -> str:
        """Return the digest of the names, modes, sizes and times of all files."""
        lines = [str(FORMAT), str(prefix)]
        for name in sorted(self.files):
            entry = self.status[name]
            lines.append(f"{name}\0{entry.st_mode:o}\0{entry.st_size}\0{entry.st_mtime_ns}")
        lines += [f"{name}\0{target}" for name, target in sorted(self.links.items())]
        return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:20]


def environment_of(words: Sequence[str], environ: Mapping[str, str]) -> Path:
    """Return the virtual or conda environment of a command's program.

    Raises:
        UsageError: it is in none.
    """
    program = Path(shutil.which(words[0], path=environ.get("PATH")) or words[0]).absolute()
    prefix = program.parent.parent
    if not ((prefix / "pyvenv.cfg").is_file() or (prefix / "conda-meta").is_dir()):
        raise UsageError(
            f"--stage-env: {program} is in no virtual environment and no conda environment: "
            "activate one, or omit the option"
        )
    return prefix


def pack(prefix: Path, cache: Path) -> Archive:
    """Return the archive of an environment, from the cache unless a file has changed.

    Raises:
        UsageError: the environment cannot be copied, or the cache has too little space.
    """
    folder = cache / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    claim_folder(folder, "--stage-env: ")
    with terminal.working(f"listing the files of {prefix}"):
        contents = _contents(prefix)
        digest = contents.digest(prefix)
    path = folder / f"{digest}.tar"
    with lock(folder / "lock", "packs an environment"):
        if path.exists():
            return Archive(path, read_manifest(path))
        total = sum(entry.st_size for entry in contents.status.values())
        _check_space(folder, total)
        manifest = Manifest(
            digest, str(prefix), len(contents.files), total, tuple(contents.changes)
        )
        log.info("packing %s: %s, %s", prefix, plural(len(contents.files), "file"), size(total))
        with terminal.working(f"packing {prefix}"), replacing(path) as file:
            _write(file, contents, manifest)
        for other in folder.glob("*.tar"):  # of the same environment, as it was
            if other != path and read_manifest(other).prefix == str(prefix):
                other.unlink(missing_ok=True)
    return Archive(path, manifest)


def read_manifest(path: Path) -> Manifest:
    """Return the description of an archive.

    Raises:
        UsageError: it is damaged.
    """
    try:
        with tarfile.open(path, "r:") as archive:
            first = archive.next()
            content = archive.extractfile(first) if first and first.name == MANIFEST else None
            return msgspec.json.decode(content.read() if content else b"", type=Manifest)
    except (OSError, tarfile.TarError, msgspec.MsgspecError) as error:
        raise UsageError(f"--stage-env: {path} is damaged ({error}): remove it") from error


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UsageError(
            f"--stage-env: {size(needed)} are needed in {folder}, {size(free)} are free: free some "
            "space, or set HVDTRAIN_CACHE to another directory"
        )


def _write(file: IO[bytes], contents: _Contents, manifest: Manifest) -> None:
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        text = json.dumps(asdict(manifest)).encode()
        first = tarfile.TarInfo(MANIFEST)
        first.size = len(text)
        archive.addfile(first, io.BytesIO(text))
        for name, path in sorted(contents.files.items()):
            entry = tarfile.TarInfo(name)
            status = contents.status[name]
            entry.size, entry.mtime = status.st_size, int(status.st_mtime)
            entry.mode = stat.S_IMODE(status.st_mode) & 0o755 | 0o600
            with path.open("rb") as source:
                archive.addfile(entry, source)
        for name, target in sorted(contents.links.items()):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)


def _contents(prefix: Path) -> _Contents:
    """Return the files of an environment, and of what it needs elsewhere."""
    contents = _Contents()
    _add(contents, prefix, "")
    _add_base(contents, prefix)
    _add_editable(contents, prefix)
    _add_conda(contents, prefix)
    for name, path in contents.files.items():
        is_script = name.startswith("bin/") and contents.status[name].st_size <= SCRIPT
        if is_script and str(prefix).encode() in path.read_bytes():
            contents.changes.append(Change(name, str(prefix)))
    return contents


def _add(contents: _Contents, root: Path, into: str) -> None:
    """Add the tree ``root`` as the folder ``into`` of the copy.

    Raises:
        UsageError: a link leads to a directory elsewhere.
    """
    resolved = root.resolve()

    def listed(folder: Path) -> list[os.DirEntry[str]]:
        with os.scandir(folder) as entries:
            return list(entries)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        folders = [root]
        while folders:
            below = []
            for entry in (entry for entries in pool.map(listed, folders) for entry in entries):
                path = Path(entry.path)
                name = "/".join(filter(None, [into, path.relative_to(root).as_posix()]))
                if entry.is_symlink():
                    _add_link(contents, name, path, resolved)
                elif entry.is_dir():
                    below.append(path)
                elif entry.is_file():
                    contents.files[name], contents.status[name] = path, entry.stat()
            folders = below


def _add_link(contents: _Contents, name: str, path: Path, root: Path) -> None:
    target = Path(os.path.realpath(path))
    if target.is_relative_to(root):
        relative = os.path.relpath(target, Path(os.path.realpath(path.parent)))
        contents.links[name] = relative
    elif any(target.is_relative_to(folder) for folder in SYSTEM):
        contents.links[name] = str(target)
    elif target.is_file():
        contents.files[name], contents.status[name] = target, target.stat()
    elif target.is_dir():
        raise UsageError(
            f"--stage-env: {path} is a link to the directory {target}, which is not part of the "
            "environment: install it there, or omit the option"
        )


def _add_base(contents: _Contents, prefix: Path) -> None:
    """Add the interpreter of a virtual environment, unless it is part of the system."""
    config = prefix / "pyvenv.cfg"
    if not config.is_file():
        return
    settings = dict(_settings(config.read_text()))
    home = Path(settings.get("home", ""))
    base = home.parent
    if any(home.is_relative_to(folder) for folder in SYSTEM) or not home.is_dir():
        return
    version = ".".join(settings.get("version", settings.get("version_info", "")).split(".")[:2])
    library = base / "lib" / f"python{version}"
    if not library.is_dir():
        raise UsageError(f"--stage-env: {config}: no {library}; create the environment anew")
    standard = _Contents()
    _add(standard, library, f"{BASE}/lib/python{version}")
    for name, path in standard.files.items():
        if "/site-packages/" not in name and "/test/" not in name:
            contents.files[name], contents.status[name] = path, standard.status[name]
    contents.links |= {n: t for n, t in standard.links.items() if "/site-packages/" not in n}
    for path in (home / f"python{version}", *(base / "lib").glob("libpython*")):
        if path.is_file():
            name = f"{BASE}/{path.parent.name}/{path.name}"
            contents.files[name] = Path(os.path.realpath(path))
            contents.status[name] = contents.files[name].stat()
    for name in [name for name in contents.files if name.startswith("bin/python")]:
        if contents.files[name].is_relative_to(base):  # a link of the environment
            del contents.files[name], contents.status[name]
            contents.links[name] = f"../{BASE}/bin/python{version}"
    contents.changes.append(Change("pyvenv.cfg", str(home), f"{BASE}/bin"))


def _settings(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            yield name.strip().lower(), value.strip()


def _add_editable(contents: _Contents, prefix: Path) -> None:
    """Add the packages of editable installs.

    Raises:
        UsageError: it is unknown which packages belong to one.
    """
    for number, path in enumerate(
        sorted(prefix.glob("lib/python*/site-packages/*/direct_url.json"))
    ):
        try:
            content = json.loads(path.read_text())
            url = urlparse(content["url"])
            if not content.get("dir_info", {}).get("editable") or url.scheme != "file":
                continue
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise UsageError(f"--stage-env: {path} cannot be read: {error}") from error
        project, into = Path(unquote(url.path)), f"{EDITABLE}/{number}"
        roots = {project, project / "src"}
        finders = [
            file
            for pattern in ("*.pth", "__editable__*.py")
            for file in path.parent.parent.glob(pattern)
            if str(project) in file.read_text(errors="replace")
        ]
        packages = [
            folder
            for root in roots
            for folder in (sorted(root.iterdir()) if root.is_dir() else [])
            if (folder / "__init__.py").is_file()
        ]
        if not finders or not packages:
            raise UsageError(
                f"--stage-env: {project} is installed in editable mode, and its packages are not "
                f"found there: install it with `pip install {project}`, or omit the option"
            )
        for folder in packages:
            _add(contents, folder, f"{into}/{folder.relative_to(project)}")
        for file in finders:
            name = file.relative_to(prefix).as_posix()
            contents.changes.append(Change(name, str(project), into))


def _add_conda(contents: _Contents, prefix: Path) -> None:
    """Add the changes of conda packages, which name their placeholders and files."""
    for path in sorted(prefix.glob("conda-meta/*.json")):
        entries = json.loads(path.read_text()).get("paths_data", {}).get("paths", ())
        for entry in entries:
            name = entry.get("_path")
            if entry.get("prefix_placeholder") and name in contents.files:
                binary = entry.get("file_mode") == "binary"
                contents.changes.append(Change(name, str(prefix), binary=binary))
