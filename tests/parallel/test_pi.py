"""Pi over real ranks."""

from __future__ import annotations

import json
import math

import pytest

from tests.conftest import ranks


def pi(number: int, *options: str) -> dict[str, float]:
    outcome = ranks(number, "-m", "hvdtrain.pi", "--json", *options, code=0)
    result: dict[str, float] = json.loads(outcome.out)
    return result


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_estimate_is_within_its_error(number: int) -> None:
    result = pi(number, "--samples=30000001", "--seed=7")
    assert result["samples"] == 30_000_001
    assert result["ranks"] == number
    assert abs(result["pi"] - math.pi) < 4 * result["standard_error"]
    share = math.pi / 4
    expected = 4 * math.sqrt(share * (1 - share) / 30_000_001)
    assert result["standard_error"] == pytest.approx(expected, rel=0.01)


def test_seed_and_ranks_give_the_digits() -> None:
    first, again = pi(2, "--samples=1e6", "--seed=3"), pi(2, "--samples=1e6", "--seed=3")
    assert first["pi"] == again["pi"]
    assert pi(2, "--samples=1e6", "--seed=4")["pi"] != first["pi"]
    assert pi(3, "--samples=1e6", "--seed=3")["pi"] != first["pi"]


def test_naive_agrees() -> None:
    result = pi(2, "--samples=1e6", "--naive")
    assert abs(result["pi"] - math.pi) < 4 * result["standard_error"]
