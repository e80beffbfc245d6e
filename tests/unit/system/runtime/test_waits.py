"""Long waits of ranks in collective calls."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from hvdtrain.system.runtime import waits
from hvdtrain.system.runtime.waits import TracedCalls, Waits

HOSTS = ["a", "a", "b"]


class EndedError(Exception):
    """The job would be ended."""


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Waits]:
    """Return three ranks whose reports reach rank 0 at once, however short the wait."""

    def fail(message: str, **_: Any) -> None:
        raise EndedError(message)

    monkeypatch.setattr(waits, "fail", fail)
    monkeypatch.setattr(waits, "REPORT", 0.0)
    first = Waits(0, HOSTS)
    return [first, *(Waits(rank, HOSTS, first.take) for rank in (1, 2))]


def test_different_calls_of_one_number_end_the_job(ranks: list[Waits]) -> None:
    for rank in ranks:
        with rank.during("average_metrics"):
            pass
    with ranks[0].during("save_checkpoint"), ranks[2].during("average_metrics"):
        ranks[0].check()
        ranks[2].check()
        with pytest.raises(
            EndedError, match="rank 0 on a in save_checkpoint, rank 2 on b in average"
        ):
            ranks[0].check()


def test_nested_calls_are_not_counted(ranks: list[Waits]) -> None:
    with ranks[0].during("resume"), ranks[0].during("broadcast_state"):
        assert ranks[0].number == 1
    with ranks[0].during("average_metrics"):
        assert ranks[0].number == 2


def test_a_pending_call_is_made_and_counted_before_the_next_call(
    ranks: list[Waits],
) -> None:
    def due() -> None:
        with ranks[1].during(waits.SUM):
            ranks[1].before = lambda: None

    ranks[1].before = due
    with ranks[0].during(waits.SUM):
        pass
    for rank in (0, 1):
        with ranks[rank].during("average_metrics"):
            assert ranks[rank].number == 2


def test_a_call_completed_by_rank_zero_is_over(ranks: list[Waits]) -> None:
    with ranks[1].during("save_checkpoint"):
        ranks[1].check()
    with ranks[0].during("save_checkpoint"):
        pass
    with ranks[0].during("average_metrics"), ranks[2].during("average_metrics"):
        ranks[2].check()  # its first call, not this one
        ranks[0].check()


def test_a_late_rank_is_reported_once(
    ranks: list[Waits], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with ranks[0].during("save_checkpoint"), ranks[1].during("save_checkpoint"):
        ranks[1].check()
        ranks[0].check()
        assert not caplog.records  # before the end of PATIENCE
        monkeypatch.setattr(waits, "PATIENCE", 0.0)
        with caplog.at_level(logging.WARNING):
            ranks[0].check()
            ranks[0].check()
    (record,) = caplog.records
    assert "in save_checkpoint: ranks 0 on a, 1 on a waiting for rank 2 on b" in record.getMessage()


def test_rank_zero_itself_may_be_late(
    ranks: list[Waits], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waits, "PATIENCE", 0.0)
    with ranks[1].during("average_metrics"), ranks[2].during("average_metrics"):
        ranks[1].check()
        ranks[2].check()
        ranks[0].check()
    assert "ranks 1 on a, 2 on b waiting for rank 0 on a" in caplog.text


def test_sums_of_a_compiled_step_are_counted(
    ranks: list[Waits], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waits, "PATIENCE", 0.0)
    counted = [TracedCalls(5, 4), TracedCalls(5, 4), TracedCalls(4, 4)]  # rank 2 hangs before it
    for rank, calls in zip(ranks, counted, strict=True):
        with rank.during("broadcast_state"):
            pass
        rank.traced.append(lambda calls=calls: calls)
    for rank in (ranks[1], ranks[2], ranks[0], ranks[0]):
        rank.check()
    (record,) = caplog.records
    assert "the sum of the gradients: ranks 0 on a, 1 on a waiting for rank 2 on b" in (
        record.getMessage()
    )


def test_a_counted_call_is_numbered_after_earlier_traced_calls(ranks: list[Waits]) -> None:
    for rank in ranks:
        rank.traced.append(lambda: TracedCalls(7, 7))
    with ranks[0].during("save_checkpoint"), ranks[1].during("average_metrics"):
        ranks[1].check()
        with pytest.raises(EndedError, match="rank 0 on a in save_checkpoint, rank 1 on a in"):
            ranks[0].check()
