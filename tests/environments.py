"""Small Python environments, and their copies, for the tests of ``launch --stage-env``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hvdtrain.collectives.base import SingleRank
from hvdtrain.commands.launch import environment_host
from hvdtrain.commands.launch.environment import Archive, pack
from hvdtrain.commands.launch.environment_copy import copy_folder
from hvdtrain.errors import HvdtrainError

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
PACKAGES = f"lib/{PYTHON}/site-packages"


def make_environment(folder: Path) -> Path:
    """Create a conda environment of one module, without an interpreter."""
    for path in (folder / "conda-meta", folder / "bin", folder / PACKAGES):
        path.mkdir(parents=True)
    (folder / PACKAGES / "module.py").write_text("HERE = __file__\n")
    return folder


def make_editable(prefix: Path, project: Path) -> None:
    """Add an editable install: its record, and the file by which Python finds it."""
    record = prefix / PACKAGES / f"{project.name}-1.dist-info"
    record.mkdir()
    url = {"dir_info": {"editable": True}, "url": f"file://{project}"}
    (record / "direct_url.json").write_text(json.dumps(url))
    (prefix / PACKAGES / f"{project.name}.pth").write_text(f"{project}\n")


def stage(archive: Archive, directory: Path, job: str = "job") -> str:
    """Make a copy in one process without MPI; return why that failed."""
    if not directory.exists():
        directory.mkdir()
    try:
        environment_host.stage(SingleRank(), archive, directory, job)
    except HvdtrainError as error:
        return str(error)
    return ""


def staged(prefix: Path, folder: Path, job: str = "job") -> Path:
    """Pack and unpack an environment; return the copy."""
    archive = pack(prefix, folder / "cache")
    error = stage(archive, folder / "local", job)
    assert not error, error
    return copy_folder(archive.digest, folder / "local")
