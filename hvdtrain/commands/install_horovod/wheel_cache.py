"""Built wheels: the cache of a user, shared by all sessions and hosts, and the installed one.

    archives/                 the source archive
    wheels/KEY/               one wheel, and build.json: its build facts and its hash
    wheels/KEY/proofs/        one file per environment in which the wheel has been proven
    build/KEY/                a build in progress
    locks/  logs/

Complete files are renamed to their final names, so a reader never sees a part of one. The locks
are the kernel's (flock): they end with the process that holds them.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib
import importlib.metadata
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.commands.install_horovod.recipe import (
    BUILD_TOOLS,
    FLAG_VARIABLES,
    HOROVOD_ARCHIVE,
    HOROVOD_SHA256,
    RECIPE,
    USER_VARIABLES,
    BuildTarget,
)
from hvdtrain.commands.install_horovod.toolchain import Cuda, Toolchain
from hvdtrain.errors import HvdtrainError
from hvdtrain.system.files import FULL, lock
from hvdtrain.workloads import torchvision_mend

log = logging.getLogger(__name__)


def identity(
    target: BuildTarget, toolchain: Toolchain, environ: Mapping[str, str]
) -> dict[str, object]:
    """Return the build facts: all properties that affect the binary, as plain values."""
    mpi, compiler = toolchain.mpi, toolchain.compiler
    torch = toolchain.torch if "pytorch" in target.frameworks else None
    tensorflow = toolchain.tensorflow if "tensorflow" in target.frameworks else None
    cuda = toolchain.cuda if target.gpu == "nccl" else None
    nccl = toolchain.nccl if target.gpu == "nccl" else None
    outside = [str(toolchain.foreign_nccl)] if toolchain.foreign_nccl else []
    return {
        "recipe": RECIPE,
        "archive": HOROVOD_SHA256,
        "tools": BUILD_TOOLS,
        "python": toolchain.python_tag,
        "frameworks": sorted(target.frameworks),
        "gpu": target.gpu,
        "torch": f"{torch.version} {torch.identity}" if torch else None,
        "tensorflow": f"{tensorflow.version} cuda={tensorflow.cuda is not None}"
        if tensorflow
        else None,
        "mpi": mpi.identity if mpi else None,
        # Relative inside the environment, otherwise the absolute path is part of the binary.
        "mpi_place": _mpi_directories(toolchain),
        "compiler": compiler.identity if compiler else None,
        "cuda": _cuda(cuda, target) if cuda else None,
        "nccl": " ".join([nccl.version, *outside]) if nccl else None,
        "cpu": toolchain.cpu_flags,
        "flags": {n: environ[n] for n in (*FLAG_VARIABLES, *USER_VARIABLES) if n in environ},
    }


def _cuda(cuda: Cuda, target: BuildTarget) -> str:
    """Return the toolkit's version, its path if not in the environment, and the architectures."""
    path = "package" if cuda.is_package else str(cuda.home)
    return " ".join([cuda.version, path, *map(str, target.cuda_arches)])


def _mpi_directories(toolchain: Toolchain) -> list[str]:
    """Return the directories of MPI's libraries, relative if they are in the environment."""
    prefix = toolchain.prefix
    paths = toolchain.mpi.libraries if toolchain.mpi else ()
    return [str(p.relative_to(prefix) if p.is_relative_to(prefix) else p) for p in paths]


def cache_key(facts: Mapping[str, object]) -> str:
    """Return the name under which a binary with these facts is cached."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)


def read_json(path: Path) -> dict[str, object]:
    """Return the JSON object in ``path``; empty if it cannot be read."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class CachedWheel:
    """A wheel in the cache."""

    path: Path  # the wheel file
    sha256: str  # its hash when it was stored
    facts: Mapping[str, Any]  # see ``identity``

    def proof_file(self, prefix: Path) -> Path:
        """Return the path of the proof that this wheel works in the environment ``prefix``."""
        name = hashlib.sha256(f"{prefix} {self.sha256}".encode()).hexdigest()[:16]
        return self.path.parent / "proofs" / f"{name}.json"


