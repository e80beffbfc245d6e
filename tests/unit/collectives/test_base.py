"""Collectives without a framework: on several ranks, which are threads here, and alone."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest

from hvdtrain.collectives import base as module
from hvdtrain.collectives.base import Alone, Communicator
from hvdtrain.errors import CheckpointError, HvdtrainError, UsageError
from hvdtrain.system.runtime.exit import is_agreed


def test_alone_gives_back_what_it_was_given() -> None:
    alone = Alone()
    vector, data = np.array([1.5, 2.5]), np.array([1, 2], np.uint8)
    assert (alone.rank, alone.size) == (0, 1)
    assert alone.gather(b"mine") == [b"mine"]
    assert alone.broadcast(data).tolist() == [1, 2]
    assert alone.sum(vector).tolist() == [1.5, 2.5]
    assert alone.broadcast_bytes(b"") == b""
    assert alone.broadcast_bytes(b"mine") == b"mine"
    assert alone.together(lambda: 5) == 5
    assert alone.on_root(lambda: 5) == 5


@pytest.mark.parametrize("kind", [UsageError, CheckpointError])
def test_alone_an_error_stays_what_it_is(kind: type[HvdtrainError]) -> None:
    def fail() -> None:
        raise kind("why")

    for collective in (Alone().together, Alone().on_root):
        with pytest.raises(kind) as caught:
            collective(fail)
        assert str(caught.value) == "why"
        assert is_agreed(caught.value)


def test_an_error_may_name_a_file_of_any_bytes(on_ranks: Any) -> None:
    def fail() -> None:
        raise UsageError("train/caf\udce9: why")

    for error in on_ranks(2, lambda c: c.on_root(fail)):
        assert str(error) == "train/caf\udce9: why"


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("length", [0, 1, 4, 5, 8, 21])
def test_bytes_of_any_length_come_from_rank_zero(
    monkeypatch: pytest.MonkeyPatch, on_ranks: Any, size: int, length: int
) -> None:
    monkeypatch.setattr(module, "CHUNK", 4)
    data = bytes(range(length))

    def send(communicator: Communicator) -> bytes:
        return communicator.broadcast_bytes(data if communicator.rank == 0 else b"other words")

    assert on_ranks(size, send) == [data] * size


def test_together_gives_each_rank_its_own_result(on_ranks: Any) -> None:
    assert on_ranks(3, lambda c: c.together(lambda: 10 * c.rank)) == [0, 10, 20]


@pytest.mark.parametrize("kind", [UsageError, CheckpointError])
@pytest.mark.parametrize("failing", [[0], [1], [2], [1, 2], [0, 1, 2]])
def test_where_one_fails_all_raise_the_same(
    on_ranks: Any, kind: type[HvdtrainError], failing: list[int]
) -> None:
    def act(communicator: Communicator) -> Any:
        def action() -> str:
            if communicator.rank in failing:
                raise kind("the file is broken")
            return "fine"

        return communicator.together(action)

    outcomes = on_ranks(3, act)
    assert {type(outcome) for outcome in outcomes} == {kind}
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert all(is_agreed(outcome) for outcome in outcomes)
    assert str(outcomes[0]).endswith("the file is broken")
    # Whose error it is, unless it is everybody's (or rank 0's, who speaks).
    if 0 not in failing:
        where = f"rank {failing[0]} on {socket.gethostname()}"
        assert str(outcomes[0]) == f"{where}: the file is broken"
    if len(failing) == 3:
        assert str(outcomes[0]) == "the file is broken"


class _TaskError(UsageError):
    """A kind that collectives do not know."""


def test_a_kind_of_error_that_is_not_known_is_told_as_its_nearest_base(on_ranks: Any) -> None:
    def act(communicator: Communicator) -> Any:
        def action() -> None:
            if communicator.rank == 1:
                raise _TaskError("no such box")

        return communicator.together(action)

    outcomes = on_ranks(3, act)
    assert [type(outcome) for outcome in outcomes] == [UsageError] * 3
    assert {str(o) for o in outcomes} == {f"rank 1 on {socket.gethostname()}: no such box"}


def test_where_all_fail_for_reasons_of_their_own_the_first_one_is_told(on_ranks: Any) -> None:
    def act(communicator: Communicator) -> Any:
        def action() -> None:
            raise UsageError(f"no /data/{communicator.rank}")

        return communicator.together(action)

    outcomes = on_ranks(2, act)
    assert [str(o) for o in outcomes] == [f"rank 0 on {socket.gethostname()}: no /data/0"] * 2


def test_the_exit_code_survives(on_ranks: Any) -> None:
    """An error that is no wrong use must not become one on its way to the other ranks."""

    def act(communicator: Communicator) -> Any:
        def action() -> None:
            raise HvdtrainError("why")

        return communicator.together(action)

    assert [outcome.exit_code for outcome in on_ranks(2, act)] == [1, 1]


def test_words_of_any_language_survive(on_ranks: Any) -> None:
    def act(communicator: Communicator) -> Any:
        def action() -> None:
            if communicator.rank == 0:
                raise UsageError("/données/köln: fehlt")

        return communicator.together(action)

    assert all("/données/köln: fehlt" in str(outcome) for outcome in on_ranks(2, act))


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

    outcomes = on_ranks(3, act)
    assert {type(outcome) for outcome in outcomes} == {CheckpointError}
    assert all(str(outcome).endswith("full") for outcome in outcomes)


def test_after_a_failure_the_ranks_are_still_in_step(on_ranks: Any) -> None:
    def act(communicator: Communicator) -> Any:
        def action() -> None:
            if communicator.rank == 1:
                raise UsageError("why")

        try:
            communicator.together(action)
        except UsageError:
            return communicator.sum(np.array([1.0]))[0]

    assert on_ranks(3, act) == [3, 3, 3]
