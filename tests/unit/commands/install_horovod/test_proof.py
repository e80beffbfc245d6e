"""The command of the proof and its result."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hvdtrain.commands.install_horovod.proof import proof_command, prove, read_proof
from hvdtrain.errors import HvdtrainError
from hvdtrain.system.machine.toolchain import Toolchain
from hvdtrain.system.runtime.command import Command


def test_proof_command(toolchain: Toolchain) -> None:
    assert toolchain.mpi
    environ = {"HOROVOD_TIMELINE": "x", "PATH": "/bin"}
    command = proof_command("pytorch", toolchain.mpi, Path("/py"), Path("/aside"), "none", environ)
    assert command.argv[:4] == (str(toolchain.mpi.mpirun), "-n", "2", "--oversubscribe")
    assert command.argv[4:6] == ("/py", "-P")
    assert command.argv[-3:] == ("pytorch", "2", "/aside")
    assert command.env == {
        "HOROVOD_TIMELINE": None,
        "CUDA_VISIBLE_DEVICES": "",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    mpich = dataclasses.replace(toolchain.mpi, identity="MPICH 4.2")
    command = proof_command("pytorch", mpich, Path("/py"), Path("/aside"), "nccl", {})
    assert "--oversubscribe" not in command.argv
    assert command.env == {}


def test_read_proof() -> None:
    answer = {"ok": True, "size": 2, "max_error": 0.0, "device": "cpu"}
    assert read_proof(f"a warning\n{{broken\n{json.dumps(answer)}\n") == answer
    assert read_proof("nothing") == {}


@pytest.mark.parametrize(
    "script",
    [
        "exit 3",  # the ranks fail
        "true",  # they end without a result
        """echo '{"ok": false, "size": 1, "max_error": 0.0}'""",  # two separate trainings
    ],
)
def test_a_failed_proof_is_an_error_with_its_log(script: str, tmp_path: Path) -> None:
    with pytest.raises(HvdtrainError, match=r"proof for pytorch failed.*log: "):
        prove([("pytorch", Command(("sh", "-c", script)))], tmp_path / "log")
    assert "$ sh -c" in (tmp_path / "log").read_text()


def test_a_successful_proof_returns_the_result(tmp_path: Path) -> None:
    command = Command(("echo", '{"ok": true, "size": 2, "max_error": 0.0, "device": "cpu"}'))
    answers = prove([("pytorch", command)], tmp_path / "log")
    assert answers["pytorch"]["size"] == 2
