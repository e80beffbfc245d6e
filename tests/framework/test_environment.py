"""The environment that `make setup` makes: what it holds, and what can be imported there."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hvdtrain.config.options import Options
from hvdtrain.errors import UsageError
from hvdtrain.training.progress import Progress
from tests.conftest import ROOT
from tests.unit.test_requirements import CHECK, CUDA, SETUP, pins

BY_VERSION = {"torch", "torchvision"}  # a CPU build from another index is another file


def needed(*extras: str) -> set[str]:
    """Everything that hvdtrain with ``extras`` needs in this environment, by what is installed."""
    done: set[tuple[str, str]] = set()
    todo = [("hvdtrain", extra) for extra in ("", *extras)]
    while todo:
        name, extra = key = todo.pop()
        if key in done:
            continue
        done.add(key)
        for text in importlib.metadata.requires(name) or ():
            one = Requirement(text)
            if one.marker is None or one.marker.evaluate({"extra": extra}):
                todo += [(canonicalize_name(one.name), also) for also in ("", *one.extras)]
    return {name for name, _ in done} - {"hvdtrain"}


def test_what_is_installed_without_dependencies_has_them_all() -> None:
    pinned = pins(SETUP)
    assert needed("all", "test") - set(pinned) - set(pins(CUDA)) == BY_VERSION
    assert needed("test", "mpi", "completion") == set(pins(CHECK)) & needed("all", "test")
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    for one in map(Requirement, build):  # there is no build isolation, which would download it
        assert pinned[one.name].marker is None
        assert one.specifier.contains(str(pinned[one.name].specifier).removeprefix("=="))


def test_a_script_of_a_users_own_imports_torchvision(tmp_path: Path) -> None:
    """In this environment, as `make setup` made it."""
    program = "import torchvision; print(len(list(torchvision.models.resnet18().parameters())))"
    told = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert told.stdout == "62\n", told.stderr


def test_a_file_where_tensorboard_wants_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file", tmp_path / "file" / "board"):
        with pytest.raises(UsageError, match=f"--tensorboard {path}"):
            Progress(Options(tensorboard=path))
