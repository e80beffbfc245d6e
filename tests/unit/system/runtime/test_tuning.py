"""Tuning at start-up, which keeps the user's settings."""

from __future__ import annotations

import os
import sys

import pytest

from hvdtrain.system.runtime.tuning import keep_freed_memory, set_defaults
from tests.conftest import run


def test_variables_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDTRAIN_TEST_SET", "mine")
    monkeypatch.setenv("HVDTRAIN_TEST_EMPTY", "")
    monkeypatch.setenv("HVDTRAIN_TEST_UNSET", "")  # so that it is removed at the end
    monkeypatch.delenv("HVDTRAIN_TEST_UNSET")
    names = ("HVDTRAIN_TEST_SET", "HVDTRAIN_TEST_EMPTY", "HVDTRAIN_TEST_UNSET")
    set_defaults(dict.fromkeys(names, "ours"))
    assert [os.environ[name] for name in names] == ["mine", "", "ours"]


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_CONF", "LD_PRELOAD"])
def test_a_malloc_tuned_by_the_user_is_not_changed(name: str) -> None:
    assert keep_freed_memory({name: "1"}) is False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_freed_memory_is_kept_until_it_is_released() -> None:
    """In a separate process: 64 MB are freed below a block that stays."""
    program = """
import ctypes
from pathlib import Path
from hvdtrain.system.runtime.tuning import keep_freed_memory, release_freed_memory
assert keep_freed_memory({})
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
before = resident()
block = libc.malloc(ctypes.c_size_t(64_000_000))
ctypes.memset(block, 1, 64_000_000)
libc.malloc(ctypes.c_size_t(100))
libc.free(block)
print(resident() - before)
release_freed_memory()
print(resident() - before)
"""
    kept, released = map(int, run([sys.executable, "-c", program]).out.split())
    assert kept > 60_000_000 and released < 4_000_000, (kept, released)
