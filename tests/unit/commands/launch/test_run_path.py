"""A run path in an environment becomes relative; all else of a library keeps its bytes."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hvdtrain.commands.launch.environment import pack
from hvdtrain.commands.launch.environment_copy import copy_folder
from hvdtrain.commands.launch.run_path import find, relocated
from tests.environments import PACKAGES, make_environment, stage

COMPILER = shutil.which("cc") or shutil.which("gcc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


def library(path: Path, run_path: str, *more: str) -> bytes:
    """Build a shared library with a run path; return its content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    assert COMPILER
    options = ["-shared", "-nostdlib", "-fPIC", f"-Wl,-rpath,{run_path}", *more]
    line = [COMPILER, *options, "-x", "c", "-", "-o", str(path)]
    subprocess.run(line, input=b"int answer(void) { return 42; }", check=True)
    return path.read_bytes()


@needs_compiler
@pytest.mark.parametrize("tags", ["-Wl,--enable-new-dtags", "-Wl,--disable-new-dtags"])
def test_the_run_path_becomes_relative(tags: str, tmp_path: Path) -> None:
    prefix = make_environment(tmp_path / "environment")
    paths = f"$ORIGIN/../lib:{prefix}/lib:{prefix}/lib:/opt/lib:{prefix}2/lib"
    name = f"{PACKAGES}/package/fast.so"
    content = library(prefix / name, paths, tags)
    found = find(io.BytesIO(content))
    assert found is not None
    assert found[1].decode() == paths
    archive = pack(prefix, tmp_path / "cache")
    assert not stage(archive, tmp_path / "local")
    copied = (copy_folder(archive.manifest.digest, tmp_path / "local") / name).read_bytes()
    new = find(io.BytesIO(copied))
    assert new is not None
    assert new[1].decode().rstrip("/") == (
        f"$ORIGIN/../lib:$ORIGIN/../../..:/opt/lib:{prefix}2/lib"
    )
    offset, length = found[0], len(found[1])
    assert copied[:offset] == content[:offset]
    assert copied[offset + length :] == content[offset + length :]


@needs_compiler
def test_a_run_path_without_space_or_of_other_places_is_left(tmp_path: Path) -> None:
    for run_path in ("/e/lib", "/opt/lib", "$ORIGIN"):
        content = library(tmp_path / "fast.so", run_path)
        assert relocated(io.BytesIO(content), "lib/a/b/c/fast.so", ["/e"]) is None


def test_other_files_have_none() -> None:
    for content in (b"", b"#!/bin/sh\n", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" + os.urandom(500)):
        assert find(io.BytesIO(content)) is None
