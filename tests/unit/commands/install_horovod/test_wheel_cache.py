"""The cache of wheels and its keys."""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing
import threading
import time
from pathlib import Path

import pytest

from hvdtrain.commands.install_horovod.recipe import (
    Target,
)
from hvdtrain.commands.install_horovod.wheel_cache import (
    WheelCache,
    cache_key,
    cache_root,
    identity,
)
from hvdtrain.errors import HvdtrainError
from hvdtrain.system.machine.toolchain import (
    Cuda,
    Toolchain,
)
from tests.unit.commands.install_horovod.machines import BOTH, NCCL, on_gpu


def key_of(found: Toolchain, target: Target = BOTH, **environ: str) -> str:
    return cache_key(identity(target, found, environ))


def test_key_changes_with_all_that_the_binary_depends_on(found: Toolchain) -> None:
    assert found.torch and found.tensorflow and found.mpi and found.compiler
    change = dataclasses.replace
    machines = [
        found,
        change(found, python_tag="cpython-312-x86_64-linux-gnu"),
        change(found, torch=change(found.torch, version="2.12.0+cpu")),
        change(found, torch=change(found.torch, identity="cuda=None commit=def")),
        change(found, tensorflow=change(found.tensorflow, version="2.20.0")),
        change(found, tensorflow=change(found.tensorflow, cuda="12.5.1")),
        change(found, mpi=change(found.mpi, identity="Open MPI 5.0.10")),
        change(found, mpi=change(found.mpi, libraries=(Path("/opt/lib"),))),
        change(found, compiler=change(found.compiler, identity="g++ 13.1.0")),
        change(found, cpu_flags=()),
        on_gpu(found),
    ]
    keys = [key_of(machine) for machine in machines]
    keys += [key_of(on_gpu(found), NCCL), key_of(found, Target(("pytorch",), "none", 2))]
    keys += [key_of(found, CXXFLAGS="-O1"), key_of(found, HOROVOD_WITHOUT_GLOO="1")]
    assert len(set(keys)) == len(keys)


def test_key_is_the_same_where_the_binary_is(found: Toolchain) -> None:
    moved = dataclasses.replace(
        found,
        prefix=Path("/elsewhere"),
        python=Path("/elsewhere/bin/python"),
        mpi=dataclasses.replace(found.mpi, libraries=(Path("/elsewhere/lib"),)),  # type: ignore[type-var]
    )
    assert key_of(moved) == key_of(found)
    assert key_of(found, HOROVOD_CYCLE_TIME="0.1", LANG="C") == key_of(found)
    assert key_of(found, Target(BOTH.frameworks, "none", 9)) == key_of(found)
    # CUDA that the binary does not use
    cuda = dataclasses.replace(found, cuda=Cuda(Path("/opt/cuda"), "12.0"))
    assert key_of(cuda) == key_of(found)


def test_cache_root() -> None:
    assert cache_root({"HVDTRAIN_CACHE": "/c", "XDG_CACHE_HOME": "/x"}) == Path("/c")
    assert cache_root({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/hvdtrain")
    assert cache_root({"HOME": "/h"}) == Path("/h/.cache/hvdtrain")


def test_stored_wheel_is_found_and_a_broken_one_is_not(tmp_path: Path) -> None:
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


def test_free_space_is_advised_where_it_helps(tmp_path: Path) -> None:
    (tmp_path / "wheels").write_text("in the way")
    built = tmp_path / "horovod-0.28.1-cp311.whl"
    built.write_bytes(b"wheel")
    with pytest.raises(HvdtrainError, match="set HVDTRAIN_CACHE to a directory") as failed:
        WheelCache(tmp_path).store("k", built, {})
    assert "free space" not in str(failed.value)


def test_archive_counts_only_with_its_hash(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path)
    cache.archive.parent.mkdir(parents=True)
    cache.archive.write_bytes(b"something else")
    assert not cache.has_archive()


def hold(root: Path, held: "multiprocessing.synchronize.Event") -> None:  # type: ignore[name-defined] # noqa: UP037
    with WheelCache(root).lock("k", "waits"):
        held.set()
        time.sleep(60)


def test_lock_is_waited_for_and_ends_with_its_process(tmp_path: Path) -> None:
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


def test_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = WheelCache(tmp_path / "file")
    with pytest.raises(HvdtrainError, match="HVDTRAIN_CACHE"), cache.lock("k", "waits"):
        pass
