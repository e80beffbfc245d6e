"""Tuning at start-up: what is set, and that what the user has set stays."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hvdtrain.launch.detect import ALONE, Place
from hvdtrain.launch.tuning import keep_freed_memory, runtime_variables, set_defaults

TWO = Place("mpirun (Open MPI)", 1, 2, 1, 2)


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDTRAIN_TEST_SET", "mine")
    monkeypatch.setenv("HVDTRAIN_TEST_EMPTY", "")
    monkeypatch.setenv("HVDTRAIN_TEST_UNSET", "")  # so that it is taken away at the end
    monkeypatch.delenv("HVDTRAIN_TEST_UNSET")
    names = ("HVDTRAIN_TEST_SET", "HVDTRAIN_TEST_EMPTY", "HVDTRAIN_TEST_UNSET")
    set_defaults(dict.fromkeys(names, "ours"))
    assert [os.environ[name] for name in names] == ["mine", "", "ours"]


@pytest.mark.parametrize("short_steps", [True, False])
def test_alone_nothing_is_set(short_steps: bool) -> None:
    assert runtime_variables(ALONE, short_steps=short_steps) == {}


def test_several_ranks_yield_and_do_not_fuse() -> None:
    variables = runtime_variables(TWO, short_steps=False)
    assert variables["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert variables["HOROVOD_FUSION_THRESHOLD"] == "0"
    assert "HOROVOD_CYCLE_TIME" not in variables


def test_short_steps_look_for_work_more_often() -> None:
    assert runtime_variables(TWO, short_steps=True)["HOROVOD_CYCLE_TIME"] == "0.1"


def test_all_ranks_are_told_the_same() -> None:
    first = Place("mpirun (Open MPI)", 0, 2, 0, 2)
    for short_steps in (True, False):
        assert runtime_variables(first, short_steps=short_steps) == runtime_variables(
            TWO, short_steps=short_steps
        )


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_CONF", "LD_PRELOAD"])
def test_a_malloc_that_the_user_has_tuned_is_left_alone(name: str) -> None:
    assert keep_freed_memory({name: "1"}) is False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_freed_memory_is_kept() -> None:
    """In a process of its own: freeing 64 MB gives nothing back to the kernel."""
    program = """
import ctypes
from pathlib import Path
from hvdtrain.launch.tuning import keep_freed_memory
assert keep_freed_memory({})
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
before = resident()
block = libc.malloc(ctypes.c_size_t(64_000_000))
ctypes.memset(block, 1, 64_000_000)
libc.free(block)
print(resident() - before)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(result.stdout) > 60_000_000
