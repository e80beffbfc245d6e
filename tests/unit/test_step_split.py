"""Where a step goes: in closed form, and on ranks that are threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvdtrain.adapters.communicator import Alone, Communicator
from hvdtrain.training import step_split
from hvdtrain.training.result import Clock
from hvdtrain.training.step_split import StepSplit, split
from tests.unit.conftest import OnRanks

PARTS = ("data", "compute", "communication", "waiting")


def test_three_ranks_of_which_the_last_is_late() -> None:
    # (step, data, blocked) of two steps; rank 2 computes 50 ms longer and is blocked for 10 ms.
    early, late = [0.2, 0.01, 0.06], [0.2, 0.01, 0.01]
    found = split(np.array([[early, early], [early, early], [late, late]]))
    assert found["steps"] == 2
    assert found["data"] == pytest.approx(0.01)
    assert found["compute"] == pytest.approx((0.13 + 0.13 + 0.18) / 3)
    assert found["communication"] == pytest.approx(0.01)
    assert found["waiting"] == pytest.approx(0.1 / 3)
    assert (found["slowest_rank"], found["slowest_share"]) == (2, 1.0)
    assert found["undivided"] is None


def test_who_is_late_may_change_from_step_to_step() -> None:
    one, other = [0.2, 0.0, 0.02], [0.2, 0.0, 0.06]
    found = split(np.array([[one, one, other], [other, other, one]]))
    assert found["communication"] == pytest.approx(0.02)  # not what either has in all
    assert found["waiting"] == pytest.approx(0.02)
    assert (found["slowest_rank"], found["slowest_share"]) == (0, pytest.approx(2 / 3))


def test_one_rank_waits_for_nobody() -> None:
    found = split(np.array([[[0.2, 0.05, 0.0017]]]))  # 1.7 ms in collectives with itself
    assert (found["communication"], found["waiting"], found["slowest_rank"]) == (0, 0, None)
    assert found["compute"] == pytest.approx(0.15)


def test_what_cannot_be_told_apart_is_not_invented() -> None:
    found = split(np.array([[[0.2, 0.05, np.nan]], [[0.3, 0.05, np.nan]]]))
    assert [found[part] for part in PARTS[1:]] == [None] * 3
    assert found["undivided"] == pytest.approx(0.2)
    assert found["data"] == pytest.approx(0.05)


@given(
    arrays(
        np.float64,
        st.tuples(st.integers(1, 5), st.integers(1, 6), st.just(2)),
        elements=st.floats(0, 1),
    )
)
def test_the_parts_add_up_to_the_step(times: Any) -> None:
    step = times.sum(-1, keepdims=True) + 0.5
    found = split(np.concatenate([step, times], -1))
    assert sum(found[part] for part in PARTS) == pytest.approx(step.mean())
    assert all(found[part] >= -1e-12 for part in PARTS)


class FakeTime:
    """A clock that stands still until it is told to go on."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_the_times_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, times = FakeTime(), StepSplit()
    monkeypatch.setattr(step_split, "time", clock)

    def batches() -> Any:
        for seconds in (1.0, 2.0):
            clock.now += seconds
            yield seconds

    blocked = 0.0
    for seconds in times.fetching(batches()):
        clock.now += 10
        blocked += seconds / 4
        times.step(blocked)
        with times.meeting():  # counts for the step that comes next
            clock.now += 0.5
    times.resume()  # what was met before an evaluation is no part of a step
    times.step(blocked)
    assert times.data == [1.0, 2.0, 0.0]
    assert times.blocked == [0.25, 1.0, 0.0]


def test_all_ranks_tell_theirs(on_ranks: OnRanks) -> None:
    def action(communicator: Communicator) -> Any:
        clock = Clock()
        for number in range(10):
            clock.split.data.append(0.0)
            clock.split.blocked.append(0.1 if communicator.rank else 0.3)
            clock.seconds.append(1.0)
            if number == 5:  # a timeline was recorded then
                clock.left_out.add(number)
        return clock.step_split(communicator)

    for found in on_ranks(3, action):
        assert found["steps"] == 7  # two are dropped
        assert found["communication"] == pytest.approx(0.1)
        assert found["waiting"] == pytest.approx(0.2 / 3)
        assert found["slowest_rank"] == 1  # the first of those that come last together


def test_without_a_step_there_is_nothing_to_take_apart() -> None:
    assert Clock().step_split(Alone()) is None


def test_of_a_long_training_the_last_steps_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_split, "MOST", 3)
    times = StepSplit()
    for seconds in (9.0, 9.0, 1.0, 2.0, 3.0):
        times.data.append(seconds)
        times.blocked.append(0.0)
    found = times.gather(Alone(), [10.0] * 5, [True] * 5)
    assert found is not None
    assert (found["steps"], found["data"]) == (3, 2.0)
