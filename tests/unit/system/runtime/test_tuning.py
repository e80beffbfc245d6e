"""Tuning at start-up: what is set, and that what the user has set stays."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hvdtrain.system.runtime.tuning import keep_freed_memory, set_defaults


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDTRAIN_TEST_SET", "mine")
    monkeypatch.setenv("HVDTRAIN_TEST_EMPTY", "")
    monkeypatch.setenv("HVDTRAIN_TEST_UNSET", "")  # so that it is taken away at the end
    monkeypatch.delenv("HVDTRAIN_TEST_UNSET")
    names = ("HVDTRAIN_TEST_SET", "HVDTRAIN_TEST_EMPTY", "HVDTRAIN_TEST_UNSET")
    set_defaults(dict.fromkeys(names, "ours"))
    assert [os.environ[name] for name in names] == ["mine", "", "ours"]


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_CONF", "LD_PRELOAD"])
def test_a_malloc_that_the_user_has_tuned_is_left_alone(name: str) -> None:
    assert keep_freed_memory({name: "1"}) is False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_freed_memory_is_kept() -> None:
    """In a process of its own: freeing 64 MB gives nothing back to the kernel."""
    program = """
import ctypes
from pathlib import Path
from hvdtrain.system.runtime.tuning import keep_freed_memory
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
