"""Collectives without a framework, on several ranks (threads) and on a single rank."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest

from hvdtrain.collectives import base as module
from hvdtrain.collectives.base import Communicator, SingleRank
from hvdtrain.errors import CheckpointError, HvdtrainError, UsageError


def test_a_single_rank_returns_its_data() -> None:
    single = SingleRank()
    vector, data = np.array([1.5, 2.5]), np.array([1, 2], np.uint8)
    assert (single.rank, single.size) == (0, 1)
    assert single.gather(b"mine") == [b"mine"]
    assert single.broadcast(data).tolist() == [1, 2]
    assert single.sum(vector).tolist() == [1.5, 2.5]
    assert single.broadcast_bytes(b"") == b""
    assert single.broadcast_bytes(b"mine") == b"mine"
    assert single.together(lambda: 5) == 5
    assert single.on_root(lambda: 5) == 5


@pytest.mark.parametrize("kind", [UsageError, CheckpointError])
def test_a_single_rank_raises_the_error_unchanged(kind: type[HvdtrainError]) -> None:
    def fail() -> None:
        raise kind("why")

    for collective in (SingleRank().together, SingleRank().on_root):
        with pytest.raises(kind) as caught:
            collective(fail)
        assert str(caught.value) == "why"
        assert caught.value.agreed


def test_an_error_may_name_a_file_of_any_bytes(on_ranks: Any) -> None:
    def fail() -> None:
        raise UsageError("train/caf\udce9: why")

    for error in on_ranks(2, lambda c: c.on_root(fail)):
        assert str(error) == r"train/caf\udce9: why"


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("length", [0, 1, 4, 5, 8, 21])
def test_bytes_of_any_length_are_broadcast_from_rank_zero(
    monkeypatch: pytest.MonkeyPatch, on_ranks: Any, size: int, length: int
) -> None:
    monkeypatch.setattr(module, "CHUNK", 4)
    data = bytes(range(length))

    def send(communicator: Communicator) -> bytes:
        return communicator.broadcast_bytes(data if communicator.rank == 0 else b"other words")

    assert on_ranks(size, send) == [data] * size


@pytest.mark.parametrize("lengths", [(0,), (9,), (5, 0), (4, 9), (0, 0), (7, 0, 3)])
def test_bytes_of_any_length_are_gathered(
    monkeypatch: pytest.MonkeyPatch, on_ranks: Any, lengths: tuple[int, ...]
) -> None:
    monkeypatch.setattr(module, "CHUNK", 4)
    data = [bytes([rank]) * length for rank, length in enumerate(lengths)]
    gathered = on_ranks(len(lengths), lambda c: c.gather_large(data[c.rank]))
    assert gathered == [data] * len(lengths)


def test_together_returns_the_result_of_each_rank(on_ranks: Any) -> None:
    assert on_ranks(3, lambda c: c.together(lambda: 10 * c.rank)) == [0, 10, 20]


@pytest.mark.parametrize("kind", [UsageError, CheckpointError, HvdtrainError])
@pytest.mark.parametrize("failing", [[0], [1], [2], [1, 2], [0, 1, 2]])
def test_if_one_fails_all_raise_the_same(
    on_ranks: Any, kind: type[HvdtrainError], failing: list[int]
) -> None:
    def act(communicator: Communicator) -> Any:
        def action() -> str:
            if communicator.rank in failing:
                raise kind("/données/köln: the file is broken")
            return "fine"

        return communicator.together(action)

    outcomes = on_ranks(3, act)
    assert {type(outcome) for outcome in outcomes} == {kind}
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert all(outcome.agreed for outcome in outcomes)
    assert str(outcomes[0]).endswith("/données/köln: the file is broken")
    # The failing rank is named, unless rank 0 has failed too.
    if 0 not in failing:
        where = f"rank {failing[0]} on {socket.gethostname()}"
        assert str(outcomes[0]) == f"{where}: /données/köln: the file is broken"
    if len(failing) == 3:
        assert str(outcomes[0]) == "/données/köln: the file is broken"


class _TaskError(UsageError):
    """A type that is not in KINDS."""


def test_an_unknown_type_of_error_is_raised_as_its_nearest_base(on_ranks: Any) -> None:
    def act(communicator: Communicator) -> Any:
        def action() -> None:
            if communicator.rank:
                raise _TaskError(f"no box {communicator.rank}")  # of which the first is raised

        return communicator.together(action)

    outcomes = on_ranks(3, act)
    assert [type(outcome) for outcome in outcomes] == [UsageError] * 3
    assert {str(o) for o in outcomes} == {f"rank 1 on {socket.gethostname()}: no box 1"}


def test_on_root_acts_once(on_ranks: Any) -> None:
    acted: list[int] = []

    def act(communicator: Communicator) -> Any:
        return communicator.on_root(lambda: acted.append(communicator.rank) or "done")

    assert on_ranks(3, act) == ["done", None, None]
    assert acted == [0]


def test_on_root_fails_everywhere(on_ranks: Any) -> None:
    def act(communicator: Communicator) -> Any:
        def action() -> None:
            raise CheckpointError("full")

        return communicator.on_root(action)

    assert [str(outcome) for outcome in on_ranks(3, act)] == ["full"] * 3


def test_after_a_failure_the_ranks_are_still_synchronized(on_ranks: Any) -> None:
    def act(communicator: Communicator) -> Any:
        def action() -> None:
            if communicator.rank == 1:
                raise UsageError("why")

        try:
            communicator.together(action)
        except UsageError:
            return communicator.sum(np.array([1.0]))[0]

    assert on_ranks(3, act) == [3, 3, 3]
