"""For scripts that run on every rank: what has to be refused, and in which words."""

from __future__ import annotations

from collections.abc import Callable

from hvdtrain.errors import HvdtrainError, UsageError


def expect_error(
    action: Callable[[], object], *words: str, kind: type[HvdtrainError] = UsageError
) -> None:
    """Fail unless ``action`` raises an error of this ``kind`` that says all ``words``."""
    try:
        action()
    except kind as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"no error with {words}")
