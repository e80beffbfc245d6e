"""What a ladder gives each rank, cores, threads and batch, at every size; no MPI is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.commands.launch.hosts import Allocation, Host
from hvdtrain.commands.runs import start
from hvdtrain.commands.scaling.ladder import check_words, with_batch
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
        ((1, 2), 4, FOUR, 4),  # as one of several jobs does it
        ((1, 2), None, FOUR, 2),
        ((1, 8), None, FOUR, 4),
        ((2, 6), None, FOUR, 4),  # the first host is full, so 3 are not what it has
    ],
)
def test_the_fullest_host_decides(
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
    one, full = json.loads(capsys.readouterr().out)["commands"]
    assert one.startswith("env OMP_NUM_THREADS=1 ")
    own = full.replace(f" -n {cores} ", " -n 1 ").replace(f"/runs/{cores}-1.json", "/runs/1-1.json")
    assert one == own


def test_more_ranks_can_be_added_where_their_share_was_kept_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def shown(ranks: str, *words: str) -> list[str]:
        options = ("--ranks", ranks, "--repeat", "1", "--out", str(tmp_path), *words)
        assert cli.main(["scaling", *options, "--dry-run", "--json", *TRAIN]) == 0
        commands: list[str] = json.loads(capsys.readouterr().out)["commands"]
        return commands

    assert shown("1,2", "--ppn", "4") == shown("1,2,4")[:2] == shown("1,2,4", "--ppn", "4")[:2]


def test_threads_that_the_user_has_set_are_those_of_the_ladder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    words = ("--ranks", "1,2", "--repeat", "1", "--dry-run", "--json", "--out", str(tmp_path))
    assert cli.main(["scaling", *words, *TRAIN]) == 0
    for shown in json.loads(capsys.readouterr().out)["commands"]:
        assert shown.startswith("env OMP_NUM_THREADS=3 ")


def test_launch_leaves_room_for_ranks_that_are_not_there(
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
    assert shown("-n", cores, "--room-for", "1") == full  # no more room than there is
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in shown("-n", "1", "--room-for", cores)
    assert cli.main(["launch", "-n", "1", "--room-for", "0", "--", "true"]) == 2
    assert "--room-for 0: give a number of at least 1" in capsys.readouterr().err


def command(folder: Path, text: str, *words: str) -> list[str]:
    file = folder / "options.yaml"
    file.write_text(text)
    return [*PROGRAM, f"--config={file}", *words]


@pytest.mark.parametrize("option", ["summary", "metrics", "checkpoint-dir", "checkpoint_dir"])
def test_a_file_can_hide_nothing(option: str, tmp_path: Path) -> None:
    words = command(tmp_path, f"num-steps: 50\n{option}: x\n")
    name = option.replace("_", "-")
    with pytest.raises(UsageError, match=f"--{name} in .*/options.yaml: .*; leave it out"):
        check_words(words, "weak", {})


def test_the_batch_may_stand_in_the_file(tmp_path: Path) -> None:
    total = command(tmp_path, "global-batch-size: 256\n")
    check_words(total, "strong", {})
    assert with_batch(total, "strong", 2) == total
    with pytest.raises(UsageError, match="or its file of options, keeps the global batch"):
        check_words(total, "weak", {})
    # The line wins, as it does in the trainers.
    check_words([*total, "--batch-size", "8"], "weak", {})
    own = command(tmp_path, "batch_size: 8\n")
    check_words(own, "strong", {})
    assert with_batch(own, "strong", 2) == [*own, "--global-batch-size", "16"]


@pytest.mark.parametrize("text", ["", "a list", "[1, 2]", "{", "timeline:\n", "\0"])
def test_what_another_program_may_mean_by_config(text: str, tmp_path: Path) -> None:
    check_words(command(tmp_path, text), "weak", {})
    check_words([*PROGRAM, "--config", str(tmp_path / "none")], "weak", {})
    check_words([*PROGRAM, "--config"], "weak", {})
