"""The cache of wheels and its keys, the installed wheel, and the repair of torchvision."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hvdtrain.commands.install_horovod import wheel_cache
from hvdtrain.commands.install_horovod.recipe import BuildTarget
from hvdtrain.commands.install_horovod.toolchain import Cuda, Toolchain
from hvdtrain.commands.install_horovod.wheel_cache import (
    WheelCache,
    cache_key,
    identity,
)
from hvdtrain.errors import HvdtrainError
from tests.unit.commands.install_horovod.conftest import BOTH, NCCL, on_gpu


def key_of(toolchain: Toolchain, target: BuildTarget = BOTH, **environ: str) -> str:
    return cache_key(identity(target, toolchain, environ))


def test_the_key_depends_on_every_build_fact(toolchain: Toolchain) -> None:
    assert toolchain.torch and toolchain.tensorflow and toolchain.mpi and toolchain.compiler
    change = dataclasses.replace
    machines = [
        toolchain,
        change(toolchain, python_tag="cpython-312-x86_64-linux-gnu"),
        change(toolchain, torch=change(toolchain.torch, version="2.12.0+cpu")),
        change(toolchain, torch=change(toolchain.torch, identity="cuda=None commit=def")),
        change(toolchain, tensorflow=change(toolchain.tensorflow, version="2.20.0")),
        change(toolchain, tensorflow=change(toolchain.tensorflow, cuda="12.5.1")),
        change(toolchain, mpi=change(toolchain.mpi, identity="Open MPI 5.0.10")),
        change(toolchain, mpi=change(toolchain.mpi, libraries=(Path("/opt/lib"),))),
        change(toolchain, compiler=change(toolchain.compiler, identity="g++ 13.1.0")),
        change(toolchain, cpu_flags=()),
        on_gpu(toolchain),
    ]
    keys = [key_of(machine) for machine in machines]
    keys += [
        key_of(on_gpu(toolchain), NCCL),
        key_of(toolchain, BuildTarget(("pytorch",), "none", 2)),
    ]
    keys += [key_of(toolchain, CXXFLAGS="-O1"), key_of(toolchain, HOROVOD_WITH_GLOO="1")]
    assert len(set(keys)) == len(keys)


def test_equal_binaries_have_equal_keys(toolchain: Toolchain) -> None:
    moved = dataclasses.replace(
        toolchain,
        prefix=Path("/elsewhere"),
        python=Path("/elsewhere/bin/python"),
        mpi=dataclasses.replace(toolchain.mpi, libraries=(Path("/elsewhere/lib"),)),  # type: ignore[type-var]
    )
    assert key_of(moved) == key_of(toolchain)
    assert key_of(toolchain, HOROVOD_CYCLE_TIME="0.1", LANG="C") == key_of(toolchain)
    assert key_of(toolchain, BuildTarget(BOTH.frameworks, "none", 9)) == key_of(toolchain)
    # CUDA is not used by the binary
    cuda = dataclasses.replace(toolchain, cuda=Cuda(Path("/opt/cuda"), "12.0"))
    assert key_of(cuda) == key_of(toolchain)


def test_a_stored_wheel_is_found_unless_it_was_changed(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path / "cache")
    built = tmp_path / "horovod-0.28.1-cp311.whl"
    built.write_bytes(b"wheel")
    assert cache.find("k") is None
    stored = cache.store("k", built, {"torch": "2.13.0"})
    assert cache.find("k") == stored
    assert stored.sha256 == hashlib.sha256(b"wheel").hexdigest()
    assert sorted(p.name for p in stored.path.parent.iterdir()) == ["build.json", built.name]
    stored.path.write_bytes(b"whee")
    assert cache.find("k") is None
    assert stored.proof_file(Path("/a")) != stored.proof_file(Path("/b"))


@pytest.mark.parametrize(
    ("code", "need"), [(errno.ENOSPC, "with 2 GB free"), (errno.EACCES, "that is writable")]
)
def test_free_space_is_advised_only_if_it_helps(code: int, need: str, tmp_path: Path) -> None:
    message = rf"^{tmp_path}: .*; set HVDTRAIN_CACHE to a directory {need}$"
    with pytest.raises(HvdtrainError, match=message), WheelCache(tmp_path).errors():
        raise OSError(code, os.strerror(code))


def test_an_archive_with_another_hash_is_ignored(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path)
    cache.archive.parent.mkdir(parents=True)
    cache.archive.write_bytes(b"something else")
    assert not cache.has_archive()


def hold(root: Path, held: "multiprocessing.synchronize.Event") -> None:  # type: ignore[name-defined] # noqa: UP037
    with WheelCache(root).lock("k", "waits"):
        held.set()
        time.sleep(60)


def test_a_lock_is_released_when_its_process_ends(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    holder = context.Process(target=hold, args=(tmp_path, held))
    holder.start()
    assert held.wait(30)
    entered = threading.Event()

    def wait() -> None:
        with WheelCache(tmp_path).lock("k", "waits"):
            entered.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert not entered.wait(0.3)
    holder.kill()
    assert entered.wait(10)
    waiter.join(10)
    holder.join(10)


def test_an_unwritable_cache_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = WheelCache(tmp_path / "file")
    with pytest.raises(HvdtrainError, match="HVDTRAIN_CACHE"), cache.lock("k", "waits"):
        pass
    with pytest.raises(HvdtrainError, match="HVDTRAIN_CACHE"):  # before a build begins
        cache.log_file("k")


def fake_horovod(site: Path, text: str, wheel_sha: str = "abc") -> None:
    """Create the files of an installed Horovod, as pip does."""
    meta = site / "horovod-0.28.1.dist-info"
    meta.mkdir(parents=True, exist_ok=True)
    (site / "horovod").mkdir(exist_ok=True)
    (site / "horovod" / "lib.so").write_text(text)
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    info = {"url": "file:///w.whl", "archive_info": {"hashes": {"sha256": wheel_sha}}}
    (meta / "direct_url.json").write_text(json.dumps(info))
    record = f"horovod/lib.so,sha256=x,{len(text)}\n"
    names = ("METADATA", "direct_url.json", "RECORD")
    (meta / "RECORD").write_text(record + "".join(f"{meta.name}/{n},,\n" for n in names))


def test_an_installed_wheel_is_identified_by_its_hash(tmp_path: Path) -> None:
    assert wheel_cache.find_installed(tmp_path) is None
    assert wheel_cache.wheel_hash(None) is None
    fake_horovod(tmp_path, "lib", "abc")
    distribution = wheel_cache.find_installed(tmp_path)
    assert wheel_cache.wheel_hash(distribution) == "abc"
    assert wheel_cache.is_complete(distribution)
    (tmp_path / "horovod" / "lib.so").write_text("cut")
    assert wheel_cache.is_complete(wheel_cache.find_installed(tmp_path))
    (tmp_path / "horovod" / "lib.so").write_text("x")
    assert not wheel_cache.is_complete(wheel_cache.find_installed(tmp_path))


def test_pip_removes_the_repair_of_torchvision_with_horovod(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    site = tmp_path / "env" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    info = site / "horovod-0.28.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    (info / "INSTALLER").write_text("pip\n")
    names = [f"{info.name}/{name}" for name in ("METADATA", "INSTALLER", "RECORD")]
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    (site / "other.py").touch()
    for _ in range(2):  # idempotent
        wheel_cache.mend_torchvision(site)
    assert wheel_cache.is_complete(wheel_cache.find_installed(site))
    assert len((info / "RECORD").read_text().splitlines()) == 5
    query = (
        "import sys; print([n for n in sys.modules if n.split('_')[0] in ('hvdtrain', 'torch')])"
    )
    result = subprocess.run([python, "-c", query], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("['hvdtrain_torchvision']\n", "")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "uninstall", "-yq", "horovod"]
    subprocess.run(pip, check=True, timeout=60)
    assert {path.name for path in site.iterdir()} - {"__pycache__"} == {"other.py"}
    result = subprocess.run([python, "-c", query], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")
