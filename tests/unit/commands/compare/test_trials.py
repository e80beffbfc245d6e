"""The order of the runs, the missing runs, and the reasons for failed runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.commands.compare import trials
from hvdtrain.commands.compare.trials import (
    LINES,
    Comparison,
    classify_failure,
    missing_runs,
    read_trials,
    run_order,
)
from hvdtrain.commands.runs import json_lines
from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.command import Command, Result
from tests.unit.commands.compare.trials import DDP, SINGLE, WORDS, trial, unavailable_trial


def plan(folder: Path, *, repeats: int = 2, batch: int = 64) -> Comparison:
    return Comparison(WORDS, (SINGLE, DDP), batch, repeats, folder, "a machine", threads=1)


def test_the_methods_come_in_turn() -> None:
    order = list(run_order("ABC", 2))  # type: ignore[arg-type]
    assert order == [(method, repeat) for repeat in (1, 2) for method in "ABC"]


def test_complete_runs_are_not_repeated(tmp_path: Path) -> None:
    for record in (trial(SINGLE), unavailable_trial(DDP, "no MPI"), trial(SINGLE, 2)):
        json_lines.append(tmp_path / LINES, record.to_json(), trials._trial)
    assert read_trials(tmp_path)[0] == trial(SINGLE)
    assert missing_runs(plan(tmp_path)) == [(DDP, 1), (DDP, 2)]  # MPI may be available now
    assert missing_runs(plan(tmp_path, repeats=3))[-2:] == [(SINGLE, 3), (DDP, 3)]
    with (tmp_path / LINES).open("a") as file:
        file.write('{"method": ')  # a crash
    assert len(read_trials(tmp_path)) == 3
    with pytest.raises(UsageError, match="has runs of another global batch: 64, now 32"):
        missing_runs(plan(tmp_path, batch=32))


@pytest.mark.parametrize(
    "change",
    [
        {"method": {"strategy": "ddp"}},
        {"method": {**vars(DDP), "ranks": "2"}},
        {"summary": {"images_per_second_mean": 0}},
        {"summary": []},
        {"other": 1},
        {"command": 3},
    ],
)
def test_an_invalid_line_is_reported(change: dict[str, object], tmp_path: Path) -> None:
    line = json.dumps({**trial(DDP).to_json(), **change})
    (tmp_path / LINES).write_text(f"{line}\n")
    with pytest.raises(UsageError, match=r"compare.jsonl, line 1: not a run of a comparison"):
        read_trials(tmp_path)


@pytest.mark.parametrize(
    ("code", "output", "reason", "failed"),
    [
        (
            2,
            "hello\nhvdtrain: --precision fp16 needs a GPU\n--\nmpirun\n",
            "--precision fp16",
            False,
        ),
        (1, "hvdtrain: rank 1 on a: error: no luck\n", "no luck", True),
        (1, "Traceback\n", "exit code 1", True),
        (124, "", "timed out", True),
        (1, "torch.OutOfMemoryError: CUDA out of memory.", "global batch of 64 does not", False),
        (1, "hvdtrain: ResourceExhaustedError: OOM", "global batch of 64 does not", False),
    ],
)
def test_failed_runs_are_classified(code: int, output: str, reason: str, failed: bool) -> None:
    text, is_failure = classify_failure(Result(Command(("mpirun",)), code, output), 64)
    assert reason in text
    assert is_failure is failed


def test_dry_run_shows_the_command_of_each_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("hvdtrain.commands.compare.methods.is_installed", lambda name: True)
    words = ("--strategies", "single,mpi", "--repeat", "2", "--dry-run", "--out", str(tmp_path))
    command = ("python", "-m", "hvdtrain.mnist", "--compression", "none", "--batch-size", "8")
    assert cli.main(["compare", *words, "--", *command]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.partition("--summary=")[2].split()[0] for line in shown] == [
        f"{tmp_path}/runs/{name}.json"
        for name in (
            "single-pytorch-n1-1",
            "mpi-pytorch-n2-1",
            "single-pytorch-n1-2",
            "mpi-pytorch-n2-2",
        )
    ]
    assert " -n 1 " in shown[0] and " -n 2 " in shown[1]
    assert all("--global-batch-size 16" in line for line in shown)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeat", "2"], "missing command"),
        (["--", "python", "-m", "hvdtrain.mnist", "--summary=x"], "--summary in the command"),
        (["--", "python", "-m", "hvdtrain.mnist", "--foo"], "--foo: no such option"),
        (
            ["--", "python", "-m", "hvdtrain.mnist", "--strategy", "ddp"],
            "--strategies ddp,single -- ...",
        ),
    ],
)
def test_wrong_use_is_reported(words: list[str], message: str, refused: Callable[..., str]) -> None:
    assert message in refused("compare", *words)
