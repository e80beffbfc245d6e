"""The Horovod installed in this environment, and the repair of torchvision's import."""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.commands.install_horovod.wheel_cache import write_atomically
from hvdtrain.workloads import torchvision_mend


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
        f"{switch.stem}.py": Path(torchvision_mend.__file__).read_text(),
        switch.name: f"import {switch.stem}\n",  # Python executes it at start
    }
    _record(site_packages, files)
    for name, text in files.items():
        write_atomically(site_packages / name, text)


def _record(site_packages: Path, files: Mapping[str, str]) -> None:
    """Add ``files`` to the RECORD of the installed Horovod."""
    distribution = find_installed(site_packages)
    assert distribution is not None and distribution.files
    record = next(file for file in distribution.files if file.name == "RECORD").locate()
    lines = Path(str(record)).read_text().splitlines()
    lines = [line for line in lines if line.partition(",")[0] not in files]
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()
        lines.append(f"{name},sha256={digest.rstrip('=')},{len(text.encode())}")
    write_atomically(Path(str(record)), "\n".join(lines) + "\n")
