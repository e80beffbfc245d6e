"""The lines of ``--predict``."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.errors import UsageError
from hvdtrain.tasks.columns import CLASSES, Columns


def test_a_class_and_its_probability() -> None:
    """Odds of 3 to 1, a tie, and scores whose exponentials are infinite."""
    outputs = np.array([[np.log(3), 0.0], [5.0, 5.0], [-2000.0, 2000.0]])
    assert CLASSES.header == "sample,label,prediction,probability\n"
    assert CLASSES.lines(7, np.array([0, 1, 1]), outputs) == (
        "7,0,0,0.750000000\n8,1,0,0.500000000\n9,1,1,1.00000000\n"
    )


def test_the_probability_is_the_softmax() -> None:
    outputs = np.random.default_rng(0).normal(size=(5, 4))
    lines = CLASSES.lines(0, np.zeros(5, np.int64), outputs).splitlines()
    exponentials = np.exp(outputs)
    expected = (exponentials / exponentials.sum(1, keepdims=True)).max(1)
    assert [float(line.split(",")[3]) for line in lines] == pytest.approx(expected, rel=1e-8)
    assert CLASSES.lines(3, np.zeros(0, np.int64), np.zeros((0, 4))) == ""


def test_columns_of_any_kind() -> None:
    columns = Columns(("name", "value"), lambda y, output: (["a", 'b "c", d'], output))
    lines = columns.lines(0, np.zeros(2), np.array([2 / 3, -1e-7]))
    assert columns.header == "sample,name,value\n"
    assert lines == '0,a,0.666666667\n1,"b ""c"", d",-1.00000000e-07\n'


@pytest.mark.parametrize(
    ("labels", "outputs"),
    [
        (np.zeros(2), np.zeros((2, 3))),
        (np.zeros(2, np.int64), np.zeros(2)),
        (np.zeros((2, 3), np.int64), np.zeros((2, 3))),
    ],
)
def test_a_task_that_does_not_classify_needs_columns(
    labels: np.ndarray, outputs: np.ndarray
) -> None:
    with pytest.raises(UsageError, match=r"not classes and their scores: .*columns=Columns"):
        CLASSES.lines(0, labels, outputs)


@pytest.mark.parametrize(
    "values",
    [
        lambda y, output: (y,),
        lambda y, output: (y, output, output),
        lambda y, output: (y, output[:1]),
        lambda y, output: (y, output[:, None]),
    ],
)
def test_columns_of_a_wrong_shape_are_refused(values: object) -> None:
    with pytest.raises(UsageError, match=r"2 samples and the columns a, b take 2 arrays of"):
        Columns(("a", "b"), values).lines(0, np.zeros(2), np.zeros(2))  # type: ignore[arg-type]
