"""Communication options: support by strategy, environment variables, and refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from hvdtrain.config.comm_options import (
    BUCKET_BYTES,
    COMPRESSIONS,
    NONE,
    VARIABLES,
    CommOptions,
    check_adasum,
    check_comm_options,
    check_nccl,
)
from hvdtrain.config.declare import declared
from hvdtrain.config.options import Options
from hvdtrain.config.strategies import HOROVOD, STRATEGIES
from hvdtrain.errors import UsageError

VALUES: dict[str, Any] = {  # a non-default value of each option except --compression
    "reduction": "adasum",
    "fusion_threshold_mb": 0.5,
    "cycle_time_ms": 3.0,
    "hierarchical_allreduce": True,
    "autotune": True,
}


def check(options: CommOptions, strategy: str, framework: str = "pytorch", **environ: str) -> None:
    check_comm_options(options, STRATEGIES[strategy], framework, environ)


def refusal(options: CommOptions, strategy: str, framework: str = "pytorch", **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        check(options, strategy, framework, **environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_supports_the_compressions_of_its_record(name: str) -> None:
    record = STRATEGIES[name]
    assert set(record.compressions) <= set(COMPRESSIONS) - {NONE}
    for compression in COMPRESSIONS:
        options = CommOptions(compression=compression)
        if compression in (NONE, *record.compressions):
            check(options, name)
        else:
            assert f"--compression {compression}" in refusal(options, name)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_supports_the_options_of_its_record(name: str) -> None:
    record = STRATEGIES[name]
    assert {field.name for field in dataclasses.fields(CommOptions)} == {"compression", *VALUES}
    assert set(VARIABLES.get(record.library, {})) <= set(record.comm_options) <= set(VALUES)
    for attribute, value in VALUES.items():
        if attribute in record.comm_options:
            check(CommOptions(**{attribute: value}), name)
        else:
            option = "--" + attribute.replace("_", "-")
            message = refusal(CommOptions(**{attribute: value}), name)
            assert f"{option} " in message and f"--strategy {name}:" in message


def test_a_refusal_names_the_alternative() -> None:
    bf16 = CommOptions(compression="bf16")
    message = refusal(bf16, "horovod")
    assert "--compression bf16: Horovod" in message and "--compression fp16" in message
    message = refusal(bf16, "single", "tensorflow")
    assert "--compression bf16" in message and message.endswith("--strategy mpi")
    message = refusal(CommOptions(compression="fp8"), "ddp")
    assert "--compression fp8" in message and "none, fp16, bf16" in message
    assert refusal(CommOptions(cycle_time_ms=1.0), "ddp").endswith("--strategy horovod")
    message = refusal(CommOptions(autotune=True, cycle_time_ms=1.0), "horovod")
    assert "--autotune and --cycle-time-ms" in message


def test_a_variable_of_the_user_is_not_overruled() -> None:
    options = CommOptions(cycle_time_ms=2.0, fusion_threshold_mb=1.0)
    check(options, "horovod", HOROVOD_CYCLE_TIME="2", HOROVOD_FUSION_THRESHOLD="1048576")
    check(options, "horovod", HOROVOD_AUTOTUNE="0")
    for wrong in ("3", "much"):
        message = refusal(options, "horovod", HOROVOD_CYCLE_TIME=wrong)
        assert f"--cycle-time-ms and HOROVOD_CYCLE_TIME={wrong} in the environment" in message
    # A variable that the strategy's library does not read is no contradiction.
    check(CommOptions(fusion_threshold_mb=1.0), "mpi", HOROVOD_FUSION_THRESHOLD="0")


@pytest.mark.parametrize(
    ("options", "short", "expected"),
    [
        (CommOptions(), False, {"HOROVOD_FUSION_THRESHOLD": "0"}),
        (CommOptions(), True, {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_CYCLE_TIME": "0.1"}),
        (
            CommOptions(fusion_threshold_mb=0.5, cycle_time_ms=2.5, hierarchical_allreduce=True),
            True,
            {
                "HOROVOD_FUSION_THRESHOLD": "524288",
                "HOROVOD_CYCLE_TIME": "2.5",
                "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
            },
        ),
        (
            CommOptions(autotune=True),
            True,
            {"HOROVOD_AUTOTUNE": "1"},
        ),  # Horovod tunes values that are not set
    ],
)
def test_the_environment_of_horovod(
    options: CommOptions, short: bool, expected: Mapping[str, str]
) -> None:
    variables = options.environment(HOROVOD, short_steps=short)
    always = {"HOROVOD_ENABLE_ASYNC_COMPLETION": "1"}
    of_horovod = {name: variables[name] for name in variables if name.startswith("HOROVOD_")}
    assert of_horovod == {**always, **expected}
    assert "OMPI_MCA_mpi_yield_when_idle" in variables


def test_the_size_of_a_bucket() -> None:
    assert CommOptions().bucket_bytes == BUCKET_BYTES == 25 * 2**20
    assert CommOptions(fusion_threshold_mb=0.5).bucket_bytes == 2**19
    assert (
        CommOptions(fusion_threshold_mb=0.0).bucket_bytes
        == CommOptions(autotune=True).bucket_bytes
        == 0
    )


def test_a_hierarchical_allreduce_needs_nccl() -> None:
    check_nccl(CommOptions(), used=False)
    check_nccl(CommOptions(hierarchical_allreduce=True), used=True)
    with pytest.raises(UsageError, match="--hierarchical-allreduce"):
        check_nccl(CommOptions(hierarchical_allreduce=True), used=False)


def test_adasum_needs_a_power_of_two() -> None:
    adasum = CommOptions(reduction="adasum")
    for size in (1, 2, 4, 8):
        check_adasum(adasum, size, gpu=False)
    check_adasum(CommOptions(), 3, gpu=True)
    for size, gpu, text in (
        (3, False, "power of two, not 3: start 2 or 4"),
        (12, False, "power of two, not 12: start 8 or 16"),
        (2, True, "--reduction adasum .*GPUs"),
    ):
        with pytest.raises(UsageError, match=text):
            check_adasum(adasum, size, gpu=gpu)
    assert [adasum.weight(share) for share in (0.0, 0.25, 1.0)] == [0.0, 1.0, 1.0]
    assert CommOptions().weight(0.25) == 0.25
    message = refusal(CommOptions(reduction="adasum", fusion_threshold_mb=1.0), "horovod")
    assert "--reduction and --fusion-threshold-mb" in message
    assert "average, adasum" in refusal(CommOptions(reduction="sum"), "horovod")


def test_communication_options_are_options_of_a_training() -> None:
    defaults = {field.name: field.default for field in declared(Options)}
    for field in dataclasses.fields(CommOptions):
        assert defaults[field.name] == field.default
    assert Options().comm_options == CommOptions()
    values = {"compression": "fp16", **VALUES}
    assert Options(**values).comm_options == CommOptions(**values)
    assert Options(**values, evaluate_only=True).comm_options == CommOptions()  # no updates
