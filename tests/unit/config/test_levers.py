"""Which lever a strategy has, what it sets, and what is said where it has not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from hvdtrain.config.levers import (
    BUCKET_BYTES,
    COMPRESSIONS,
    NONE,
    Levers,
    check_adasum,
    check_levers,
    check_nccl,
)
from hvdtrain.config.options import Options, declared
from hvdtrain.config.strategies import HOROVOD, STRATEGIES
from hvdtrain.errors import UsageError

SOME: dict[str, Any] = {  # a value of each lever that is not its default, besides --compression
    "reduction": "adasum",
    "fusion_threshold_mb": 0.5,
    "cycle_time_ms": 3.0,
    "hierarchical_allreduce": True,
    "autotune": True,
    "stages": 2,
    "micro_batches": 4,
}


def check(levers: Levers, strategy: str, framework: str = "pytorch", **environ: str) -> None:
    check_levers(levers, STRATEGIES[strategy], framework, environ)


def refusal(levers: Levers, strategy: str, framework: str = "pytorch", **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        check(levers, strategy, framework, **environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_has_the_compressions_of_its_record(name: str) -> None:
    record = STRATEGIES[name]
    assert set(record.compressions) <= set(COMPRESSIONS) - {NONE}
    for asked in COMPRESSIONS:
        if asked in (NONE, *record.compressions):
            check(Levers(compression=asked), name)
        else:
            assert f"--compression {asked}" in refusal(Levers(compression=asked), name)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_has_the_levers_of_its_record(name: str) -> None:
    record = STRATEGIES[name]
    assert {one.name for one in dataclasses.fields(Levers)} == {"compression", *SOME}
    assert set(record.variables) <= set(record.levers) <= set(SOME)
    for lever, value in SOME.items():
        if lever in record.levers:
            check(Levers(**{lever: value}), name)
        else:
            option = "--" + lever.replace("_", "-")
            said = refusal(Levers(**{lever: value}), name)
            assert f"{option} is not for --strategy {name}: leave it out, or give" in said


def test_what_to_give_instead_is_told() -> None:
    bf16 = Levers(compression="bf16")
    assert refusal(bf16, "horovod") == (
        "--compression bf16: Horovod has no sum of that type; give --compression fp16"
    )
    said = refusal(bf16, "single", "tensorflow")
    assert said == (
        "--compression bf16 is not for --strategy single: leave it out, or give --strategy mpi"
    )
    assert refusal(Levers(compression="fp8"), "ddp") == (
        "--compression fp8: choose one of none, fp16, bf16"
    )
    assert refusal(Levers(cycle_time_ms=1.0), "ddp").endswith("or give --strategy horovod")
    assert refusal(Levers(autotune=True, cycle_time_ms=1.0), "horovod") == (
        "--autotune and --cycle-time-ms contradict each other: give one"
    )


def test_what_the_user_has_set_is_not_overruled() -> None:
    levers = Levers(cycle_time_ms=2.0, fusion_threshold_mb=1.0)
    check(levers, "horovod", HOROVOD_CYCLE_TIME="2", HOROVOD_FUSION_THRESHOLD="1048576")
    check(levers, "horovod", HOROVOD_AUTOTUNE="0")
    for wrong in ("3", "much"):
        assert refusal(levers, "horovod", HOROVOD_CYCLE_TIME=wrong) == (
            f"--cycle-time-ms and HOROVOD_CYCLE_TIME={wrong} in the environment contradict each "
            "other (the option means 2): leave one out"
        )
    # What another strategy's library does not read contradicts nothing.
    check(Levers(fusion_threshold_mb=1.0), "mpi", HOROVOD_FUSION_THRESHOLD="0")


@pytest.mark.parametrize(
    ("levers", "short", "expected"),
    [
        (Levers(), False, {"HOROVOD_FUSION_THRESHOLD": "0"}),
        (Levers(), True, {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_CYCLE_TIME": "0.1"}),
        (
            Levers(fusion_threshold_mb=0.5, cycle_time_ms=2.5, hierarchical_allreduce=True),
            True,
            {
                "HOROVOD_FUSION_THRESHOLD": "524288",
                "HOROVOD_CYCLE_TIME": "2.5",
                "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
            },
        ),
        (Levers(autotune=True), True, {"HOROVOD_AUTOTUNE": "1"}),  # Horovod tunes what is not set
    ],
)
def test_what_is_set_for_horovod(levers: Levers, short: bool, expected: Mapping[str, str]) -> None:
    found = levers.environment(HOROVOD, short_steps=short)
    always = {"HOROVOD_ENABLE_ASYNC_COMPLETION": "1"}
    set_for_it = {name: found[name] for name in found if name.startswith("HOROVOD_")}
    assert set_for_it == {**always, **expected}
    assert "OMPI_MCA_mpi_yield_when_idle" in found


def test_the_size_of_a_bucket() -> None:
    assert Levers().bucket_bytes == BUCKET_BYTES == 25 * 2**20
    assert Levers(fusion_threshold_mb=0.5).bucket_bytes == 2**19
    assert Levers(fusion_threshold_mb=0.0).bucket_bytes == Levers(autotune=True).bucket_bytes == 0


def test_a_hierarchical_allreduce_is_nccls() -> None:
    check_nccl(Levers(), used=False)
    check_nccl(Levers(hierarchical_allreduce=True), used=True)
    with pytest.raises(UsageError, match=r"^--hierarchical-allreduce is not available: "):
        check_nccl(Levers(hierarchical_allreduce=True), used=False)


def test_adasum_is_for_powers_of_two() -> None:
    adasum = Levers(reduction="adasum")
    for size in (1, 2, 4, 8):
        check_adasum(adasum, size, gpu=False)
    check_adasum(Levers(), 3, gpu=True)
    for size, gpu, text in (
        (3, False, "a power of two of ranks, not 3: start 2 or 4"),
        (12, False, "a power of two of ranks, not 12: start 8 or 16"),
        (2, True, "--reduction adasum is for CPUs"),
    ):
        with pytest.raises(UsageError, match=text):
            check_adasum(adasum, size, gpu=gpu)
    assert [adasum.weight(share) for share in (0.0, 0.25, 1.0)] == [0.0, 1.0, 1.0]
    assert Levers().weight(0.25) == 0.25
    assert refusal(Levers(reduction="adasum", fusion_threshold_mb=1.0), "horovod") == (
        "--reduction and --fusion-threshold-mb contradict each other: give one"
    )
    assert "choose one of average, adasum" in refusal(Levers(reduction="sum"), "horovod")


def test_the_levers_are_options_of_a_training() -> None:
    options = {field.name: field.default for field in declared(Options)}
    for field in dataclasses.fields(Levers):
        assert options[field.name] == field.default
    assert Options().levers == Levers()
    given = {"compression": "fp16", **SOME}
    assert Options(**given).levers == Levers(**given)
    evaluated = Options(**given, evaluate_only=True).levers
    assert evaluated == Levers(stages=2, micro_batches=4)  # what does not concern updates
