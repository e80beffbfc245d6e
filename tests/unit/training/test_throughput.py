"""Throughput in closed form, with a clock of our own."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvdtrain.collectives.base import Communicator, SingleRank
from hvdtrain.training import throughput
from hvdtrain.training.throughput import Clock, split
from tests.unit.conftest import OnRanks


class FakeTime:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    perf_counter = process_time = time


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    clock = FakeTime()
    monkeypatch.setattr(throughput, "time", clock)
    return clock


def run(fake: FakeTime, steps: list[tuple[float, int]]) -> Clock:
    clock = Clock(started=fake.now)
    fake.now += 16
    clock.resume()
    for seconds, images in steps:
        fake.now += seconds
        clock.step(images)
    return clock


def test_the_mean_is_images_over_seconds_and_the_deviation_over_steps(fake: FakeTime) -> None:
    figures = run(fake, [(1.0, 8), (0.5, 8), (0.25, 8)]).figures()  # 8, 16 and 32 a second
    assert figures.images_per_second_mean == pytest.approx(24 / 1.75)
    assert figures.images_per_second_std == pytest.approx(statistics.pstdev([8, 16, 32]))
    assert figures.step_seconds_median == 0.5


def test_steps_that_do_not_count_are_left_out(fake: FakeTime) -> None:
    clock = run(fake, [])
    for step in range(20):
        recorded = 8 <= step < 12
        fake.now += 9.0 if recorded or step < 4 else 0.5
        clock.step(8, counts=not recorded)
    figures = clock.figures()
    assert figures.images_per_second_mean == 16
    assert figures.images_per_second_std == 0
    assert figures.step_seconds_median == 0.5


def test_seconds_of_the_run(fake: FakeTime) -> None:
    clock = run(fake, [(2.0, 1), (1.0, 1)])
    fake.now += 7
    figures = clock.figures()
    assert figures.seconds_total == 16 + 3 + 7
    assert figures.seconds_to_first_step == 16 + 2


def test_the_time_between_steps_does_not_count(fake: FakeTime) -> None:
    clock = run(fake, [(0.5, 4)])
    fake.now += 100  # an evaluation
    clock.resume()
    fake.now += 0.5
    clock.step(4)
    assert clock.figures().images_per_second_mean == 8
    assert clock.figures().seconds_to_first_step == 16.5


@pytest.mark.parametrize("uncounted", [0, 1])
def test_without_a_counted_step_there_is_nothing_to_divide(fake: FakeTime, uncounted: int) -> None:
    clock = run(fake, [])
    for _ in range(uncounted):
        fake.now += 1
        clock.step(8, counts=False)
    figures = clock.figures()
    assert figures.images_per_second_mean is figures.images_per_second_std is None
    assert figures.step_seconds_median is None
    assert figures.seconds_to_first_step == (17 if uncounted else None)
    assert Clock().recent_rate(5) == 0
    assert Clock().step_split(SingleRank()) is None


def test_the_recent_rate_forgets_what_is_older(fake: FakeTime) -> None:
    clock = run(fake, [(8.0, 1), (1.0, 4), (1.0, 8)])
    assert clock.recent_rate(2) == 6
    assert clock.recent_rate(1) == 8
    assert clock.recent_rate(100) == 1.3


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 512)), min_size=1, max_size=40))
def test_the_figures_of_any_course(steps: list[tuple[int, int]]) -> None:
    clock = Clock(seconds=[s / 16 for s, _ in steps], images=[n for _, n in steps])
    kept = steps[min(5, len(steps) // 5) :]
    figures = clock.figures()
    seconds = [s / 16 for s, _ in kept]
    images = sum(n for _, n in kept)
    assert figures.images_per_second_mean == pytest.approx(images / sum(seconds))
    assert figures.step_seconds_median == statistics.median(seconds)


PARTS = ("data", "compute", "communication", "waiting")


def test_three_ranks_of_which_the_last_is_late() -> None:
    # (step, data, blocked) of two steps; rank 2 computes 50 ms longer and is blocked for 10 ms.
    early, late = [0.2, 0.01, 0.06], [0.2, 0.01, 0.01]
    mean = split(np.array([[early, early], [early, early], [late, late]]))
    assert mean.steps == 2
    assert mean.data == pytest.approx(0.01)
    assert mean.compute == pytest.approx((0.13 + 0.13 + 0.18) / 3)
    assert mean.communication == pytest.approx(0.01)
    assert mean.waiting == pytest.approx(0.1 / 3)
    assert (mean.slowest_rank, mean.slowest_share) == (2, 1.0)
    assert mean.undivided is None


def test_who_is_late_may_change_from_step_to_step() -> None:
    early, late = [0.2, 0.0, 0.02], [0.2, 0.0, 0.06]
    mean = split(np.array([[early, early, late], [late, late, early]]))
    # Not what either has in all.
    assert (mean.communication, mean.waiting) == pytest.approx((0.02, 0.02))
    assert (mean.slowest_rank, mean.slowest_share) == (0, pytest.approx(2 / 3))


def test_one_rank_waits_for_nobody() -> None:
    mean = split(np.array([[[0.2, 0.05, 0.0017]]]))  # 1.7 ms in collectives with itself
    assert (mean.communication, mean.waiting, mean.slowest_rank) == (0, 0, None)
    assert mean.compute == pytest.approx(0.15)


def test_an_unknown_split_is_not_invented() -> None:
    mean = split(np.array([[[0.2, 0.05, np.nan]], [[0.3, 0.05, np.nan]]]))
    assert [getattr(mean, part) for part in PARTS[1:]] == [None] * 3
    assert mean.undivided == pytest.approx(0.2)
    assert mean.data == pytest.approx(0.05)


@given(
    arrays(
        np.float64,
        st.tuples(st.integers(1, 5), st.integers(1, 6), st.just(2)),
        elements=st.floats(0, 1),
    )
)
def test_the_parts_add_up_to_the_step(times: Any) -> None:
    step = times.sum(-1, keepdims=True) + 0.5
    mean = split(np.concatenate([step, times], -1))
    assert sum(getattr(mean, part) for part in PARTS) == pytest.approx(step.mean())
    assert all(getattr(mean, part) >= -1e-12 for part in PARTS)


def test_the_times_of_a_rank(fake: FakeTime) -> None:
    clock = Clock()

    def batches() -> Any:
        for seconds in (1.0, 2.0):
            fake.now += seconds
            yield seconds

    blocked = 0.0
    for seconds in clock.fetching(batches()):
        fake.now += 10
        blocked += seconds / 4
        clock.step(8, blocked=blocked)
        with clock.timing_collective():  # counts for the step that comes next
            fake.now += 0.5
    clock.resume()  # what was met before an evaluation is no part of a step
    clock.step(8, blocked=blocked)
    assert list(clock.data) == [1.0, 2.0, 0.0]
    assert list(clock.blocked) == [0.25, 1.0, 0.0]


def test_all_ranks_tell_theirs(on_ranks: OnRanks) -> None:
    def action(communicator: Communicator) -> Any:
        clock = Clock()
        for number in range(10):
            clock.data.append(0.0)
            clock.blocked.append(0.1 if communicator.rank else 0.3)
            clock.seconds.append(1.0)
            if number == 5:  # a timeline was recorded then
                clock.uncounted.add(number)
        return clock.step_split(communicator)

    for mean in on_ranks(3, action):
        assert mean.steps == 7  # two are dropped
        assert mean.communication == pytest.approx(0.1)
        assert mean.waiting == pytest.approx(0.2 / 3)
        assert mean.slowest_rank == 1  # the first of those that come last together


def test_the_last_steps_of_a_long_training_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "MAX_STEPS", 3)
    clock = Clock(seconds=[10.0] * 4, data=[9.0, 1.0, 2.0, 3.0], blocked=[0.0] * 4)
    mean = clock.step_split(SingleRank())
    assert mean is not None
    assert (mean.steps, mean.data) == (3, 2.0)
