"""The files that belong to an environment, and the files in which its path is written.

A copy is another directory, so what names the old one is adapted, as conda does: the first lines of
scripts, ``.pth`` files, the files that conda lists, and ``pyvenv.cfg``. Packages of editable
installs and an interpreter that is not part of the system become part of the copy. A link to a file
elsewhere becomes that file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlparse

from hvdtrain.errors import UsageError

FORMAT = 2  # of archives
BASE, EDITABLE = ".base", ".editable"  # folders for what is elsewhere, in the copy
SYSTEM = ("/usr", "/bin", "/lib", "/lib64")  # present on every host
LIBRARY = re.compile(rb"\0(lib[\w.+-]+\.so[\d.]*)(?=\0)")  # name of a shared library in another
INTERPRETER = re.compile(rb"#! ?(/\S+)/bin/")  # first line of a script
ELF = b"\x7fELF"
SCRIPT = 2**16  # bytes: a longer file in bin/ is no script
BLOCK = 4096  # bytes of a local file system: a file occupies whole ones
AT_ONCE = 32  # directories that are listed at a time
CONDA_OWN = ("pkgs", "envs", "conda-bld")  # folders of a base environment of conda

LIBRARY_OF_BASE = re.compile(rf"{re.escape(BASE)}/[^/]+/lib[^/]+\.so[\d.]*")

Skip = Callable[[PurePosixPath], bool]  # by the path in a tree


@dataclass(frozen=True)
class Change:
    """Occurrences of a path in a file of the copy, and the path there that replaces it."""

    file: str  # relative to the copy, as ``new``
    old: str
    new: str = ""  # the copy itself
    binary: bool = False  # whether strings end with a zero byte, so that they cannot move
    spare: int = 0  # zero bytes behind a string that belong to it, for each occurrence


@dataclass(frozen=True)
class EditableInstall:
    """A project whose packages are imported from its own directory."""

    project: Path
    into: str  # its folder in the copy
    finders: tuple[str, ...]  # the files by which Python finds it


@dataclass
class EnvironmentFiles:
    """The files of an environment, by their path in the copy."""

    prefix: Path
    files: dict[str, Path] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)  # with their targets
    status: dict[str, os.stat_result] = field(default_factory=dict)
    home: str = ""  # the directory of the interpreter, if that is copied
    editable: list[EditableInstall] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """The digest of the names, modes, sizes and times of all files.

        The inode shows a file that was replaced by one of the same size and time, as conda does.
        """
        lines = [str(FORMAT), str(self.prefix)]
        for name in sorted(self.files):
            entry = self.status[name]
            facts = (entry.st_mode, entry.st_size, entry.st_mtime_ns, entry.st_ino)
            lines.append("\0".join([name, *map(str, facts)]))
        lines += [f"{name}\0{target}" for name, target in sorted(self.links.items())]
        return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:20]

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(entry.st_size for entry in self.status.values())

    @property
    def space(self) -> int:
        """The bytes that they occupy on a disk."""
        return sum(-(-entry.st_size // BLOCK) * BLOCK for entry in self.status.values())

    @property
    def libraries(self) -> tuple[str, ...]:
        """The folders of the copy in which the interpreter needs to find libraries."""
        names = filter(LIBRARY_OF_BASE.fullmatch, self.files)
        return tuple(sorted({str(PurePosixPath(name).parent) for name in names}))

    def add(self, name: str, path: Path) -> None:
        """Add a file, or the target of a link."""
        target = Path(os.path.realpath(path))
        self.files[name], self.status[name] = target, target.stat()

    def spellings(self) -> set[str]:
        """Return the paths of the environment: it may have been created by way of a link."""
        real = os.path.realpath(self.prefix)
        found = {str(self.prefix), real}
        for name, path in self.files.items():
            if name.startswith("bin/") and self.status[name].st_size <= SCRIPT:
                with path.open("rb") as file:
                    match = INTERPRETER.match(file.readline(SCRIPT))
                if match and os.path.realpath(os.fsdecode(match[1])) == real:
                    found.add(os.fsdecode(match[1]))
        return found

    def changes(self, spellings: Iterable[str]) -> list[Change]:
        """Return the changes that the copy needs, for each file those of long paths first."""
        changes = [Change("pyvenv.cfg", self.home, f"{BASE}/bin")] if self.home else []
        for install in self.editable:
            project = str(install.project)
            changes += [Change(finder, project, install.into) for finder in install.finders]
        for name, path in self.files.items():
            is_script = name.startswith("bin/") and self.status[name].st_size <= SCRIPT
            if is_script or (name.endswith(".pth") and "/site-packages/" in name):
                content = path.read_bytes()
                if not content.startswith(ELF):
                    changes += [Change(name, o) for o in spellings if os.fsencode(o) in content]
        done = {change.file for change in changes}
        changes += [c for c in _conda_changes(self, spellings) if c.file not in done]
        return sorted(changes, key=lambda change: (change.file, -len(change.old)))


def list_files(prefix: Path) -> EnvironmentFiles:
    """Return the files of an environment, and of what it needs elsewhere.

    Raises:
        UsageError: a part of it cannot be copied.
        OSError: a file cannot be read.
    """
    contents = EnvironmentFiles(prefix)
    is_conda = (prefix / "conda-meta").is_dir()
    _add_tree(contents, prefix, "", (lambda path: str(path) in CONDA_OWN) if is_conda else None)
    if (prefix / "pyvenv.cfg").is_file():
        _add_base(contents)
    _add_editable(contents)
    return contents


def _add_tree(contents: EnvironmentFiles, root: Path, into: str, skip: Skip | None = None) -> None:
    """Add the tree ``root`` as the folder ``into`` of the copy.

    Raises:
        UsageError: a link leads to a directory elsewhere.
    """
    resolved = Path(os.path.realpath(root))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        folders = [root]
        while folders:
            below = []
            for entry, status in (pair for pairs in pool.map(_listed, folders) for pair in pairs):
                path = Path(entry.path)
                relative = PurePosixPath(path.relative_to(root))
                if skip and skip(relative):
                    continue
                name = str(into / relative)
                if entry.is_symlink():
                    _add_link(contents, name, path, resolved, skip)
                elif entry.is_dir():
                    below.append(path)
                elif status:
                    contents.files[name], contents.status[name] = path, status
            folders = below


def _listed(folder: Path) -> list[tuple[os.DirEntry[str], os.stat_result | None]]:
    """Return the entries of a folder, and the status of regular files.

    Both may be gone meanwhile: other jobs write ``__pycache__``.
    """
    try:
        with os.scandir(folder) as entries:
            return [(entry, _status(entry)) for entry in entries]
    except FileNotFoundError:
        return []


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat() if entry.is_file(follow_symlinks=False) else None
    except FileNotFoundError:
        return None


def _add_link(
    contents: EnvironmentFiles, name: str, path: Path, root: Path, skip: Skip | None
) -> None:
    target = Path(os.path.realpath(path))
    if target.is_relative_to(root) and not _is_skipped(target.relative_to(root), skip):
        contents.links[name] = os.path.relpath(target, os.path.realpath(path.parent))
    elif any(target.is_relative_to(folder) for folder in SYSTEM):
        contents.links[name] = str(target)
    elif target.is_file():
        contents.add(name, target)
    elif target.is_dir():
        raise UsageError(
            f"--stage-env: {path} is a link to the directory {target}, which is not part of the "
            "environment: install it there, or omit the option"
        )


def _is_skipped(path: Path, skip: Skip | None) -> bool:
    pure = PurePosixPath(path)
    return skip is not None and any(map(skip, (pure, *pure.parents)))


def _add_base(contents: EnvironmentFiles) -> None:
    """Add the interpreter of a virtual environment, unless it is part of the system.

    Raises:
        UsageError: its library is not found.
    """
    config = contents.prefix / "pyvenv.cfg"
    settings = dict(_settings(config.read_text()))
    home = Path(settings.get("home", ""))
    real = Path(os.path.realpath(home))
    if any(real.is_relative_to(folder) for folder in SYSTEM) or not home.is_dir():
        return
    number = ".".join(settings.get("version", settings.get("version_info", "")).split(".")[:2])
    python, base = f"python{number}", home.parent
    libraries = (base / lib / python for lib in ("lib", "lib64"))
    library = next((path for path in libraries if (path / "os.py").is_file()), None)
    binary = next((home / name for name in (python, "python3") if (home / name).is_file()), None)
    if library is None or binary is None:
        raise UsageError(
            f"--stage-env: {config}: {base} has no {python}: create the environment anew"
        )
    whole = settings.get("include-system-site-packages", "").lower() == "true"
    into = f"{BASE}/{library.parent.name}"
    _add_tree(contents, library, f"{into}/{python}", partial(_is_extra, whole=whole))
    if (base / "include" / python).is_dir():  # torch.compile and Triton compile with it
        _add_tree(contents, base / "include" / python, f"{BASE}/include/{python}")
    contents.add(f"{BASE}/bin/{python}", binary)
    extensions = [path for name, path in contents.files.items() if "/lib-dynload/" in name]
    for path in _needed([binary, *extensions], library.parent):
        contents.add(f"{into}/{path.name}", path)
    for name in [name for name in contents.files if name.startswith("bin/python")]:
        if contents.files[name].is_relative_to(real):  # the target of a link
            del contents.files[name], contents.status[name]
            contents.links[name] = f"../{BASE}/bin/{python}"
    contents.home = str(home)


def _settings(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            yield name.strip().lower(), value.strip()


def _is_extra(path: PurePosixPath, *, whole: bool) -> bool:
    """Return whether a part of the standard library is of no use to ranks."""
    is_packages = path.parts[:1] == ("site-packages",)
    return (
        path.suffix == ".a"
        or (not is_packages and path.name == "test")
        or (is_packages and not whole)
    )


def _needed(binaries: list[Path], folder: Path) -> Iterator[Path]:
    """Yield the shared libraries in ``folder`` that are named in binaries, or in one of them."""
    available = {path.name: path for path in folder.glob("lib*.so*") if path.is_file()}
    while binaries and available:
        names = {os.fsdecode(name) for name in LIBRARY.findall(binaries.pop().read_bytes())}
        for name in names & available.keys():
            path = available.pop(name)
            binaries.append(path)
            yield path


def _add_editable(contents: EnvironmentFiles) -> None:
    """Add the packages of editable installs.

    Raises:
        UsageError: it is unknown which packages belong to one.
    """
    records = sorted(contents.prefix.glob("lib/python*/site-packages/*/direct_url.json"))
    for number, path in enumerate(records):
        try:
            content = json.loads(path.read_text())
            url = urlparse(content["url"])
            if not content.get("dir_info", {}).get("editable") or url.scheme != "file":
                continue
        except (ValueError, KeyError, AttributeError) as error:
            raise UsageError(f"--stage-env: {path} cannot be read: {error}") from error
        project, into = Path(unquote(url.path)), f"{EDITABLE}/{number}"
        before, finders = len(contents.files), []
        for pattern in ("*.pth", "__editable__*.py"):
            for file in sorted(path.parent.parent.glob(pattern)):
                paths = _paths_in(file, project)
                finders += [file.relative_to(contents.prefix).as_posix()] if paths else []
                for found in paths:
                    _add_imported(contents, found, project, into, is_root=file.suffix == ".pth")
        if len(contents.files) == before:
            raise UsageError(
                f"--stage-env: {project} is installed in editable mode, and its packages are not "
                f"found there: install it with `pip install {project}`, or omit the option"
            )
        contents.editable.append(EditableInstall(project, into, tuple(finders)))


def _paths_in(finder: Path, project: Path) -> list[Path]:
    """Return the paths of a project in a file by which Python finds it."""
    pattern = re.escape(str(project)) + r"(?![\w.-])[^'\"\n]*"
    found = re.findall(pattern, finder.read_text(errors="replace"))
    return [Path(text.rstrip()) for text in dict.fromkeys(found)]


def _add_imported(
    contents: EnvironmentFiles, path: Path, project: Path, into: str, *, is_root: bool
) -> None:
    """Add a package or module of an editable install, or those in a directory of the path."""
    found = [path] if path.is_dir() else [path.with_name(f"{path.name}.py")]
    if is_root:
        found = sorted(path.iterdir()) if path.is_dir() else []
        found = [item for item in found if item.suffix in (".py", ".so") or _is_package(item)]
    for item in found:
        name = f"{into}/{item.relative_to(project).as_posix()}"
        if item.is_dir():
            _add_tree(contents, item, name)
        elif item.is_file():
            contents.add(name, item)


def _is_package(path: Path) -> bool:
    """Return whether a folder may be imported, also as a namespace package."""
    return path.is_dir() and path.name.isidentifier() and any(path.glob("*.py"))


def _conda_changes(contents: EnvironmentFiles, spellings: Iterable[str]) -> Iterator[Change]:
    """Yield the changes of conda packages, which name their placeholders and files.

    In a binary conda has filled up the placeholder, which is long, with zero bytes.
    """
    for path in sorted(contents.prefix.glob("conda-meta/*.json")):
        entries = json.loads(path.read_text()).get("paths_data", {}).get("paths", ())
        for entry in entries:
            name, placeholder = entry.get("_path"), entry.get("prefix_placeholder")
            if placeholder and name in contents.files:
                binary = entry.get("file_mode") == "binary"
                for old in spellings:
                    spare = max(0, len(placeholder) - len(old)) if binary else 0
                    yield Change(name, old, binary=binary, spare=spare)
