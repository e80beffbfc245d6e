"""The cache of built wheels, shared by all sessions of a user, also on several hosts.

    archives/                 the source archive
    wheels/KEY/               one wheel, and build.json: what it was built from, and its hash
    wheels/KEY/proofs/        one file for each environment in which the wheel has been proven
    build/KEY/                a build that is going on
    locks/  logs/

Whatever is complete is put in place by a rename, so a reader never sees half of it. The locks are
the kernel's (flock): they end with the process that holds them, however it ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
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
    Target,
)
from hvdtrain.errors import HvdtrainError
from hvdtrain.system.files import FULL, lock
from hvdtrain.system.machine.toolchain import Cuda, Toolchain

log = logging.getLogger(__name__)


def identity(target: Target, toolchain: Toolchain, environ: Mapping[str, str]) -> dict[str, object]:
    """Return everything that the binary depends on, as plain values."""
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
        # Inside the environment the place is found relatively, outside it is part of the binary.
        "mpi_place": _mpi_place(toolchain),
        "compiler": compiler.identity if compiler else None,
        "cuda": _cuda(cuda, target) if cuda else None,
        "nccl": " ".join([nccl.version, *outside]) if nccl else None,
        "cpu": toolchain.cpu_flags,
        "flags": {n: environ[n] for n in (*FLAG_VARIABLES, *USER_VARIABLES) if n in environ},
    }


def _cuda(cuda: Cuda, target: Target) -> str:
    """Return the toolkit, where its library lies if not in the environment, and what it makes."""
    place = "package" if cuda.is_package else str(cuda.home)
    return " ".join([cuda.version, place, *map(str, target.cuda_arches)])


def _mpi_place(toolchain: Toolchain) -> list[str]:
    """Return the directories of MPI's libraries, relative where they are in the environment."""
    prefix = toolchain.prefix
    paths = toolchain.mpi.libraries if toolchain.mpi else ()
    return [str(p.relative_to(prefix) if p.is_relative_to(prefix) else p) for p in paths]


def cache_key(facts: Mapping[str, object]) -> str:
    """Return the name under which a binary with these facts is cached."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def cache_root(environ: Mapping[str, str]) -> Path:
    """Return the directory of the cache: HVDTRAIN_CACHE, else the user's cache directory."""
    if environ.get("HVDTRAIN_CACHE"):
        return Path(environ["HVDTRAIN_CACHE"]).absolute()
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home()) / ".cache"
    return Path(base).absolute() / "hvdtrain"


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


def copy_atomically(path: Path, target: Path) -> None:
    """Copy a file so that it is there whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(path, beside)
    beside.replace(target)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in ``path``; empty where it cannot be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class CachedWheel:
    """A wheel in the cache."""

    path: Path  # the wheel file
    sha256: str  # its hash, as written down when it was put in
    facts: Mapping[str, Any]  # what it was built from

    def proof_file(self, prefix: Path) -> Path:
        """Return where it is written down that this wheel works in the environment ``prefix``."""
        name = hashlib.sha256(f"{prefix} {self.sha256}".encode()).hexdigest()[:16]
        return self.path.parent / "proofs" / f"{name}.json"


@dataclass(frozen=True)
class WheelCache:
    """The cache under one root directory."""

    root: Path  # its directory; made when something is first put in

    @property
    def archive(self) -> Path:
        """Where the source archive of Horovod is kept."""
        return self.root / "archives" / HOROVOD_ARCHIVE

    def build_root(self, key: str) -> Path:
        """Return the directory in which the wheel ``key`` is built."""
        return self.root / "build" / key

    def log_file(self, key: str) -> Path:
        """Return a new name for the log of a build."""
        return self.root / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{key}.log"

    def has_archive(self) -> bool:
        """Tell whether the archive is there and is the released one."""
        return self.archive.is_file() and file_hash(self.archive) == HOROVOD_SHA256

    def find(self, key: str) -> CachedWheel | None:
        """Return the wheel ``key`` if it is there, whole, and the one that was put in."""
        directory = self.root / "wheels" / key
        try:
            notes = json.loads((directory / "build.json").read_text())
            wheel = CachedWheel(directory / notes["wheel"], notes["sha256"], notes["facts"])
            if file_hash(wheel.path) == wheel.sha256:
                return wheel
        except (OSError, ValueError, KeyError, TypeError):
            return None
        log.warning("%s was changed after it was built; building it again", wheel.path)
        return None

    def store(self, key: str, built: Path, facts: Mapping[str, Any]) -> CachedWheel:
        """Put a built wheel in, in place of an older one; call it under the lock of ``key``.

        Raises:
            HvdtrainError: the cache cannot be written.
        """
        directory = self.root / "wheels" / key
        target = directory / built.name
        notes = {"wheel": built.name, "sha256": file_hash(built), "facts": facts}
        try:
            copy_atomically(built, target)
            # The hash in it vouches for the wheel, so it comes second.
            write_atomically(directory / "build.json", json.dumps(notes, indent=1, sort_keys=True))
        except OSError as error:
            room = "free space, or " if error.errno in FULL else ""
            raise HvdtrainError(
                f"the wheel cannot be cached in {directory} ({error.strerror}): "
                f"{room}set HVDTRAIN_CACHE to a directory of yours"
            ) from error
        return CachedWheel(target, str(notes["sha256"]), facts)

    @contextlib.contextmanager
    def lock(self, name: str, what: str) -> Iterator[None]:
        """Hold the lock ``name``; another session's ``what`` is waited for, and said so."""
        path = self.root / "locks" / f"{name}.lock"
        with contextlib.ExitStack() as held:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(lock(path, what))
            except OSError as error:
                raise HvdtrainError(
                    f"the cache {self.root} cannot be written ({error.strerror}): "
                    "set HVDTRAIN_CACHE to a directory of yours"
                ) from error
            yield
