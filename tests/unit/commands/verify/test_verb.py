"""The options of ``hvdtrain verify``, and its rows as a table and as data."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.commands.verify import verb as verify
from hvdtrain.commands.verify.rows import (
    FAILED,
    NOT_SEEN,
    OK,
    STEPS,
    StepRow,
    by_rank,
    number,
    read_row,
    row,
    show,
)
from hvdtrain.errors import UsageError

MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
# Set in the shell of `srun --pty`, as in the only rank of a step.
STEP_SHELL = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}


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
    assert verify.rank_count(4, STEP_SHELL) == 4
    assert verify.rank_count(4, {**STEP_SHELL, "PMI_RANK": "0", "PMI_SIZE": "1"}) == 4
    assert verify.rank_count(1, STEP_SHELL) is None
    assert verify.rank_count(None, STEP_SHELL) is None
    step = {**STEP_SHELL, "SLURM_STEP_NUM_TASKS": "4"}
    single = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    for environ, ranks in ((step, 4), ({**STEP_SHELL, **single}, 1)):
        with pytest.raises(UsageError, match=f"-n 2: .* started {ranks} ranks"):
            verify.rank_count(2, environ)


def test_script_is_refused_on_ranks_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    for name, value in MPIRUN.items():
        monkeypatch.setenv(name, value)
    assert "-n N" in refused("verify", "--script", __file__)


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_script_is_started_from_a_shell_of_a_slurm_job(
    ranks: str,
    monkeypatch: pytest.MonkeyPatch,
    refused: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in STEP_SHELL.items():
        monkeypatch.setenv(name, value)
    assert "-n N" in refused("verify", "--script", __file__)  # it may be a rank
    assert cli.main(["verify", "-n", ranks, "--dry-run", "--script", __file__]) == 0
    assert f" -n {ranks} " in capsys.readouterr().out


def test_dry_run_of_a_single_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--framework", "tensorflow", "--dry-run"]) == 0
    assert capsys.readouterr().out == (
        f"{sys.executable} -m hvdtrain.commands.verify.ranks --framework tensorflow "
        "--steps 1,2,3,4,5,6,7,8\n"
    )


def test_the_report() -> None:
    rows = [StepRow(1, OK, "here", {"hosts": 2, "strategy": "ddp"}), StepRow(2, FAILED, "shared")]
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
    report = verify.report([StepRow(step, OK, "") for step in range(1, 9)], "pytorch", None, 1)
    assert report.exit_code == 0
    assert report.text.splitlines()[-1].endswith("hvdtrain verify -n 2")


def test_the_table_keeps_its_columns_in_a_file() -> None:
    rows = [
        StepRow(1, OK, "ranks 0, 1 once each [2 on node]"),
        StepRow(5, FAILED, "x" * 200),
        StepRow(8, NOT_SEEN, "no metric"),
    ]
    margin = " " * 38
    assert show("headline", rows).splitlines() == [
        "headline",
        "ok        1 one world                 ranks 0, 1 once each [2 on node]",
        "failed    5 mean gradient             " + "x" * 200,
        f"{margin}-> let every rank reduce its gradients before each update,",
        f"{margin}weighted by its samples",
        "not seen  8 metrics over all samples  no metric",
    ]


def test_a_row_is_restored_from_its_data() -> None:
    failed = row(3, False, "7 of 9 on no rank", samples=9)
    data = failed.data()
    assert data == {
        "step": 3,
        "name": "shard_data",
        "title": "disjoint shards",
        "state": "failed",
        "evidence": "7 of 9 on no rank",
        "remedy": STEPS[2].remedy,
        "facts": {"samples": 9},
    }
    assert read_row(data) == failed
    assert row(3, True, "").remedy == ""
    assert all(step.remedy for step in STEPS)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (3.1e-17, "3e-17"), (0.25, "0.2"), (float("nan"), "nan")]
)
def test_a_difference_as_text(value: float, text: str) -> None:
    assert number(value) == text


def test_values_by_rank() -> None:
    assert by_rank([1, 3, 5]) == "1 + 3 + 5"
    assert by_rank([1, 3, 5, 7, 9]) == "1 to 9 per rank"
