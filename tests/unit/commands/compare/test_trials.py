"""The order of the runs, what of them is missing, and what is said of those that fail."""

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
    missing,
    order,
    read_trials,
    why_no_result,
)
from hvdtrain.commands.runs import lines
from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.command import Command, Result
from tests.unit.commands.compare.trials import DDP, SINGLE, WORDS, trial, without


def plan(folder: Path, *, repeats: int = 2, batch: int = 64) -> Comparison:
    return Comparison(WORDS, (SINGLE, DDP), batch, repeats, folder, "a machine", threads=1)


def test_the_methods_come_in_turn() -> None:
    assert list(order("ABC", 2)) == [(m, r) for r in (1, 2) for m in "ABC"]  # type: ignore[arg-type]


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    for one in (trial(SINGLE), without(DDP, "no MPI"), trial(SINGLE, 2)):
        lines.append(tmp_path / LINES, one.to_json(), trials._trial)
    assert read_trials(tmp_path)[0] == trial(SINGLE)
    assert missing(plan(tmp_path)) == [(DDP, 1), (DDP, 2)]  # MPI may be there by now
    assert missing(plan(tmp_path, repeats=3))[-2:] == [(SINGLE, 3), (DDP, 3)]
    with (tmp_path / LINES).open("a") as file:
        file.write('{"method": ')  # a crash
    assert len(read_trials(tmp_path)) == 3
    with pytest.raises(UsageError, match="holds runs of another global batch: 64, now 32"):
        missing(plan(tmp_path, batch=32))


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
def test_a_line_that_is_no_run(change: dict[str, object], tmp_path: Path) -> None:
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
        (124, "", "took too long", True),
        (1, "torch.OutOfMemoryError: CUDA out of memory.", "global batch of 64 does not", False),
        (1, "hvdtrain: ResourceExhaustedError: OOM", "global batch of 64 does not", False),
    ],
)
def test_why_a_run_left_nothing(code: int, output: str, reason: str, failed: bool) -> None:
    found = why_no_result(Result(Command(("mpirun",)), code, output), 64)
    assert found[0].startswith(reason) or reason in found[0]
    assert found[1] is failed


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
        (["--repeat", "2"], "what should be run? Give it after --"),
        (["--", "python", "-m", "hvdtrain.mnist", "--summary=x"], "--summary in the command"),
        (["--", "python", "-m", "hvdtrain.mnist", "--foo"], "--foo: no such option"),
        (
            ["--", "python", "-m", "hvdtrain.mnist", "--strategy", "ddp"],
            "--strategy ddp in the command: each run has another; say which by hvdtrain compare "
            "--strategies ddp,single -- ...",
        ),
    ],
)
def test_wrong_use(words: list[str], message: str, refused: Callable[..., str]) -> None:
    assert message in refused("compare", *words)
