"""The options of ``hvdtrain verify``: how many ranks, what is refused, what would be started."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.commands.verify import verb as verify
from hvdtrain.commands.verify.rows import FAILED, OK, Row
from hvdtrain.errors import UsageError

MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}


def test_how_many(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("a\na\nb\nb\nb\n")
    job = {"PBS_NODEFILE": str(nodes)}
    assert verify.how_many(None, {}) is None
    assert verify.how_many(3, {}) == 3
    assert verify.how_many(None, job) == 5
    assert verify.how_many(2, job) == 2
    assert verify.how_many(None, {**job, **MPIRUN}) is None
    assert verify.how_many(4, MPIRUN) is None
    with pytest.raises(UsageError, match=r"-n 2: mpirun .* has started 4 ranks already"):
        verify.how_many(2, MPIRUN)
    with pytest.raises(UsageError, match="-n 0: give a number of at least 1"):
        verify.how_many(0, {})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "--epochs", "1"], "--epochs: arguments belong to a --script"),
        (["--updates", "3"], "--updates counts those of a --script: name one"),
        (["-n", "2", "--strategy", "pipeline"], "--strategy pipeline cannot be verified: a rank"),
        (["--timeout", "0"], "--timeout 0: give a number of seconds above 0"),
        (["--script", "absent.py"], "--script absent.py: no such file"),
        (["--script", __file__, "--updates", "0"], "--updates 0: give a number of at least 1"),
        (["--script", __file__, "--updates", "some"], "--updates some: give a number"),
    ],
)
def test_wrong_use(words: list[str], message: str, refused: Callable[..., str]) -> None:
    assert message in refused("verify", *words)


def test_a_script_is_not_watched_by_ranks_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    for name, value in MPIRUN.items():
        monkeypatch.setenv(name, value)
    assert "give -n N instead of starting hvdtrain by mpirun" in refused(
        "verify", "--script", __file__
    )


def test_dry_run_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--framework", "tensorflow", "--dry-run"]) == 0
    assert capsys.readouterr().out == (
        f"{sys.executable} -m hvdtrain.commands.verify.ranks --framework tensorflow "
        "--steps 1,2,3,4,5,6,7,8\n"
    )


def test_the_report() -> None:
    rows = [Row(1, OK, "here", {"hosts": 2, "strategy": "ddp"}), Row(2, FAILED, "shared")]
    report = verify.report(rows, "pytorch", None, 4)
    lines = report.text.splitlines()
    assert lines[0] == "hvdtrain verify: pytorch over ddp, 4 ranks on 2 hosts"
    assert lines[-1] == "1 of 8 steps failed"
    assert "not reached: see step 2" in lines[-2]
    assert report.exit_code == 1
    assert report.data["ok"] is False
    assert [row["state"] for row in report.data["rows"]] == ["ok", "failed"] + ["not seen"] * 6
    json.dumps(report.data)


def test_one_rank_proves_little_and_says_so() -> None:
    report = verify.report([Row(step, OK, "") for step in range(1, 9)], "pytorch", None, 1)
    assert report.exit_code == 0
    assert report.text.splitlines()[-1] == (
        "all steps took effect; between ranks nothing was tried: hvdtrain verify -n 2"
    )
