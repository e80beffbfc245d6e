"""Throughput in closed form, with a clock of our own."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.training import result
from hvdtrain.training.result import Clock, rows


class FakeTime:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    perf_counter = time


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    clock = FakeTime()
    monkeypatch.setattr(result, "time", clock)
    return clock


def run(fake: FakeTime, steps: list[tuple[float, int]]) -> Clock:
    clock = Clock(started=fake.now)
    fake.now += 16
    clock.resume()
    for seconds, images in steps:
        fake.now += seconds
        clock.step(images)
    return clock


@pytest.mark.parametrize(
    ("steps", "dropped"), [(1, 0), (4, 0), (5, 1), (9, 1), (10, 2), (24, 4), (25, 5), (90, 5)]
)
def test_the_first_steps_are_dropped(fake: FakeTime, steps: int, dropped: int) -> None:
    # A slow step has one image in a second, a fast one 8 in half a second.
    clock = run(fake, [(1.0, 1)] * dropped + [(0.5, 8)] * (steps - dropped))
    figures = clock.figures()
    assert figures["images_per_second_mean"] == 16
    assert figures["images_per_second_std"] == 0
    assert figures["step_seconds_median"] == 0.5


def test_the_mean_is_images_over_seconds_and_the_deviation_over_steps(fake: FakeTime) -> None:
    figures = run(fake, [(1.0, 8), (0.5, 8), (0.25, 8)]).figures()  # 8, 16 and 32 a second
    assert figures["images_per_second_mean"] == pytest.approx(24 / 1.75)
    assert figures["images_per_second_std"] == pytest.approx(statistics.pstdev([8, 16, 32]))
    assert figures["step_seconds_median"] == 0.5


def test_steps_that_do_not_count_are_left_out(fake: FakeTime) -> None:
    clock = run(fake, [])
    for step in range(20):
        recorded = 8 <= step < 12
        fake.now += 9.0 if recorded or step < 4 else 0.5
        clock.step(8, counts=not recorded)
    figures = clock.figures()
    assert figures["images_per_second_mean"] == 16
    assert figures["images_per_second_std"] == 0
    assert figures["step_seconds_median"] == 0.5


def test_where_no_step_counts_there_is_no_throughput(fake: FakeTime) -> None:
    clock = run(fake, [])
    fake.now += 1
    clock.step(8, counts=False)
    figures = clock.figures()
    assert figures["images_per_second_mean"] is figures["images_per_second_std"] is None
    assert figures["step_seconds_median"] is None
    assert figures["seconds_to_first_step"] == 17


def test_seconds_of_the_run(fake: FakeTime) -> None:
    clock = run(fake, [(2.0, 1), (1.0, 1)])
    fake.now += 7
    figures = clock.figures()
    assert figures["seconds_total"] == 16 + 3 + 7
    assert figures["seconds_to_first_step"] == 16 + 2


def test_what_happens_between_steps_does_not_count(fake: FakeTime) -> None:
    clock = run(fake, [(0.5, 4)])
    fake.now += 100  # an evaluation
    clock.resume()
    fake.now += 0.5
    clock.step(4)
    assert clock.figures()["images_per_second_mean"] == 8
    assert clock.figures()["seconds_to_first_step"] == 16.5


def test_without_a_step_there_is_nothing_to_divide(fake: FakeTime) -> None:
    figures = run(fake, []).figures()
    assert figures["images_per_second_mean"] is None
    assert figures["images_per_second_std"] is None
    assert figures["step_seconds_median"] is None
    assert figures["seconds_to_first_step"] is None
    assert Clock().recent_rate(5) == 0


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
    assert figures["images_per_second_mean"] == pytest.approx(images / sum(seconds))
    assert figures["step_seconds_median"] == statistics.median(seconds)


def test_started_is_when_the_process_began() -> None:
    assert Clock().started == pytest.approx(Clock().started)
    assert Clock().figures()["seconds_total"] > 0  # imports count too


SUMMARY: dict[str, Any] = {
    "samples_trained": 12_345,
    "steps_completed": 1_200,
    "epochs_completed": 6,
    "train_loss": 0.12344,
    "eval_loss": 0.05,
    "eval_accuracy": 0.9912,
    "eval_samples": 10_000,
    "images_per_second_mean": 20_000.0,
    "images_per_second_std": 12.34,
    "seconds_total": 61.25,
    "seconds_to_first_step": 3.0,
    "stopped": "finished",
    "checkpoint": None,
    "timeline": None,
}


RATES = [0.7, 20_000.0, 20_500.0]  # one slow step: the deviation is as large as the mean


def test_the_table() -> None:
    table = dict(rows(SUMMARY, RATES))
    assert table["trained"] == "12,345 images in 1,200 steps, 6 whole epochs"
    assert table["training loss"] == "0.1234"
    assert table["test accuracy"] == "99.12 % of 10,000"
    assert table["images/s"] == "20,000.0 in the median step, 0.7 to 20,500.0; over all ranks"
    assert "checkpoint" not in table
    assert dict(rows({**SUMMARY, "checkpoint": "/c/step-1"}, RATES))["checkpoint"] == "/c/step-1"
    recorded = dict(rows({**SUMMARY, "timeline": "t.json"}, RATES))
    assert recorded["timeline"] == "t.json"
    assert recorded["images/s"].endswith(", without the steps recorded")
    nothing = {**SUMMARY, "timeline": "t.json"}
    assert dict(rows(nothing, []))["images/s"] == "- (steps recorded)"


def test_the_table_without_evaluation_and_without_a_step() -> None:
    empty = {
        **SUMMARY,
        **dict.fromkeys(
            [
                "train_loss",
                "eval_loss",
                "eval_accuracy",
                "eval_samples",
                "images_per_second_mean",
                "images_per_second_std",
                "seconds_to_first_step",
            ]
        ),
    }
    table = dict(rows(empty, []))
    assert table["training loss"] == table["test loss"] == table["test accuracy"] == "-"
