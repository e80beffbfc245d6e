"""Runs that were tuned differently do not belong in one table."""

from __future__ import annotations

from typing import Any

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.measure.alike import check_alike
from hvdtrain.measure.records import Run

TUNED = {"HOROVOD_FUSION_THRESHOLD": "0", "OMP_NUM_THREADS": "2"}
ALONE = {"OMP_NUM_THREADS": "2"}  # the trainers tune what has to wait for others


def run(ranks: int, repeat: int, environment: Any) -> Run:
    return Run(ranks, repeat, {"images_per_second_mean": 1.0, "environment": environment})


def tuned(*each: tuple[int, dict[str, str]]) -> list[Run]:
    return [run(ranks, 1 + i, {"variables": some}) for i, (ranks, some) in enumerate(each)]


def test_what_the_trainers_tune_by_themselves_is_no_difference() -> None:
    yields = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    check_alike(tuned((1, ALONE), (2, TUNED), (4, TUNED | yields)), "weak", "f")


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
def test_another_tuning(runs: list[Run], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_alike(runs, "weak", "f")


@pytest.mark.parametrize("environment", [None, "a word", {}, {"variables": None}])
def test_what_a_run_does_not_tell_is_not_compared(environment: Any) -> None:
    check_alike([*tuned((2, TUNED)), run(2, 2, environment)], "weak", "f")
