"""Small Python environments, and their copies, for the tests of ``launch --stage-env``."""

from __future__ import annotations

import sys
from pathlib import Path

from hvdtrain.collectives.base import SingleRank
from hvdtrain.commands.launch.staging import __main__ as unpacking
from hvdtrain.commands.launch.staging import packed

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
PACKAGES = f"lib/{PYTHON}/site-packages"


def make_environment(folder: Path) -> Path:
    """Create a conda environment of one module, without an interpreter."""
    for path in (folder / "conda-meta", folder / "bin", folder / PACKAGES):
        path.mkdir(parents=True)
    (folder / PACKAGES / "module.py").write_text("HERE = __file__\n")
    return folder


def copied(prefix: Path, folder: Path) -> Path:
    """Pack an environment, and unpack it in one process without MPI; return the copy."""
    copy = folder / "local" / "copy" / "env"
    if not copy.parents[1].exists():
        copy.parents[1].mkdir()
    with packed(prefix, folder / "cache") as archive:
        unpacking.stage(SingleRank(), copy, *archive)
    return copy
