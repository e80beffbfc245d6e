"""Launcher and runtime must agree, and the threads of the ranks must fit the cores."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import UsageError
from hvdtrain.launch.detect import ALONE, Place
from hvdtrain.steps.world import World, check_launch, threads_per_rank


def launched(size: int) -> Place:
    return Place("mpirun (Open MPI)", size - 1, size, size - 1, size)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_agreement_is_silent(size: int) -> None:
    check_launch(launched(size), size, "Horovod")
    check_launch(ALONE, 1, "Horovod")


@pytest.mark.parametrize(("started", "seen"), [(8, 1), (2, 4), (1, 2)])
def test_disagreement_tells_both_numbers_the_cause_and_the_remedy(started: int, seen: int) -> None:
    with pytest.raises(UsageError) as caught:
        check_launch(launched(started), seen, "Horovod")
    message = str(caught.value)
    for word in (f"started {started} process", f"world of {seen}", "mpirun (Open MPI)", "Horovod"):
        assert word in message
    assert "hvdtrain install-horovod --rebuild" in message
    assert "\n" not in message


def test_no_launcher_but_a_world_of_several() -> None:
    with pytest.raises(UsageError, match=r"started 1 process, .*world of 4"):
        check_launch(ALONE, 4, "Horovod")


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_rank_zero_alone_writes(rank: int) -> None:
    world = World(rank, 6, rank, 6, "host", 1)
    assert world.is_writer == (rank == 0)


def cores(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


ALL8 = frozenset(range(8))


@pytest.mark.parametrize(
    ("affinities", "threads"),
    [
        ([ALL8], [8]),
        ([ALL8] * 2, [4, 4]),
        ([ALL8] * 3, [2, 2, 2]),
        ([ALL8] * 8, [1] * 8),
        ([ALL8] * 20, [1] * 20),  # never none
        ([cores(0, 1), cores(2, 3)], [2, 2]),  # bound by the launcher
        ([cores(0, 1, 2), cores(3)], [3, 1]),
        ([cores(0, 1, 2, 3)] * 2 + [cores(4, 5, 6, 7)] * 2, [2, 2, 2, 2]),  # bound by socket
        ([cores(7)], [1]),
    ],
)
def test_threads(affinities: list[frozenset[int]], threads: list[int]) -> None:
    assert [threads_per_rank(affinities, rank) for rank in range(len(affinities))] == threads


SETS = st.frozensets(st.integers(0, 7), min_size=1)


@given(st.lists(SETS, min_size=1, max_size=10))
def test_a_rank_has_a_thread_and_no_more_than_its_cores(affinities: list[frozenset[int]]) -> None:
    for rank, mine in enumerate(affinities):
        assert 1 <= threads_per_rank(affinities, rank) <= len(mine)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_ranks_bound_to_domains_of_cores_never_overfill_them(domains: list[int]) -> None:
    affinities = [frozenset(range(8 * domain, 8 * domain + 8)) for domain in domains]
    for domain in set(domains):
        threads = [
            threads_per_rank(affinities, rank)
            for rank, mine in enumerate(domains)
            if mine == domain
        ]
        assert sum(threads) <= 8
        assert threads == [8 // len(threads)] * len(threads)