@dataclass(frozen=True)
class WheelCache:
    """The cache under one root directory."""

    root: Path  # its directory; created on the first write

    @property
    def archive(self) -> Path:
        """Return the path of Horovod's source archive."""
        return self.root / "archives" / HOROVOD_ARCHIVE

    def build_root(self, key: str) -> Path:
        """Return the directory in which the wheel ``key`` is built."""
        return self.root / "build" / key

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Convert an ``OSError`` in work on the cache into an error with its remedy.

        Raises:
            HvdtrainError: the cache is full, or not writable.
        """
        try:
            yield
        except OSError as error:
            need = "with 2 GB free" if error.errno in FULL else "that is writable"
            raise HvdtrainError(
                f"{error.filename or self.root}: {error.strerror}; "
                f"set HVDTRAIN_CACHE to a directory {need}"
            ) from error

    def log_file(self, key: str) -> Path:
        """Return a new name for the log of a build, in a directory that exists."""
        folder = self.root / "logs"
        with self.errors():
            folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{key}.log"

    def has_archive(self) -> bool:
        """Return whether the released archive is cached."""
        return self.archive.is_file() and file_hash(self.archive) == HOROVOD_SHA256

    def find(self, key: str) -> CachedWheel | None:
        """Return the wheel ``key``; None if it is not cached, or was changed."""
        directory = self.root / "wheels" / key
        try:
            record = json.loads((directory / "build.json").read_text())
            wheel = CachedWheel(directory / record["wheel"], record["sha256"], record["facts"])
            if file_hash(wheel.path) == wheel.sha256:
                return wheel
        except (OSError, ValueError, KeyError, TypeError):
            return None
        log.warning("%s was changed after it was built; rebuilding it", wheel.path)
        return None

    def store(self, key: str, built: Path, facts: Mapping[str, Any]) -> CachedWheel:
        """Store a built wheel, replacing an older one; call it with the lock of ``key``.

        Raises:
            OSError: the cache is not writable.
        """
        target = self.root / "wheels" / key / built.name
        wheel = CachedWheel(target, file_hash(built), facts)
        write_atomically(target, built.read_bytes())
        record = {"wheel": built.name, "sha256": wheel.sha256, "facts": facts}
        text = json.dumps(record, indent=1, sort_keys=True)
        # It has the wheel's hash, so it is written second.
        write_atomically(target.with_name("build.json"), text.encode())
        return wheel

    @contextlib.contextmanager
    def lock(self, name: str, activity: str) -> Iterator[None]:
        """Hold the lock ``name``; waiting for another session's ``activity`` is logged."""
        path = self.root / "locks" / f"{name}.lock"
        with contextlib.ExitStack() as held:
            with self.errors():
                path.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(lock(path, activity))
            yield


def find_installed(site_packages: Path) -> importlib.metadata.Distribution | None:
    """Return the Horovod installed in ``site_packages``, bypassing importlib's caches."""
    importlib.invalidate_caches()
    matches = importlib.metadata.distributions(name="horovod", path=[str(site_packages)])
    return next(iter(matches), None)


def wheel_hash(distribution: importlib.metadata.Distribution | None) -> str | None:
    """Return the SHA-256 of the installed wheel file, as recorded by pip.

    Source: the ``direct_url.json`` of the packaging specifications. None if the distribution is
    from an index, or was installed by another tool.
    """
    try:
        text = distribution.read_text("direct_url.json") if distribution else None
        archive = json.loads(text or "{}").get("archive_info", {})
    except (OSError, ValueError, AttributeError):
        return None
    value = archive.get("hashes", {}).get("sha256") or archive.get("hash", "")
    return str(value).removeprefix("sha256=") or None


def is_complete(distribution: importlib.metadata.Distribution | None) -> bool:
    """Return whether every file of the distribution exists with its recorded size."""
    if distribution is None or not distribution.files:
        return False
    for file in distribution.files:
        path = Path(str(file.locate()))
        if file.size is not None and (not path.is_file() or path.stat().st_size != file.size):
            return False
    return True


def mend_file(site_packages: Path) -> Path:
    """Return the path of the .pth file that repairs torchvision's import in the environment."""
    return site_packages / "hvdtrain_torchvision.pth"


def mend_torchvision(site_packages: Path) -> None:
    """Repair torchvision's import in the environment, until Horovod is uninstalled.

    The files are added to Horovod's RECORD, so that pip removes them with Horovod.

    Raises:
        OSError: ``site_packages`` is not writable.
    """
    switch = mend_file(site_packages)
    files = {
        f"{switch.stem}.py": Path(torchvision_mend.__file__).read_bytes(),
        switch.name: f"import {switch.stem}\n".encode(),  # Python executes it at start
    }
    _record(site_packages, files)
    for name, data in files.items():
        write_atomically(site_packages / name, data)


def _record(site_packages: Path, files: Mapping[str, bytes]) -> None:
    """Add ``files`` to the RECORD of the installed Horovod."""
    distribution = find_installed(site_packages)
    assert distribution is not None and distribution.files
    [file] = [file for file in distribution.files if file.name == "RECORD"]
    record = Path(str(file.locate()))
    lines = record.read_text().splitlines()
    lines = [line for line in lines if line.partition(",")[0] not in files]
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
        lines.append(f"{name},sha256={digest.rstrip('=')},{len(data)}")
    write_atomically(record, "".join(f"{line}\n" for line in lines).encode())
