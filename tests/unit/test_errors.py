"""Exit codes."""

from __future__ import annotations

import pytest

from hvdtrain import errors


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.HvdtrainError, 1),
        (errors.UsageError, 2),
        (errors.CheckpointError, 1),
        (errors.TrainingError, 1),
    ],
)
def test_exit_codes(kind: type[errors.HvdtrainError], code: int) -> None:
    assert kind("words").exit_code == code
    assert isinstance(kind("words"), errors.HvdtrainError)
    assert str(kind("words")) == "words"


def test_the_codes_by_name() -> None:
    codes = (errors.EXIT_OK, errors.EXIT_FAILURE, errors.EXIT_USAGE, errors.EXIT_PREEMPTED)
    assert codes == (0, 1, 2, 75)
