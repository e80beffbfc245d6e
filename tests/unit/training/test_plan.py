"""What options, recipe and world make of a training."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.config.options import Options
from hvdtrain.steps.world import World
from hvdtrain.tasks.task import LearningRates, Recipe, Workload
from hvdtrain.training.plan import (
    TrainingPlan,
    choose_model,
    choose_precision,
    choose_workers,
    make_plan,
    notes,
    processor_has_bf16,
)

RECIPE = Recipe(
    batch_size=32,
    lr=LearningRates(sgd=0.1, adam=0.002, adamw=0.003, lars=0.9, lamb=0.003),
    epochs=10,
    warmup_epochs=2.0,
    lr_schedule="linear",
    weight_decay=1e-4,
)
WORKLOAD = Workload(
    name="toy",
    description="",
    epilog="",
    models=("first", "second"),
    recipe=lambda options: RECIPE,
    build=lambda options: pytest.fail("a plan builds nothing"),
    random_without_data=True,
)


def plan(
    size: int = 4,
    changes: dict[str, Any] | None = None,
    data: Path | None = Path("data"),
    **options: Any,
) -> TrainingPlan:
    """Return the plan for ``size`` ranks, by a recipe with ``changes``."""
    recipe = replace(RECIPE, **(changes or {}))
    workload = replace(WORKLOAD, recipe=lambda options: recipe)
    return make_plan(workload, Options(data=data, **options), World(0, size, 0, size, "host", 1))


@pytest.mark.parametrize(
    ("steps", "samples", "epochs"),
    # A global batch of 128: the last of 300 samples is of 44.
    [
        (0, 256, 0.0),
        (1, 256, 0.5),
        (2, 256, 1.0),
        (5, 256, 2.5),
        (3, 300, 1.0),
        (5, 300, 1 + 256 / 300),
    ],
)
def test_a_warmup_in_updates_ends_where_that_update_begins(
    steps: int, samples: int, epochs: float
) -> None:
    training_plan = plan(4, warmup_steps=steps)
    assert training_plan.schedule_over(samples) == {
        **training_plan.schedule,
        "warmup_epochs": epochs,
    }
    assert plan(4).schedule_over(samples) == plan(4).schedule


@pytest.mark.parametrize(
    ("options", "lines"),
    # 300 samples, four ranks, a recipe of 10 epochs.
    [
        ({}, []),
        ({"batch_size": 75}, []),
        (
            {"batch_size": 10**9},
            ["the global batch of 4,000,000,000 is larger than the data: an epoch is one update"],
        ),
        ({"accumulate_steps": 3}, ["the global batch of 384 is larger than the data: an epoch is"]),
        ({"warmup_epochs": 10.0}, []),
        (
            {"warmup_epochs": 100.0, "epochs": 3},
            [
                "the warm-up of 100 epochs is longer than the training of 3 epochs: the learning",
                "only 9 updates in 3 epochs, too few to learn much: use more --epochs",
            ],
        ),
        ({"warmup_steps": 9, "epochs": 3}, ["only 9 updates in 3 epochs"]),
        (
            {"warmup_steps": 12, "epochs": 3},
            [
                "the warm-up of 4 epochs is longer than the training of 3 epochs: the learning",
                "only 9 updates in 3 epochs",
            ],
        ),
        ({"epochs": 10}, []),  # 30 updates
        ({"epochs": 1, "num_steps": 2}, []),
        ({"evaluate_epochs": (5, 10)}, []),
        (
            {"evaluate_epochs": (1, 9, 12), "epochs": 1},
            [
                "--evaluate-epochs 9,12: the training ends after 1 epoch, and is evaluated then",
                "only 3 updates in 1 epoch",
            ],
        ),
    ],
)
def test_options_without_effect_are_reported(options: dict[str, Any], lines: list[str]) -> None:
    shown = notes(Options(**options), plan(4, **options), 300)
    assert len(shown) == len(lines)
    assert all(line.startswith(start) for line, start in zip(shown, lines, strict=True))


@pytest.mark.parametrize(("number", "shown"), [(1, "1 sample"), (300, "300 samples")])
def test_an_epoch_of_one_update(number: int, shown: str) -> None:
    (line,) = notes(Options(), plan(4, batch_size=512), number)
    assert line.endswith(f"an epoch is one update on {shown}")


SCHEDULE = {
    "epochs": 10,
    "warmup_epochs": 2.0,
    "schedule": "linear",
    "milestones": (),
    "decay": 0.1,
}
PER_BATCH = {"changes": {"lr_base_batch": 32}}
PLANS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"optimizer": "sgd"}, {"lr": 0.1}),
    ({"optimizer": "adam"}, {"lr": 0.002}),
    ({"optimizer": "adamw"}, {"lr": 0.003}),
    ({"optimizer": "adam", "lr": 0.03}, {"lr": 0.03}),
    ({"benchmark": "training"}, {"num_steps": 100}),
    ({"benchmark": "training", "num_steps": 7}, {"num_steps": 7}),
    ({"data": None}, {"num_steps": 100}),
    ({"data": None, "epochs": 3}, {"num_steps": None, "epochs": 3}),
    ({"data": None, "num_steps": 7}, {"num_steps": 7}),
    ({"data": None, "num_steps": 0}, {"num_steps": 0}),  # a value, not a default
    ({"lr": 0.0, "weight_decay": 0.0}, {"lr": 0.0, "weight_decay": 0.0}),
    ({"size": 1}, {"global_batch": 32}),
    ({"size": 3}, {"global_batch": 96}),
    ({"size": 8, "batch_size": 5}, {"global_batch": 40, "lr_scaling": "linear"}),
    ({"size": 8, "global_batch_size": 7}, {"global_batch": 7, "lr_scaling": "none"}),
    ({"global_batch_size": 96, "lr_scaling": "sqrt"}, {"lr_scaling": "sqrt"}),
    ({"model": "second", "weight_decay": 0.01}, {"model": "second", "weight_decay": 0.01}),
    ({"num_steps": 3}, {"num_steps": 3, "schedule": SCHEDULE}),
    # A rate in proportion to the global batch: 4 ranks of 32.
    (PER_BATCH, {"lr": 0.1 * 4, "lr_scaling": "none"}),
    ({**PER_BATCH, "lr": 0.2, "batch_size": 8}, {"lr": 0.2, "lr_scaling": "none"}),
    ({**PER_BATCH, "global_batch_size": 96}, {"lr": 0.1 * 3, "lr_scaling": "none"}),
    ({**PER_BATCH, "accumulate_steps": 2}, {"lr": 0.1 * 8, "lr_scaling": "none"}),
    ({**PER_BATCH, "lr_scaling": "none"}, {"lr": 0.1, "lr_scaling": "none"}),
    ({**PER_BATCH, "lr_scaling": "linear"}, {"lr": 0.1, "lr_scaling": "linear"}),
    # LARS and LAMB: by the square root of the global batch, however it is set.
    ({"optimizer": "lars"}, {"lr": 0.9 * 2, "lr_scaling": "none"}),
    ({"optimizer": "lars", "batch_size": 2}, {"lr": 0.9 / 2, "lr_scaling": "none"}),
    ({"optimizer": "lamb", "accumulate_steps": 4}, {"lr": 0.003 * 4, "lr_scaling": "none"}),
    ({"optimizer": "lamb", "global_batch_size": 96}, {"lr": 0.003 * 3**0.5, "lr_scaling": "none"}),
    # What the user sets stays.
    ({"optimizer": "lamb", "lr_scaling": "linear"}, {"lr": 0.003, "lr_scaling": "linear"}),
    ({"optimizer": "lars", "lr": 1.0}, {"lr": 1.0, "lr_scaling": "sqrt"}),
    (
        {
            "optimizer": "lars",
            "lr": 1.0,
            "global_batch_size": 96,
            "changes": {"warmup_epochs": 0.5},
        },
        {"lr": 1.0, "lr_scaling": "none", "schedule": {**SCHEDULE, "warmup_epochs": 0.5}},
    ),
    ({**PER_BATCH, "optimizer": "lamb"}, {"lr": 0.003 * 2, "lr_scaling": "none"}),
    # 128 samples, for which the rate would hold; of any number of ranks.
    ({"lr_base_batch": 64}, {"lr": 0.1 * 2, "lr_scaling": "none"}),
    ({"lr_base_batch": 64, "lr_scaling": "sqrt"}, {"lr": 0.1 * 2**0.5, "lr_scaling": "none"}),
    ({"lr_base_batch": 32, "optimizer": "lars"}, {"lr": 0.9 * 2, "lr_scaling": "none"}),
    ({"lr_base_batch": 256, "global_batch_size": 64}, {"lr": 0.1 / 4, "lr_scaling": "none"}),
    (
        {
            "warmup_epochs": 0.0,
            "lr_schedule": "multistep",
            "lr_milestones": (3.0, 6.0),
            "lr_decay": 0.5,
        },
        {
            "schedule": {
                "epochs": 10,
                "warmup_epochs": 0.0,
                "schedule": "multistep",
                "milestones": (3.0, 6.0),
                "decay": 0.5,
            }
        },
    ),
]


@pytest.mark.parametrize(("options", "fields"), PLANS)
def test_options_and_defaults(options: dict[str, Any], fields: dict[str, Any]) -> None:
    training_plan = plan(**options)
    assert {name: getattr(training_plan, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("options", "warmup"),
    [
        ({}, 10 / 6),
        ({"epochs": 12}, 2.0),
        ({"epochs": 2}, 0.5),
        ({"global_batch_size": 8192}, 10 / 6),
        ({"lr_base_batch": 64}, 10 / 6),
        ({"size": 1}, 0.5),  # the batch of the recipe
        ({"warmup_epochs": 0.25}, 0.25),
        ({"optimizer": "adamw", "lr_base_batch": 64}, 0.5),
    ],
)
def test_the_warmup_of_lamb_with_a_large_batch(options: dict[str, Any], warmup: float) -> None:
    changes = {"warmup_epochs": 0.5}
    training_plan = plan(**{"optimizer": "lamb", "changes": changes, **options})
    assert training_plan.schedule["warmup_epochs"] == pytest.approx(warmup)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"optimizer": "lamb", "global_batch_size": 288},
            "lamb: learning rate 0.003 for a batch of 32, 0.009 for 288 (--lr-scaling sqrt); "
            "warm-up of 2 epochs",
        ),
        (
            {"optimizer": "lars", "lr": 0.5, "lr_base_batch": 64, "lr_scaling": "linear"},
            "lars: learning rate 0.5 for a batch of 64, 1 for 128 (--lr-scaling linear); warm-up "
            "of 2 epochs",
        ),
        ({"optimizer": "lamb", "lr": 0.1, "global_batch_size": 288}, None),
        ({"optimizer": "adamw", "global_batch_size": 288}, None),
    ],
)
def test_a_rate_that_follows_the_batch_is_shown(options: dict[str, Any], line: str | None) -> None:
    assert notes(Options(**options), plan(4, **options), 300) == ((line,) if line else ())


def test_milestones_of_a_recipe_move_with_the_length() -> None:
    for options, milestones in (
        ({}, (4, 8)),
        ({"epochs": 5}, (2, 4)),
        ({"epochs": 5, "lr_milestones": (1.0,)}, (1,)),
    ):
        training_plan = plan(changes={"lr_milestones": (4.0, 8.0)}, **options)
        assert training_plan.schedule["milestones"] == milestones


def test_defaults_are_the_recipe() -> None:
    assert plan(4) == TrainingPlan(
        model="first",
        global_batch=128,
        epochs=10,
        num_steps=None,
        lr_scaling="linear",
        lr=0.1,
        schedule=SCHEDULE,
        weight_decay=1e-4,
    )


@pytest.mark.parametrize(
    ("epochs", "warmup"), [(8, 1.6), (5, 1.0), (4, 1.0), (2, 1.0), (1, 0.5), (10, 2.0), (40, 2.0)]
)
def test_a_shorter_run_warms_up_shorter_but_no_less_than_it_needs(
    epochs: int, warmup: float
) -> None:
    training_plan = plan(epochs=epochs)
    assert training_plan.schedule["warmup_epochs"] == pytest.approx(warmup)
    assert training_plan.schedule["epochs"] == training_plan.epochs == epochs


def test_a_workload_of_one_network_takes_any_name() -> None:
    custom = replace(WORKLOAD, models=())
    assert choose_model(custom, Options()) == "toy"
    assert choose_model(custom, Options(model="wide")) == "wide"


def test_the_precision() -> None:
    for prefers, has in itertools.product((True, False), repeat=2):
        for requested in ("fp64", "fp32", "bf16", "fp16", "auto"):
            chosen = choose_precision(requested, prefers_bf16=prefers, has_bf16=has)
            auto = "bf16" if prefers and has else "fp32"
            assert chosen == (auto if requested == "auto" else requested)


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("model name : x\nflags\t\t: fpu avx512_bf16 sse\n", True),
        ("flags\t\t: fpu amx_bf16\n", True),
        ("flags\t\t: fpu avx512f not_avx512_bf16_but_longer\n", False),
        ("flags\t\t: fpu avx2\n", False),
        ("Features\t: asimd bf16\n", False),
        ("", False),
    ],
)
def test_flags_of_the_processor(tmp_path: Path, text: str, has: bool) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert processor_has_bf16(tmp_path / "cpuinfo") is has
    assert processor_has_bf16(tmp_path / "absent") is False


@pytest.mark.parametrize(
    ("requested", "gpu", "cores", "workers"),
    [
        (None, False, 64, 1),
        (None, True, 1, 1),
        (None, True, 4, 3),
        (None, True, 64, 8),
        (0, True, 64, 0),
        (20, False, 2, 20),
    ],
)
def test_workers_leave_a_core_to_the_rank(
    requested: int | None, gpu: bool, cores: int, workers: int
) -> None:
    assert choose_workers(requested, gpu=gpu, cores=cores) == workers
