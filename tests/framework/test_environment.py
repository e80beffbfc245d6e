"""The environment that `make setup` makes: what it holds, and what can be imported there."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                base = canonicalize_name(requirement.name)
                todo += [(base, also) for also in ("", *requirement.extras)]
    return {name for name, _ in done} - {"hvdtrain"}


def test_pinned_requirements_are_complete() -> None:
    pinned = pins(SETUP)
    assert needed("all", "test") - set(pinned) - set(pins(CUDA)) == BY_VERSION
    assert needed("test", "mpi", "completion") == set(pins(CHECK)) & needed("all", "test")
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    for requirement in map(Requirement, build):  # build isolation would download them
        pin = pinned[requirement.name]
        assert pin.marker is None
        assert requirement.specifier.contains(str(pin.specifier).removeprefix("=="))


def test_a_users_script_imports_torchvision(tmp_path: Path) -> None:
    """In this environment, as `make setup` made it."""
    program = "import torchvision; print(len(list(torchvision.models.resnet18().parameters())))"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert result.stdout == "62\n", result.stderr
