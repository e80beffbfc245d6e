"""Seeds: a function of the place alone, and unlike for neighbouring places."""

from __future__ import annotations

import itertools
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.steps.randomness import seed_of

NUMBER = st.integers(0, 2**64 - 1)


def test_neighbouring_places_have_seeds_of_their_own() -> None:
    places = list(itertools.product(range(4), range(50), range(50)))
    seeds = [seed_of(*place) for place in places]
    assert len(set(seeds)) == len(places)
    # Spread over the whole range: each bit is set in about half (5 standard deviations).
    for bit in range(63):
        share = sum(seed >> bit & 1 for seed in seeds)
        assert abs(share - len(seeds) / 2) < 5 * (len(seeds) / 4) ** 0.5


@given(st.lists(NUMBER, min_size=1, max_size=4))
def test_seeds_are_below_2_to_the_63(place: list[int]) -> None:
    assert 0 <= seed_of(*place) < 2**63
    assert seed_of(*place) == seed_of(*place)


@given(st.lists(NUMBER, min_size=1, max_size=3), st.lists(NUMBER, min_size=1, max_size=3))
def test_other_places_have_other_seeds(one: list[int], other: list[int]) -> None:
    assert (seed_of(*one) == seed_of(*other)) == (one == other)


def test_zeros_at_the_end_count() -> None:
    assert len({seed_of(1), seed_of(1, 0), seed_of(1, 0, 0), seed_of(0, 1)}) == 4


def test_another_process_draws_the_same() -> None:
    program = "from hvdtrain.steps.randomness import seed_of; print(seed_of(1, 2, 3))"
    for hash_seed in ("1", "2"):
        result = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
        )
        assert int(result.stdout) == seed_of(1, 2, 3)
