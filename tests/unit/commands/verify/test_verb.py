"""The options of ``hvdtrain verify``: number of ranks, wrong use, dry run, report."""

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


def test_number_of_ranks(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("a\na\nb\nb\nb\n")
    job = {"PBS_NODEFILE": str(nodes)}
    assert verify.rank_count(None, {}) is None
    assert verify.rank_count(3, {}) == 3
    assert verify.rank_count(None, job) == 5
    assert verify.rank_count(2, job) == 2
    assert verify.rank_count(None, {**job, **MPIRUN}) is None
    assert verify.rank_count(4, MPIRUN) is None
    with pytest.raises(UsageError, match=r"-n 2: mpirun .* 4 ranks"):
        verify.rank_count(2, MPIRUN)
    with pytest.raises(UsageError, match="-n 0: "):
        verify.rank_count(0, {})


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["--", "--epochs", "1"], "--epochs: "),
        (["--updates", "3"], "--updates: requires --script"),
        (["-n", "2", "--strategy", "pipeline"], "--strategy pipeline: "),
        (["--timeout", "0"], "--timeout 0: "),
        (["--script", "absent.py"], "--script absent.py: no such file"),
        (["--script", __file__, "--updates", "0"], "--updates 0: "),
        (["--script", __file__, "--updates", "some"], "--updates some: "),
    ],
)
def test_wrong_use(words: list[str], start: str, refused: Callable[..., str]) -> None:
    assert start in refused("verify", *words)


def test_script_is_refused_on_ranks_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    for name, value in MPIRUN.items():
        monkeypatch.setenv(name, value)
    assert "-n N" in refused("verify", "--script", __file__)


def test_dry_run_of_a_single_rank(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_single_rank_suggests_more_ranks() -> None:
    report = verify.report([Row(step, OK, "") for step in range(1, 9)], "pytorch", None, 1)
    assert report.exit_code == 0
    assert report.text.splitlines()[-1].endswith("hvdtrain verify -n 2")
