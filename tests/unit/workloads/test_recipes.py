"""The defaults of the workloads: a learning rate for each optimizer, and what the help says."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain import train
from hvdtrain.config.command_line import parse
from hvdtrain.steps.learning_rate import scale_factor
from hvdtrain.steps.world import World
from hvdtrain.tasks import own
from hvdtrain.tasks.task import LearningRates, Recipe, Workload
from hvdtrain.training.plan import make_plan
from hvdtrain.workloads.mnist.task import WORKLOAD as MNIST
from hvdtrain.workloads.resnet.task import WORKLOAD as RESNET
from hvdtrain.workloads.ssd300.task import WORKLOAD as SSD300
from tests.conftest import ROOT


def recipe(workload: Workload, **options: object) -> Recipe:
    return workload.recipe(workload.options(**options))


@pytest.mark.parametrize(
    ("lr", "epilog"),
    [
        *((recipe(workload).lr, workload.epilog) for workload in (MNIST, RESNET, SSD300)),
        (own.RECIPE.lr, train.EPILOG),
    ],
    ids=["mnist", "resnet", "ssd300", "train"],
)
def test_adam_has_a_rate_of_its_own_that_the_help_shows(lr: LearningRates, epilog: str) -> None:
    assert max(lr.adam, lr.adamw) <= lr.sgd / 10
    assert str(lr) in epilog
    assert max(map(len, epilog.splitlines())) <= 100


def test_the_recipe_of_mnist_is_what_it_was_and_that_of_the_embedded_digits_is_another() -> None:
    """An augmentation, too, is for the few digits alone."""
    assert recipe(MNIST, data=Path("mnist")) == Recipe(
        batch_size=64,
        lr=LearningRates(sgd=0.03, adam=0.001, adamw=0.001, lars=1.25, lamb=0.008),
        epochs=6,
        warmup_epochs=0.5,
        lr_schedule="linear",
        weight_decay=1e-4,
    )
    assert recipe(MNIST).epochs > 6


def test_the_recipe_of_ssd300_is_that_of_the_paper() -> None:
    assert recipe(SSD300) == Recipe(
        batch_size=64,
        lr=LearningRates(sgd=2.6e-3, adam=1e-4, adamw=1e-4, lars=0.5, lamb=0.001),
        lr_base_batch=32,
        epochs=65,
        warmup_epochs=1.0,
        lr_schedule="multistep",
        lr_milestones=(43.0, 54.0),
        weight_decay=5e-4,
    )


def test_rates_as_text() -> None:
    assert str(LearningRates(sgd=0.1, adam=0.002, adamw=0.003, lars=1, lamb=0.004)) == (
        "0.1 for sgd, 0.002 for adam, 0.003 for adamw, 1 for lars, 0.004 for lamb"
    )
    assert str(LearningRates(sgd=0.03, adam=0.001, adamw=0.001, lars=1.5, lamb=0.001)) == (
        "0.03 for sgd, 0.001 for adam and adamw and lamb, 1.5 for lars"
    )


FILES = sorted((ROOT / "recipes").glob("*.yaml"))
WORKLOADS = {"mnist": MNIST, "resnet50": RESNET}


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
@pytest.mark.parametrize("ranks", [1, 128])
def test_a_recipe_of_a_file_is_the_same_training_on_any_number_of_ranks(
    path: Path, ranks: int
) -> None:
    workload = WORKLOADS[path.stem.partition("-")[0]]
    words = [f"--config={path}"]
    options = parse(workload.name, words, description="", epilog="", kind=workload.options)
    plan = make_plan(workload, options, World(0, ranks, 0, ranks, "host", 1))
    assert plan.lr_scaling == "none"
    if options.lr_base_batch:
        size = plan.global_batch / options.lr_base_batch
        assert plan.lr == pytest.approx(options.lr * scale_factor(options.lr_scaling, size))
    else:
        assert (plan.lr, plan.global_batch) == (options.lr, options.global_batch_size)
    assert "Source:" in path.read_text()
    words = path.read_text().replace("\\\n#", "").split()
    assert f"hvdtrain.{workload.name} --config recipes/{path.name}" in " ".join(words)


def test_there_are_recipes_for_both() -> None:
    assert {path.stem.partition("-")[0] for path in FILES} == set(WORKLOADS)
