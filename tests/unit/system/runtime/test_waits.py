"""Long waits of ranks in collective calls."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from hvdtrain.system.runtime import waits
from hvdtrain.system.runtime.waits import END, SUM, TracedCalls, Waits

HOSTS = ["a", "a", "b"]


class EndedError(Exception):
    """The job would be ended."""


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Waits]:
    """Return three ranks whose reports reach rank 0 at once, however short the wait."""

    def fail(message: str, **_: Any) -> None:
        raise EndedError(message)

    monkeypatch.setattr(waits, "fail", fail)
    monkeypatch.setattr(waits, "REPORT_DELAY", 0.0)
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
        assert not caplog.records  # before LATE_TIMEOUT
        monkeypatch.setattr(waits, "LATE_TIMEOUT", 0.0)
        with caplog.at_level(logging.WARNING):
            ranks[0].check()
            ranks[0].check()
    (record,) = caplog.records
    assert "in save_checkpoint: ranks 0 on a, 1 on a waiting for rank 2 on b" in record.getMessage()


def test_rank_zero_itself_may_be_late(
    ranks: list[Waits], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waits, "LATE_TIMEOUT", 0.0)
    with ranks[1].during("average_metrics"), ranks[2].during("average_metrics"):
        ranks[1].check()
        ranks[2].check()
        ranks[0].check()
    assert "ranks 1 on a, 2 on b waiting for rank 0 on a" in caplog.text


def test_sums_of_a_compiled_step_are_counted(
    ranks: list[Waits], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waits, "LATE_TIMEOUT", 0.0)
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


def test_a_report_is_withdrawn_when_the_wait_ends(ranks: list[Waits]) -> None:
    """Also if the numbers of the ranks differ: this one may be slow now, and call it next."""
    with ranks[1].during("shard_data"):
        pass
    with ranks[1].during(SUM):
        ranks[1].check()
    with ranks[0].during(SUM):
        pass
    with ranks[0].during("average_metrics"):
        ranks[0].check()
    counted = [TracedCalls(3, 2), TracedCalls(3, 3), TracedCalls(3, 3)]
    ranks[1].traced.append(lambda: counted.pop(0) if len(counted) > 1 else counted[0])
    ranks[1].check()  # one is begun or ended meanwhile
    ranks[1].check()
    with ranks[0].during("average_metrics"):
        ranks[0].check()


# The calls of two ranks: those that are done, and that in which they wait.
HISTORIES = {
    "the same call, later": ([SUM], SUM, [SUM, SUM], SUM, False),
    "it may take longer there": (["load"], SUM, [], "load", False),
    "a later sum may follow": ([SUM, "load"], SUM, [SUM], "load", False),
    "a sum that is never made": (["extra"], "average", [], SUM, True),
    "two more sums": (["extra", SUM, "extra"], "average", [SUM, SUM], SUM, True),
    "the sum is made": (["extra", SUM], "average", [], SUM, False),
    "another call": ([SUM], "average", [SUM], "save", True),
    "the end, too early": ([SUM], END, [SUM], "save", True),
    "the end, much too early": ([SUM], END, [SUM, SUM, "save"], SUM, True),
    "the end, after that call": ([SUM, "load"], END, [SUM], "load", False),
    "the end, without that sum": (["extra", "extra"], END, [], SUM, True),
    "both ends": ([SUM], END, [], END, False),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("before", "call", "others", "other", "ends"), HISTORIES.values())
def test_which_waits_can_never_end(
    before: list[str],
    call: str,
    others: list[str],
    other: str,
    ends: bool,
    swapped: bool,
    ranks: list[Waits],
) -> None:
    first, second = (ranks[2], ranks[0]) if swapped else (ranks[0], ranks[2])
    for rank, calls in ((first, before), (second, others)):
        for name in calls:
            with rank.during(name):
                pass
    with first.during(call), second.during(other):
        ranks[2].check()
        if ends:
            with pytest.raises(EndedError):
                ranks[0].check()
        else:
            ranks[0].check()


def test_a_call_that_fails_as_another_rank_has_ended(
    ranks: list[Waits], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "LATE_TIMEOUT", 0.0)
    ranks[1]._call = waits.Wait(1, 0, END, 0.0)
    ranks[1].check()
    monkeypatch.setattr(waits, "REPORT_DELAY", 60.0)
    message = "rank 0 on a in save_checkpoint, rank 1 on a at the end of the program"
    with pytest.raises(EndedError, match=message), ranks[0].during("save_checkpoint"):
        raise RuntimeError("Horovod has been shut down")


def test_a_call_that_fails_at_once_has_not_waited_long(
    ranks: list[Waits], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeError), ranks[0].during("save_checkpoint"):
        raise RuntimeError("another rank is gone")
    assert not caplog.records


def test_the_end_is_waited_for(
    ranks: list[Waits], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in ranks[1:]:
        rank.all_ended.set()  # as soon as rank 0 has ended
        monkeypatch.setattr(rank, "all_ended", threading.Event())
        monkeypatch.setattr(waits, "POLL_INTERVAL", 0.0)
        monkeypatch.setattr(waits, "LATE_TIMEOUT", 0.1)
        rank.finish()  # at most LATE_TIMEOUT seconds, as rank 0 may be busy for an hour
        rank.check()  # no end is withdrawn
        ranks[0].check()
    monkeypatch.setattr(waits, "LATE_TIMEOUT", 60.0)
    ranks[0].finish()
    assert not caplog.records
