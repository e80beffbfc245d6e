"""What options, recipe and world make of a training."""

from __future__ import annotations

from typing import Any

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.steps.world import World
from hvdtrain.training.options import Options
from hvdtrain.training.plan import Plan, Recipe, Workload, choose_model, make_plan

RECIPE = Recipe(
    batch_size=32, lr=0.1, epochs=10, warmup_epochs=2.0, lr_schedule="linear", weight_decay=1e-4
)
WORKLOAD = Workload(
    name="toy",
    models=("first", "second"),
    recipe=lambda options: RECIPE,
    build=lambda options, settings: pytest.fail("a plan builds nothing"),
    short_steps=lambda model: False,
    prefers_bf16=lambda model: False,
    default_steps=lambda options: 100 if options.synthetic else None,
)


def plan(size: int = 4, **options: Any) -> Plan:
    return make_plan(WORKLOAD, Options(**options), World(0, size, 0, size, "host", 1))


def test_defaults_are_the_recipe() -> None:
    assert plan(4) == Plan(
        model="first",
        global_batch=128,
        epochs=10,
        num_steps=None,
        lr_scaling="linear",
        lr=0.1,
        schedule={
            "epochs": 10,
            "warmup_epochs": 2.0,
            "schedule": "linear",
            "milestones": (),
            "decay": 0.1,
        },
        weight_decay=1e-4,
    )


@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_batch_is_a_ranks_or_all_ranks(size: int) -> None:
    assert plan(size).global_batch == 32 * size
    assert plan(size, batch_size=5).global_batch == 5 * size
    assert plan(size, global_batch_size=7).global_batch == 7


def test_a_fixed_global_batch_scales_no_learning_rate_unless_asked_to() -> None:
    assert plan(global_batch_size=96).lr_scaling == "none"
    assert plan(global_batch_size=96, lr_scaling="sqrt").lr_scaling == "sqrt"
    assert plan(batch_size=96).lr_scaling == "linear"


@pytest.mark.parametrize(
    ("epochs", "warmup"), [(8, 1.6), (5, 1.0), (4, 1.0), (2, 1.0), (1, 0.5), (10, 2.0), (40, 2.0)]
)
def test_a_shorter_run_warms_up_shorter_but_no_less_than_it_needs(
    epochs: int, warmup: float
) -> None:
    made = plan(epochs=epochs)
    assert made.schedule["warmup_epochs"] == pytest.approx(warmup)
    assert made.schedule["epochs"] == made.epochs == epochs


def test_zero_is_a_value_and_no_default() -> None:
    made = plan(warmup_epochs=0.0, lr=0.0, weight_decay=0.0, num_steps=0, synthetic=True)
    assert made.schedule["warmup_epochs"] == 0
    assert (made.lr, made.weight_decay, made.num_steps) == (0, 0, 0)


def test_steps_where_the_data_has_no_end() -> None:
    assert plan(synthetic=True).num_steps == 100
    assert plan(synthetic=True, num_steps=7).num_steps == 7
    assert plan().num_steps is None


def test_num_steps_does_not_change_the_schedule() -> None:
    assert plan(num_steps=3).schedule == plan().schedule


def test_what_is_given_is_taken() -> None:
    made = plan(
        lr=0.3,
        lr_schedule="multistep",
        lr_milestones=(3.0, 6.0),
        lr_decay=0.5,
        warmup_epochs=1.0,
        weight_decay=0.01,
        model="second",
    )
    assert (made.lr, made.weight_decay, made.model) == (0.3, 0.01, "second")
    assert made.schedule == {
        "epochs": 10,
        "warmup_epochs": 1.0,
        "schedule": "multistep",
        "milestones": (3.0, 6.0),
        "decay": 0.5,
    }


def test_an_unknown_model_is_told_with_the_valid_ones() -> None:
    with pytest.raises(UsageError, match="--model third: choose one of first, second"):
        choose_model(WORKLOAD, Options(model="third"))
    with pytest.raises(UsageError, match="--model third"):
        plan(model="third")
