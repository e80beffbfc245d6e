"""Runs that differ in more than the number of ranks are not comparable."""

from __future__ import annotations

from typing import Any

import pytest

from hvdtrain.commands.runs.comparable import check_comparable, check_continues
from hvdtrain.commands.runs.records import Run
from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import Summary
from tests.studies import WORDS, run

TUNED = {"HOROVOD_FUSION_THRESHOLD": "0", "OMP_NUM_THREADS": "2"}
SINGLE = {"OMP_NUM_THREADS": "2"}  # the trainers tune communication only with several ranks


def tuned(*each: tuple[int, dict[str, str]]) -> list[Run]:
    return [
        run(ranks, 1 + i, environment={"variables": variables})
        for i, (ranks, variables) in enumerate(each)
    ]


def test_tuning_by_the_trainers_is_not_a_difference() -> None:
    yields = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    check_comparable(tuned((1, SINGLE), (2, TUNED), (4, TUNED | yields)), "weak", "f")


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (
            tuned((1, {"OMP_NUM_THREADS": "1"}), (2, TUNED)),
            "OMP_NUM_THREADS is not the same in all runs .*: 1 in 1-1; 2 in 2-2",
        ),
        (
            tuned((2, TUNED), (2, TUNED | {"HOROVOD_CYCLE_TIME": "10"})),
            "HOROVOD_CYCLE_TIME is not .*: not set in 2-1; 10 in 2-2",
        ),
        (tuned((1, {}), (2, TUNED)), "OMP_NUM_THREADS is not .*: not set in 1-1; 2 in 2-2"),
        (tuned((2, TUNED), (4, TUNED | {"NCCL_ALGO": "Tree"})), "NCCL_ALGO is not"),
    ],
)
def test_different_tuning_is_reported(runs: list[Run], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_comparable(runs, "weak", "f")


@pytest.mark.parametrize("environment", [None, {}, {"variables": None}, {"variables": "a word"}])
def test_unreported_values_are_not_compared(environment: Any) -> None:
    check_comparable([*tuned((2, TUNED)), run(2, 2, environment=environment)], "weak", "f")


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
        (
            {"gradient_messages": {"count": 1, "bytes": 0}},
            "gradient_messages in the summary of run 2-2 is 1 of 0 bytes",
        ),
    ],
)
def test_runs_that_are_not_comparable(changed: dict[str, Any], message: str) -> None:
    common = {"machine": "a", "ranks_per_host": 2}
    runs = [run(1, **common), run(2, **common), run(2, 2, **common | changed)]
    with pytest.raises(UsageError, match=message):
        check_comparable(runs, "weak", "results")


def test_runs_that_are_comparable() -> None:
    check_comparable([run(1), run(2), run(4, hosts=2)], "weak", "results")
    strong = {"scaling": "strong", "global_batch_size": 64}
    check_comparable([run(1, **strong), run(2, **strong)], "strong", "results")
    with pytest.raises(UsageError, match="these are runs of --weak, not --strong"):
        check_comparable([run(1)], "strong", "results")
    with pytest.raises(UsageError, match="the global batch"):
        check_comparable([run(1, scaling="strong"), run(2, scaling="strong")], "strong", "results")


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
            "1 of 2 ranks in run 1-1, now 1 of 4 ranks. .*--out; with --ppn 4 from",
        ),
        (
            {"ranks_per_host": None},
            "1 of 2 ranks in run 1-1, now the whole host for each rank. .*--out",
        ),
    ],
)
def test_a_different_run_does_not_continue_a_sweep(changed: dict[str, Any], message: str) -> None:
    common = {"command": WORDS, "machine": "a", "threads": 4, "ranks_per_host": 2}
    runs = [run(1, **common)]
    check_continues(runs, Run(2, 1, Summary(), **common), "out")
    with pytest.raises(UsageError, match=message):
        check_continues(runs, Run(2, 1, Summary(), **{**common, **changed}), "out")
