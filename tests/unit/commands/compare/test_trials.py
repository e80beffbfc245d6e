"""The runs of a comparison: the missing ones, and their records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.commands.compare.methods import CompareOptions
from hvdtrain.commands.compare.trials import LINES, Comparison, read_trials
from hvdtrain.commands.study.engine import HostShare
from hvdtrain.commands.study.run import RunOutcome, append_record
from hvdtrain.errors import UsageError
from tests.studies import DDP, SINGLE, WORDS, trial, unavailable_trial


def comparison(folder: Path, *, repeats: int = 2, batch: int = 64) -> Comparison:
    options = CompareOptions(repeat=repeats, out=folder)
    return Comparison(options, WORDS, HostShare("a machine", 4, 1, 2), (SINGLE, DDP), batch)


def missing(plan: Comparison) -> list[tuple[str, int]]:
    return [(variant.name, repeat) for variant, repeat in plan.missing()]


def test_complete_runs_are_not_repeated(tmp_path: Path) -> None:
    for record in (trial(SINGLE), unavailable_trial(DDP, "no MPI"), trial(SINGLE, 2)):
        append_record(tmp_path / LINES, record)
    assert read_trials(tmp_path)[0] == trial(SINGLE)
    # MPI may be available now.
    assert missing(comparison(tmp_path)) == [(DDP.name, 1), (DDP.name, 2)]
    assert missing(comparison(tmp_path, repeats=3))[-2:] == [(SINGLE.name, 3), (DDP.name, 3)]
    with (tmp_path / LINES).open("a") as file:
        file.write('{"method": ')  # a crash
    assert len(read_trials(tmp_path)) == 3
    with pytest.raises(UsageError, match=r"has runs of another global batch: 64 .* now 32"):
        missing(comparison(tmp_path, batch=32))
    with pytest.raises(UsageError, match="has runs of another command: --lr was not set, now 1"):
        missing(replace(comparison(tmp_path), words=(*WORDS, "--lr=1")))


def test_methods_of_the_same_files_are_rejected(tmp_path: Path) -> None:
    """Spellings of one option, or ``1e-3`` and ``1e+3``."""
    first, second = (replace(DDP, options=f"--lr{separator}1") for separator in " =")
    plan = comparison(tmp_path)
    with pytest.raises(UsageError, match="'ddp --lr 1': the names of its files are those of"):
        replace(plan, methods=(SINGLE, first, second)).missing()
    append_record(tmp_path / LINES, trial(first))
    with pytest.raises(UsageError, match=r"'ddp --lr=1': .* 'ddp --lr 1'; .* or use another --out"):
        replace(plan, methods=(second,)).missing()
    assert missing(replace(plan, methods=(first,))) == [(first.name, 2)]


def test_each_outcome_is_recorded(tmp_path: Path) -> None:
    plan = comparison(tmp_path)
    single, ddp = plan.variants
    plan.record(single, 1, RunOutcome(trial(SINGLE).summary))
    plan.record(ddp, 1, RunOutcome(reason="exit code 9", failed=True))
    failed = unavailable_trial(DDP, "exit code 9", failed=True)
    assert read_trials(tmp_path) == [trial(SINGLE), failed]
    plan.record(ddp, 2, RunOutcome(reason="--foo: no such option", invalid=True))
    with pytest.raises(UsageError, match="cannot be run, even in a single process: --foo"):
        plan.record(single, 2, RunOutcome(reason="--foo", invalid=True))
    assert len(read_trials(tmp_path)) == 3


def test_dry_run_shows_the_command_of_each_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("hvdtrain.commands.compare.methods.is_installed", lambda name: True)
    words = ("--strategies", "single,mpi", "--repeat", "2", "--dry-run", "--out", str(tmp_path))
    command = ("python", "-m", "hvdtrain.mnist", "--batch-size", "8")
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
