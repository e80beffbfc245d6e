"""Leftovers of killed jobs are removed at the next start, but empty that is in use."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.system.runtime.scratch import FIRST_NAMESPACE, LOCK, clear_leftovers

RANK = """
import signal, tempfile
from hvdtrain.system.runtime import scratch
scratch.use_scratch_directory()
print(tempfile.gettempdir(), scratch._clearing[0].pid, flush=True)
signal.pause()
"""
SEES_ALL = str(Path("/proc/self/ns/pid").readlink()) == FIRST_NAMESPACE


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Yield a directory for temporary files with a short name, as needed for sockets."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)  # the shell of a rank may remove it, too


def test_the_directory_of_a_killed_rank_is_removed_and_that_of_a_live_one_kept(
    temporary: Path,
) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env={**os.environ, "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    folders = []
    for rank in ranks:
        assert rank.stdout
        folder, shell = rank.stdout.readline().split()
        folders.append(Path(folder))
        if rank is ranks[0]:
            os.kill(int(shell), signal.SIGKILL)  # as when a batch system kills all processes
            rank.kill()
            rank.wait()
    foreign = temporary / "hvdtrain-abcdefgh"  # of an unknown owner
    foreign.mkdir()
    empty = temporary / "shm"
    clear_leftovers(temporary, empty)
    assert {*temporary.iterdir()} == {*folders, foreign}  # they are new
    clear_leftovers(temporary, empty, new=0)
    assert {*temporary.iterdir()} == {folders[1], foreign}
    assert (folders[1] / LOCK).exists()
    ranks[1].kill()
    for rank in ranks:
        rank.communicate()


def test_leftovers_of_open_mpi_are_removed_unless_in_use(tmp_path: Path) -> None:
    host = socket.gethostname()
    temporary, shared = tmp_path / "tmp", tmp_path / "shm"
    dead = subprocess.Popen(["true"])
    dead.wait()

    def session(pid: int, name: str, where: str = host) -> Path:
        file = temporary / f"ompi.{pid}" / "1" / f"pmix-gds-shmem2.{where}-{name}"
        file.parent.mkdir(parents=True)
        file.write_text("data")
        return file

    def segment(name: str) -> Path:
        shared.mkdir(exist_ok=True)
        file = shared / f"sm_segment.{name}.0"
        file.write_text("data")
        return file

    gone = [session(dead.pid, "prterun"), segment(f"{host}.{os.getuid()}.1a2b0001")]
    # Impossible PIDs represent daemons of other hosts and daemons that have ended.
    used = [session(2**22 + 1, "prterun"), segment(f"{host}.{os.getuid()}.1a2b0002")]
    kept = [
        session(os.getpid(), "prterun"),
        session(2**22 + 2, "prterun", "another"),
        segment(f"another.{os.getuid()}.1a2b0001"),
        segment(f"{host}.{os.getuid() + 1}.1a2b0001"),
    ]
    maps = [mmap.mmap(os.open(file, os.O_RDWR), 4) for file in used]
    clear_leftovers(temporary, shared)
    assert all(file.exists() for file in [*gone, *used, *kept])  # they are new
    clear_leftovers(temporary, shared, new=0)
    assert [file.exists() for file in gone] == [not SEES_ALL] * 2
    assert all(file.exists() for file in [*used, *kept])
    for mapping in maps:
        mapping.close()
    clear_leftovers(temporary, shared, new=0)
    assert [file.exists() for file in used] == [not SEES_ALL] * 2
    assert all(file.exists() for file in kept)
