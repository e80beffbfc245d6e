"""Which lever a strategy has, and what is said where it has not."""

from __future__ import annotations

import pytest

from hvdtrain.config.levers import COMPRESSIONS, NONE, Levers, check_levers
from hvdtrain.config.options import Options
from hvdtrain.config.strategies import STRATEGIES
from hvdtrain.errors import UsageError


def refusal(levers: Levers, strategy: str, framework: str = "pytorch") -> str:
    with pytest.raises(UsageError) as caught:
        check_levers(levers, STRATEGIES[strategy], framework)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_has_the_compressions_of_its_record(name: str) -> None:
    record = STRATEGIES[name]
    assert set(record.compressions) <= set(COMPRESSIONS) - {NONE}
    for asked in COMPRESSIONS:
        if asked in (NONE, *record.compressions):
            check_levers(Levers(compression=asked), record, "pytorch")
        else:
            assert f"--compression {asked}" in refusal(Levers(compression=asked), name)


def test_what_to_give_instead_is_told() -> None:
    bf16 = Levers(compression="bf16")
    assert refusal(bf16, "horovod") == (
        "--compression bf16: Horovod has no sum of that type; give --compression fp16"
    )
    assert refusal(bf16, "single", "tensorflow") == (
        "--compression bf16 is not for --strategy single: leave it out, or give --strategy mpi"
    )
    assert refusal(Levers(compression="fp8"), "ddp") == (
        "--compression fp8: choose one of none, fp16, bf16"
    )


def test_the_levers_are_options_of_a_training() -> None:
    assert Options().levers == Levers()
    assert Options(compression="fp16").levers == Levers(compression="fp16")
    assert Options(compression="fp16", evaluate_only=True).levers == Levers()
