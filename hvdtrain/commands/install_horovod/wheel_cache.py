"""The cache of built wheels of a user, shared by all environments and hosts.

    archives/      Horovod's source archive
    wheels/KEY/    a wheel, and build.json: its hash and its build facts
    build/KEY/     a build in progress
    logs/
    lock           held by the session that builds or installs

What is complete is renamed to its final name, so a reader never sees a part of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.commands.install_horovod.recipe import HOROVOD_ARCHIVE, HOROVOD_SHA256
from hvdtrain.system.files import file_digest, lock
from hvdtrain.system.folder import Folder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CachedWheel:
    """A wheel in the cache."""

    path: Path  # the wheel file
    sha256: str  # its hash when it was stored
    facts: Mapping[str, Any]  # see ``Build.facts``


@dataclass(frozen=True)
class WheelCache:
    """The cache under one root directory."""

    root: Path  # its directory; created on the first write

    @property
    def archive(self) -> Path:
        """Return the path of Horovod's source archive."""
        return self.root / "archives" / HOROVOD_ARCHIVE

    def has_archive(self) -> bool:
        """Return whether the released archive is cached."""
        return self.archive.is_file() and file_digest(self.archive, "sha256") == HOROVOD_SHA256

    def build_root(self, key: str) -> Path:
        """Return the directory in which the wheel ``key`` is built."""
        return self.root / "build" / key

    @contextlib.contextmanager
    def session(self, key: str) -> Iterator[Path]:
        """Wait until no other session builds or installs; yield the name of a new log file."""
        folder = self.root / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        with lock(Folder.named(self.root), "builds or installs Horovod"):
            yield folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{key}.log"

    def find(self, key: str) -> CachedWheel | None:
        """Return the wheel ``key``; None if it is not cached, or was changed."""
        directory = self.root / "wheels" / key
        try:
            record = json.loads((directory / "build.json").read_text())
            wheel = CachedWheel(directory / record["wheel"], record["sha256"], record["facts"])
            if file_digest(wheel.path, "sha256") == wheel.sha256:
                return wheel
        except (OSError, ValueError, KeyError, TypeError):
            return None
        log.warning("%s was changed after it was built; rebuilding it", wheel.path)
        return None

    def store(self, key: str, built: Path, facts: Mapping[str, Any]) -> CachedWheel:
        """Store a built wheel, replacing an older one; call it within a ``session``."""
        new, directory = self.build_root(key) / "new", self.root / "wheels" / key
        new.mkdir(parents=True)
        shutil.copyfile(built, new / built.name)
        sha256 = file_digest(new / built.name, "sha256")
        record = {"wheel": built.name, "sha256": sha256, "facts": facts}
        (new / "build.json").write_text(json.dumps(record, indent=1, sort_keys=True))
        shutil.rmtree(directory, ignore_errors=True)
        directory.parent.mkdir(exist_ok=True)
        new.rename(directory)
        return CachedWheel(directory / built.name, sha256, facts)
