"""A metric is that of the whole set, however the samples lie on the ranks."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import r2_score, roc_auc_score

from hvdtrain.collectives.base import Communicator, SingleRank
from hvdtrain.errors import UsageError
from hvdtrain.steps.sharding import bounds
from hvdtrain.tasks.dataset import Batch
from hvdtrain.tasks.metrics import Accuracy, Metric, WholeSet
from tests.unit.conftest import OnRanks

SAMPLES = 7  # of two and three ranks, one has more
LABELS = np.array([0, 1, 1, 0, 1, 0, 1])
OUTPUTS = np.random.default_rng(0).normal(size=(SAMPLES, 2))


def measured(metric: Metric, communicator: Communicator, batch: int = 2) -> dict[str, float]:
    low, high = bounds(SAMPLES, communicator.rank, communicator.size)
    for start in range(low, high, batch):
        rows = slice(start, min(start + batch, high))
        metric.update(Batch(None, LABELS[rows]), OUTPUTS[rows])
    metric.update(Batch(None, LABELS[:0]), OUTPUTS[:0])  # a part may be empty
    metric.gather(communicator)
    return metric.result()


AUC = WholeSet("auc", lambda y, output: roc_auc_score(y, output[:, 1]))
R2 = WholeSet("r2", lambda y, output: r2_score(y, output[:, 0]))


@pytest.mark.parametrize("size", [1, 2, 3, 9])
@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (Accuracy(), {"accuracy": (OUTPUTS.argmax(1) == LABELS).mean()}),
        (AUC, {"auc": roc_auc_score(LABELS, OUTPUTS[:, 1])}),
        (R2, {"r2": r2_score(LABELS, OUTPUTS[:, 0])}),
    ],
)
def test_it_is_the_whole_sets(
    on_ranks: OnRanks, size: int, metric: Metric, expected: dict[str, Any]
) -> None:
    for result in on_ranks(
        size, lambda communicator: measured(copy.deepcopy(metric), communicator)
    ):
        assert result == pytest.approx(expected, rel=1e-12)
        assert tuple(result) == metric.names


@pytest.mark.parametrize(
    ("labels", "outputs"), [((2, 1), (2, 1)), ((2,), (2,)), ((2, 3), (2, 3)), ((2, 4), (2, 3, 4))]
)
def test_accuracy_is_of_classes_and_their_scores(
    labels: tuple[int, ...], outputs: tuple[int, ...]
) -> None:
    with pytest.raises(UsageError, match=r"shape \(2.*metrics=.*own\.md") as raised:
        Accuracy().update(Batch(None, np.zeros(labels)), np.zeros(outputs))
    assert "\n" not in str(raised.value)


def test_as_a_person_reads_it() -> None:
    assert Accuracy().shown(0.98765) == "98.77 %"
    assert AUC.shown(0.98765) == "0.9877"


def test_lower_may_be_better() -> None:
    error = WholeSet("error", lambda y, output: 0.5, higher_is_better=False)
    assert not error.higher_is_better
    assert measured(error, SingleRank()) == {"error": 0.5}
