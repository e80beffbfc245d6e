"""The files of a scaling study, JSON Lines and a table; which runs are comparable."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.commands.scaling.cost_model import read_reductions
from hvdtrain.commands.scaling.runs import (
    MeasuredRun,
    check_comparable,
    read_lines,
    read_table,
    write_table,
)
from hvdtrain.commands.scaling.sweep import ScalingOptions, Sweep
from hvdtrain.commands.study.engine import HostShare
from hvdtrain.commands.study.run import append_record
from hvdtrain.errors import UsageError
from hvdtrain.system.files import MAX_READ
from tests.studies import WORDS, run

TUNED = {"HOROVOD_FUSION_THRESHOLD": "0", "OMP_NUM_THREADS": "2"}
SINGLE = {"OMP_NUM_THREADS": "2"}  # the trainers tune communication only with several ranks


def tuned(*each: tuple[int, dict[str, str]]) -> list[MeasuredRun]:
    return [
        run(ranks, 1 + i, environment={"variables": variables})
        for i, (ranks, variables) in enumerate(each)
    ]


def test_runs_that_are_comparable() -> None:
    check_comparable([run(1), run(2), run(4, hosts=2)], "weak", "results")
    strong: dict[str, Any] = {"scaling": "strong", "global_batch_size": 64}
    check_comparable([run(1, **strong), run(2, **strong)], "strong", "results")
    # Tuning by the trainers is not a difference.
    yields = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    check_comparable(tuned((1, SINGLE), (2, TUNED), (4, TUNED | yields)), "weak", "f")
    for unreported in (None, {}, {"variables": None}, {"variables": "a word"}):
        check_comparable([*tuned((2, TUNED)), run(2, 2, environment=unreported)], "weak", "f")


@pytest.mark.parametrize(
    ("runs", "scaling", "message"),
    [
        (
            tuned((1, {"OMP_NUM_THREADS": "1"}), (2, TUNED)),
            "weak",
            "OMP_NUM_THREADS is not the same in all runs .*: 1 in 1-1; 2 in 2-2",
        ),
        (
            tuned((2, TUNED), (2, TUNED | {"HOROVOD_CYCLE_TIME": "10"})),
            "weak",
            "HOROVOD_CYCLE_TIME is not .*: not set in 2-1; 10 in 2-2",
        ),
        (tuned((1, {}), (2, TUNED)), "weak", "OMP_NUM_THREADS .*: not set in 1-1; 2 in 2-2"),
        (tuned((2, TUNED), (4, TUNED | {"NCCL_ALGO": "Tree"})), "weak", "NCCL_ALGO is not"),
        ([run(1)], "strong", "these are runs of --weak, not --strong"),
        ([run(n, scaling="strong") for n in (1, 2)], "strong", "the global batch"),
    ],
)
def test_runs_of_another_kind_are_not_comparable(
    runs: list[MeasuredRun], scaling: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check_comparable(runs, scaling, "f")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "small"}, r"the model is not .*: tutorial in 1-1, 2-1; small in 2-2"),
        ({"workload": "resnet"}, "the workload"),
        ({"framework": "tensorflow"}, "the framework"),
        ({"strategy": "ddp"}, "the strategy"),
        ({"precision": "fp32"}, "the precision is not .*: bf16 in 1-1, 2-1; fp32 in 2-2"),
        ({"global_batch_size": 64}, "the batch per rank is not .*: 64 in 1-1, 2-1; 32 in 2-2"),
        ({"hosts": 2}, "the number of hosts of 2 ranks is not .*: 1 in 2-1; 2 in 2-2"),
        ({"timeline": "t.json"}, r"run 2-2 recorded a timeline \(t.json\)"),
        ({"machine": "another"}, "the machine"),
        (
            {"ranks_per_host": 4},
            "the number of ranks that share a host is not .*: 2 in 1-1, 2-1; 4 in 2-2",
        ),
        ({"command": ("python", "x.py")}, "the command"),
        ({"scaling": "strong"}, "the scaling"),
        ({"world_size": 1}, "run 2-2 reports a world_size of 1"),
        ({"stopped": "preempted"}, "run 2-2 was preempted"),
    ],
)
def test_runs_that_are_not_comparable(changed: dict[str, Any], message: str) -> None:
    common = {"machine": "a", "ranks_per_host": 2}
    runs = [run(1, **common), run(2, **common), run(2, 2, **common | changed)]
    with pytest.raises(UsageError, match=message):
        check_comparable(runs, "weak", "results")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"command": (*WORDS[:-1], "30")},
            r"another command: --num-steps was 20, now 30 \(run 1-1\). .*--out",
        ),
        ({"command": WORDS[:-2]}, "another command: --num-steps was 20, now not set"),
        (
            {"command": (*WORDS, "--lr=1", "--quiet")},
            "another command: --lr was not set, now 1, --quiet was not set, now set",
        ),
        ({"command": ("x", *WORDS)}, "another command: python .*, now x python "),
        ({"command": (*WORDS[:-2], "--num_steps=20")}, "another command: python .*, now python "),
        ({"scaling": "strong"}, "another scaling: weak in run 1-1, now strong"),
        ({"machine": "b"}, "another machine: a in run 1-1, now b"),
        ({"threads": 2}, "another threads per rank: 4 in run 1-1, now 2. .*, or --threads 4"),
        (
            {"ranks_per_host": 1},
            "another share of a host: 1 of 2 ranks in .*, now 1 of 1 .* or --ppn 2",
        ),
        (
            {"ranks_per_host": 4, "threads": 2},  # with 4 threads the ranks would share cores
            "now 1 of 4 ranks. Use another --out; with --ppn 4 from the start, more ranks can",
        ),
        (
            {"ranks_per_host": None},
            "1 of 2 ranks in run 1-1, now the whole host for each rank. .*--out",
        ),
    ],
)
def test_a_different_run_does_not_continue_a_sweep(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    first = {"scaling": "weak", "machine": "a", "threads": 4, "ranks_per_host": 2}
    append_record(tmp_path / "results.jsonl", run(1, **first))
    new = {"command": WORDS, **first, **changed}
    share = HostShare(new["machine"], None, new["threads"], new["ranks_per_host"])
    strong = new["scaling"] == "strong"
    options = ScalingOptions(ranks=(1, 2), repeat=1, out=tmp_path, strong=strong)
    with pytest.raises(UsageError, match=message):
        Sweep(options, new["command"], share).missing()


# The files


def test_lines_are_read_back(tmp_path: Path) -> None:
    file, runs = tmp_path / "results.jsonl", [run(1), run(2, machine="2 cores per host"), run(2, 2)]
    assert read_lines(file) == []
    for record in runs:
        append_record(file, replace(record, ranks_per_host=2))
    assert json.loads(file.read_text().splitlines()[0])["ranks_per_host"] == 2
    assert [replace(record, ranks_per_host=None) for record in read_lines(file)] == runs
    file.write_text(file.read_text().removesuffix("\n"))  # as an editor or a full disk leaves it
    append_record(file, run(4))
    assert [record.name for record in read_lines(file)] == ["1-1", "2-1", "2-2", "4-1"]


@given(cut=st.integers(1, 400))
def test_an_incomplete_line_is_replaced(cut: int, tmp_path_factory: Any) -> None:
    file = tmp_path_factory.mktemp("cut") / "results.jsonl"
    append_record(file, run(1))
    first = file.read_bytes()
    append_record(file, run(2))
    second = len(file.read_bytes()) - len(first)
    file.write_bytes(file.read_bytes()[: len(first) + min(cut, second - 1)])
    assert read_lines(file) == [run(1)]
    append_record(file, run(4))
    assert read_lines(file) == [run(1), run(4)]


def test_a_link_is_not_appended_to(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    (tmp_path / "results.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"results\.jsonl cannot be written .*: remove it"):
        append_record(tmp_path / "results.jsonl", run(1))
    assert not (tmp_path / "elsewhere").read_bytes()


def test_the_table_is_read_back(tmp_path: Path) -> None:
    file, runs = tmp_path / "results.csv", [run(2, rate=190.5, machine="m, 2 cores"), run(1)]
    write_table(file, runs)
    lines = file.read_text().splitlines()
    assert lines[0].startswith("ranks,repeat,images_per_second,images_per_second_std,step_seconds")
    first, second = read_table(file)
    assert (first.ranks, first.rate, second.ranks, second.rate) == (1, 100.0, 2, 190.5)
    assert (second.machine, second.batch, second.scaling) == ("m, 2 cores", 128, "weak")
    assert second.split["compute"] == 0.3
    with pytest.raises(UsageError, match="the precision"):
        file.write_text("\n".join([lines[0], lines[1], lines[2].replace("bf16", "fp32")]))
        check_comparable(read_table(file), "weak", "f")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column ranks and images_per_second"),
        ("ranks,images_per_second\n", "no rows"),
        ("ranks,rate\n1,2\n", "no column images_per_second"),
        ("ranks,images_per_second\n1.5,2\n", "line 2: ranks '1.5' is not a whole number"),
        ("ranks,images_per_second\n0,2\n", "line 2: ranks '0' is not"),
        ("ranks,images_per_second\n1,2\n2,-3\n", "line 3: images_per_second '-3' is not"),
        ("ranks,images_per_second\n1,nan\n", "images_per_second 'nan' is not"),
        ("ranks,images_per_second\n1,\n", "line 2: ranks or images_per_second is empty"),
        ("ranks,images_per_second,hosts\n1,2,x\n", "hosts 'x' is not a whole number"),
    ],
)
def test_invalid_tables_are_reported(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_table(file)


@pytest.mark.parametrize(
    "read", [read_table, read_lines, lambda file: read_reductions([file], None)]
)
def test_a_file_that_is_too_large_is_refused(read: Callable[[Path], Any], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    os.truncate(file, MAX_READ + 1)
    with pytest.raises(UsageError, match=f"{file}.*more than 268,435,456 bytes"):
        read(file)
