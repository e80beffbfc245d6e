"""Downloads of `make setup` and of a Horovod build: pinned and checked by hash."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hvdtrain.commands.install_horovod import recipe

ROOT = Path(__file__).parents[2]
SETUP, CHECK, CUDA = (ROOT / f"requirements{kind}.txt" for kind in ("", "-check", "-cuda"))
HASHES = r"(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n"


def pins(path: Path) -> dict[str, Requirement]:
    """Return the requirements of a file, by name."""
    lines = re.findall(r"^[^#\s].*", path.read_text(), re.MULTILINE)
    requirements = [Requirement(line.removesuffix("\\")) for line in lines]
    return {canonicalize_name(pin.name): pin for pin in requirements}


@pytest.mark.parametrize(
    "path", [SETUP, CHECK, CUDA, recipe.TOOLS_FILE], ids=lambda path: path.name
)
def test_every_line_is_a_pin_with_hashes(path: Path) -> None:
    # Nothing else: no index, no option, no URL.
    assert re.fullmatch(rf"(?:#.*\n)*(?:[a-z0-9-]+==[^\s;]+(?: ; .+?)?{HASHES})+", path.read_text())


def test_setup_installs_only_checked_packages(tmp_path: Path) -> None:
    result = subprocess.run(
        ["make", "--dry-run", "setup", f"VENV={tmp_path}"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    lines = result.stdout.replace("\\\n", " ").splitlines()
    commands = [line.partition("pip install")[2].split() for line in lines if "pip install" in line]
    assert sum("--require-hashes" in words for words in commands) == 2
    others = [words for words in commands if "--require-hashes" not in words]
    assert all("--no-deps" in words for words in others)
    assert {word for words in others for word in words if "==" in word} == {
        "torch==2.13.0", "torchvision==0.28.0"
    }  # fmt: skip
    assert all({"--only-binary", "--no-build-isolation"} & set(words) for words in commands)


def test_the_constraints_equal_the_requirements() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    named = re.findall(r"^TORCH := (\S+) (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    pinned = re.findall(r"^([^#\s].*) \\$", SETUP.read_text(), re.MULTILINE)
    assert lines == [*named[0], *pinned]


def test_the_tools_of_horovods_build_are_checked_by_hash() -> None:
    argv = recipe.tools_command(Path("/py"), recipe.Workshop(Path("/cache/build/k"))).argv
    assert "--require-hashes" in argv
    assert argv[-2:] == ("--requirement", str(recipe.TOOLS_FILE))
    assert not [word for word in argv if "==" in word]
    # They are part of the key of a cached wheel.
    assert tuple(map(str, pins(recipe.TOOLS_FILE).values())) == recipe.BUILD_TOOLS
