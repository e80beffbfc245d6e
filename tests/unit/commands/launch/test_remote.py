"""Commands on other hosts, with a script as ssh."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import pytest

from hvdtrain.commands.launch.remote import on_host
from hvdtrain.system.runtime.command import Command
from hvdtrain.system.runtime.command import run as run_command
from tests.conftest import BIN, executable, run


def program(file: Path, text: str) -> Path:
    return executable(file, f"#!/bin/sh\n{text}\n")


def test_the_remote_shell_passes_all_words_and_variables_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "ssh", 'for last; do :; done; eval "$last"')  # as sshd's shell does
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    words = (f"$(touch {tmp_path}/evil)", "a b", "'", '"; exit 3', "`id`", "*", "\n", "", "-n")
    show = "import os, sys; print([os.environ['HVDTRAIN_X'], *sys.argv[1:]])"
    command = Command((sys.executable, "-c", show, *words), {"HVDTRAIN_X": words[0]})
    done = run_command(on_host("elsewhere", command, {"HVDTRAIN_Y": words[0]}))
    assert (done.exit_code, ast.literal_eval(done.output)) == (0, [words[0], *words])
    assert not (tmp_path / "evil").exists()


def test_the_end_of_the_job_is_exported_to_all_hosts(tmp_path: Path) -> None:
    program(tmp_path / "ssh", f'echo "$3" >> {tmp_path}/$2')
    program(tmp_path / "qstat", 'echo " Resource_List.walltime = 01:00:00"')
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    line = ["launch", "-n", "2", "--hosts=a,b", "--launcher=torchrun", "--", "true"]
    outcome = run([str(BIN / "hvdtrain"), *line], PATH=path, PBS_JOBID="7.server")
    assert outcome.code == 0, outcome.err
    for host in "ab":
        assert " HVDTRAIN_WALLTIME_ENDS=" in (tmp_path / host).read_text()
