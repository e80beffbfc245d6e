"""Other hosts, with a script as ssh: which of them answer, and their environment."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hvdtrain.commands.launch.remote import Reachable
from tests.conftest import BIN, run

SOON = 30.0  # seconds


def put(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def test_a_host_is_excluded_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path / "ssh", f'[ -e {tmp_path}/$3 ] || {{ echo "no route to $3"; exit 255; }}')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    caplog.set_level("INFO", logger="hvdtrain")
    (tmp_path / "node1").touch()
    reachable = Reachable(pause=0.01)
    hosts = ("node1", "node2", "localhost")
    assert reachable.among(hosts) == {"node1", "localhost"}
    (tmp_path / "node2").touch()
    end = time.monotonic() + SOON
    while reachable.among(hosts) != set(hosts) and time.monotonic() < end:
        time.sleep(0.01)
    (tmp_path / "node1").unlink()
    reachable.doubt("node1")
    reachable.doubt("node1")  # by each of its ranks
    assert reachable.among(hosts) == {"node2", "localhost"}
    messages = [record.getMessage() for record in caplog.records]
    assert "node2 is excluded" in messages[0]
    assert "no route to node2" in messages[0]
    assert "node2 answers" in messages[1]


def test_the_end_of_the_job_is_exported_to_all_hosts(tmp_path: Path) -> None:
    put(tmp_path / "ssh", f'echo "$3" >> {tmp_path}/$2')
    put(tmp_path / "qstat", 'echo " Resource_List.walltime = 01:00:00"')
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    line = ["launch", "-n", "2", "--hosts=a,b", "--launcher=torchrun", "--", "true"]
    outcome = run([str(BIN / "hvdtrain"), *line], PATH=path, PBS_JOBID="7.server")
    assert outcome.code == 0, outcome.err
    for host in "ab":
        assert " HVDTRAIN_WALLTIME_ENDS=" in (tmp_path / host).read_text()
