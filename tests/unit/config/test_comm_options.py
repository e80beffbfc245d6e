"""Communication options: support by strategy, and refusals."""

from __future__ import annotations

import dataclasses

import pytest

from hvdtrain.config.checks import check, of_strategy
from hvdtrain.config.comm_options import COMPRESSIONS, NONE, CommOptions
from hvdtrain.config.declare import declared
from hvdtrain.config.options import Options
from hvdtrain.config.strategies import STRATEGIES
from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.detect import SINGLE_RANK


def check_options(options: CommOptions, strategy: str, framework: str = "pytorch") -> None:
    launch = SINGLE_RANK
    check(of_strategy(STRATEGIES[strategy], framework, launch, options.compression))


def refusal(options: CommOptions, strategy: str, framework: str = "pytorch") -> str:
    with pytest.raises(UsageError) as caught:
        check_options(options, strategy, framework)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_supports_the_compressions_of_its_record(name: str) -> None:
    record = STRATEGIES[name]
    assert set(record.compressions) <= set(COMPRESSIONS) - {NONE}
    for compression in COMPRESSIONS:
        options = CommOptions(compression=compression)
        if compression in (NONE, *record.compressions):
            check_options(options, name)
        else:
            assert f"--compression {compression}" in refusal(options, name)


def test_a_refusal_names_the_alternative() -> None:
    bf16 = CommOptions(compression="bf16")
    message = refusal(bf16, "horovod")
    assert "--compression bf16: Horovod" in message and "--compression fp16" in message
    message = refusal(bf16, "single", "tensorflow")
    assert "--compression bf16" in message and message.endswith("--strategy mpi")
    message = refusal(CommOptions(compression="fp8"), "ddp")
    assert "--compression fp8" in message and "none, fp16, bf16" in message


def test_communication_options_are_options_of_a_training() -> None:
    defaults = {field.name: field.default for field in declared(Options)}
    for field in dataclasses.fields(CommOptions):
        assert defaults[field.name] == field.default
    assert Options().comm_options == CommOptions()
    assert Options(compression="fp16").comm_options == CommOptions(compression="fp16")
    evaluation = Options(compression="fp16", evaluate_only=True)
    assert evaluation.comm_options == CommOptions()  # no updates
