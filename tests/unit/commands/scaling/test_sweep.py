"""Cores, threads and batch of each rank at every size of a sweep; no MPI is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.commands.launch.hosts import Allocation, Host
from hvdtrain.commands.runs import start
from hvdtrain.commands.scaling.sweep import check_words, with_batch
from hvdtrain.errors import UsageError
from hvdtrain.system.machine.limits import physical_cores

FOUR = tuple(Host(name, 4) for name in "ab")
PROGRAM = ("python", "-m", "hvdtrain.mnist")
TRAIN = ("--", "python", "-m", "hvdtrain.resnet", "--num-steps", "50")


@pytest.mark.parametrize(
    ("sizes", "ppn", "hosts", "ranks_per_host"),
    [
        ((1, 2, 4), None, (), 4),
        ((1, 8), 4, FOUR, 4),
        ((1, 2), 4, FOUR, 4),  # as one of several jobs
        ((1, 2), None, FOUR, 2),
        ((1, 8), None, FOUR, 4),
        ((2, 6), None, FOUR, 4),  # the first host is filled, so it has 4 ranks, not 3
    ],
)
def test_the_fullest_host_determines_the_ranks_per_host(
    sizes: tuple[int, ...], ppn: int | None, hosts: tuple[Host, ...], ranks_per_host: int
) -> None:
    assert start.fullest_host(sizes, ppn, Allocation("PBS", hosts)) == ranks_per_host


def test_a_rank_has_the_same_cores_and_threads_at_every_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = physical_cores()
    words = ("--ranks", f"1,{cores}", "--repeat", "1", "--dry-run", "--json", "--out", tmp_path)
    assert cli.main(["scaling", *map(str, words), *TRAIN]) == 0
    single, full = json.loads(capsys.readouterr().out)["commands"]
    assert single.startswith("env OMP_NUM_THREADS=1 ")
    full = full.replace(f" -n {cores} ", " -n 1 ")
    assert single == full.replace(f"/runs/{cores}-1.json", "/runs/1-1.json")


def test_more_ranks_can_be_added_with_the_same_ppn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def shown(ranks: str, *words: str) -> list[str]:
        options = ("--ranks", ranks, "--repeat", "1", "--out", str(tmp_path), *words)
        assert cli.main(["scaling", *options, "--dry-run", "--json", *TRAIN]) == 0
        commands: list[str] = json.loads(capsys.readouterr().out)["commands"]
        return commands

    assert shown("1,2", "--ppn", "4") == shown("1,2,4")[:2] == shown("1,2,4", "--ppn", "4")[:2]


def test_the_sweep_uses_the_threads_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    words = ("--ranks", "1,2", "--repeat", "1", "--dry-run", "--json", "--out", str(tmp_path))
    assert cli.main(["scaling", *words, *TRAIN]) == 0
    for shown in json.loads(capsys.readouterr().out)["commands"]:
        assert shown.startswith("env OMP_NUM_THREADS=3 ")


def test_launch_leaves_room_for_absent_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = str(physical_cores())

    def shown(*words: str) -> str:
        assert cli.main(["launch", *words, "--dry-run", "--", "true"]) == 0
        return capsys.readouterr().out

    full = shown("-n", cores, "--threads", "1")
    assert shown("-n", "1", "--room-for", cores).replace("-n 1 ", f"-n {cores} ") == full
    assert "OMP_NUM_THREADS=3" in shown("-n", "1", "--room-for", cores, "--threads", "3")
    assert shown("-n", cores, "--room-for", "1") == full  # not more than the cores of the host
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in shown("-n", "1", "--room-for", cores)
    assert cli.main(["launch", "-n", "1", "--room-for", "0", "--", "true"]) == 2
    assert "--room-for: 0" in capsys.readouterr().err


def command(folder: Path, text: str, *words: str) -> list[str]:
    file = folder / "options.yaml"
    file.write_text(text)
    return [*PROGRAM, f"--config={file}", *words]


@pytest.mark.parametrize("option", ["summary", "metrics", "checkpoint-dir", "checkpoint_dir"])
def test_options_in_a_file_are_checked(option: str, tmp_path: Path) -> None:
    words = command(tmp_path, f"num-steps: 50\n{option}: x\n")
    name = option.replace("_", "-")
    with pytest.raises(UsageError, match=f"--{name} in .*/options.yaml: .*; remove it"):
        check_words(words, "weak", {})


def test_the_batch_may_be_set_in_the_file(tmp_path: Path) -> None:
    total = command(tmp_path, "global-batch-size: 256\n")
    check_words(total, "strong", {})
    assert with_batch(total, "strong", 2) == total
    with pytest.raises(UsageError, match=r"--global-batch-size .* --config file needs --strong"):
        check_words(total, "weak", {})
    # The command line overrides the file, as in the trainers.
    check_words([*total, "--batch-size", "8"], "weak", {})
    per_rank = command(tmp_path, "batch_size: 8\n")
    check_words(per_rank, "strong", {})
    assert with_batch(per_rank, "strong", 2) == [*per_rank, "--global-batch-size", "16"]


@pytest.mark.parametrize("text", ["", "a list", "[1, 2]", "{", "timeline:\n", "\0"])
def test_config_may_have_another_meaning_in_other_programs(text: str, tmp_path: Path) -> None:
    check_words(command(tmp_path, text), "weak", {})
    check_words([*PROGRAM, "--config", str(tmp_path / "none")], "weak", {})
    check_words([*PROGRAM, "--config"], "weak", {})
