"""The lock of a checkpoint directory is held by live processes only."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import CheckpointError, UsageError
from hvdtrain.steps import directory_lock as module
from hvdtrain.steps.directory_lock import NAME, DirectoryLock, Owner

HOLD = """
import os, sys, time
from pathlib import Path
from hvdtrain.steps.directory_lock import DirectoryLock
DirectoryLock(Path(sys.argv[1])).take()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield another process that holds the lock of the directory."""
    environ = {**os.environ, "PBS_JOBID": "1234.pbs1"}
    line = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environ)
    assert process.stdout and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_holding_training_is_named(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EXIT_TIMEOUT", 0.0)
    owner = f"job 1234.pbs1, process {holder.pid} of "
    with pytest.raises(UsageError, match=f"--checkpoint-dir {tmp_path} is in use .*{owner}"):
        DirectoryLock(tmp_path).take()
    assert json.loads((tmp_path / NAME).read_text())["pid"] == holder.pid


def test_a_killed_owner_loses_it_at_once(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()  # not waited for: a zombie is no owner
    lock = DirectoryLock(tmp_path)
    lock.take()
    lock.check()
    assert names(tmp_path) == [NAME]
    lock.release()


def elsewhere(folder: Path, **changes: Any) -> Owner:
    """Write a lock of an owner on another host."""
    owner = replace(Owner.this_process(), host="node7", machine="another", job="", **changes)
    (folder / NAME).write_text(json.dumps(asdict(owner)))
    return owner


def test_an_owner_on_another_host_is_alive_while_it_touches_the_lock(tmp_path: Path) -> None:
    far = DirectoryLock(tmp_path, elsewhere(tmp_path))
    taker = DirectoryLock(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "POLL_INTERVAL", 0.0)
        patch.setattr(module, "BEAT", 0.01)
        beat = module.threading.Thread(target=far._beat, daemon=True)
        beat.start()
        with pytest.raises(UsageError, match="on node7"):
            taker.take()
        far._over.set()
        beat.join()
    os.utime(tmp_path / NAME, (1.0, 1.0))  # it was touched long ago
    taker.take()
    with pytest.raises(CheckpointError, match="was taken over"):
        far.check()
    far.release()  # no longer held by it
    taker.check()
    taker.release()
    assert names(tmp_path) == []


@pytest.mark.parametrize("content", ["", '{"pid": 3', "host"])
def test_an_untouched_lock_of_another_or_no_owner_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setattr(module, "SILENCE", 0.1)
    if content == "host":
        elsewhere(tmp_path)
    else:
        (tmp_path / NAME).write_text(content)
    lock = DirectoryLock(tmp_path)
    lock.take()
    lock.release()
    assert names(tmp_path) == []


def test_a_lock_taken_over_by_another_process_is_not_removed(tmp_path: Path) -> None:
    """Two processes detect the same dead owner; the slower one must not remove the new lock."""
    quicker = elsewhere(tmp_path, token="quicker")
    DirectoryLock(tmp_path)._remove(replace(quicker, token="dead"))
    assert json.loads((tmp_path / NAME).read_text())["token"] == "quicker"
    assert names(tmp_path) == [NAME]


def test_a_removed_lock_or_directory_is_created_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock = DirectoryLock(tmp_path / "ck")
    (tmp_path / "ck").mkdir()
    lock.take()
    lock.check()
    assert not caplog.messages
    shutil.rmtree(tmp_path / "ck")
    for _ in range(2):
        lock.check()
        assert names(tmp_path / "ck") == [NAME]
    lock.path.unlink()
    lock.check()
    assert names(tmp_path / "ck") == [NAME]
    lock.check()
    start = f"the lock of the checkpoint directory {tmp_path}/ck is missing"
    assert [message.startswith(start) for message in caplog.messages] == [True, True]
    lock.release()
