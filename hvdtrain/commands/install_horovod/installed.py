"""The installed Horovod, and the repair of torchvision that is installed with it."""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.metadata
import json
from pathlib import Path

from hvdtrain.system.files import replacing
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
    """
    switch = mend_file(site_packages)
    added = {
        f"{switch.stem}.py": Path(torchvision_mend.__file__).read_bytes(),
        switch.name: f"import {switch.stem}\n".encode(),  # Python executes it at start
    }
    distribution = find_installed(site_packages)
    assert distribution is not None and distribution.files
    [file] = [file for file in distribution.files if file.name == "RECORD"]
    record = Path(str(file.locate()))
    lines = record.read_text().splitlines()
    lines = [line for line in lines if line.partition(",")[0] not in added]
    for name, data in added.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
        lines.append(f"{name},sha256={digest.rstrip('=')},{len(data)}")
    text = "".join(f"{line}\n" for line in lines)
    for path, data in (
        (record, text.encode()),
        *((site_packages / name, data) for name, data in added.items()),
    ):
        with replacing(path) as stream:
            stream.write(data)
