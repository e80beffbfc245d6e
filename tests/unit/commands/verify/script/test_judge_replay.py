"""The row of the replay, by what N ranks and one process have computed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hvdtrain.commands.verify.rows import FAILED, NOT_SEEN, OK
from hvdtrain.commands.verify.script.judge_replay import Replayed, replay_row
from hvdtrain.commands.verify.script.replay import Draws

GRADIENTS = np.array([3.0, -2.0, 1.0, 0.5])


def replayed(samples: int, factor: float = 1.0, shift: float = 0.0, updates: int = 2) -> Replayed:
    """Return a run that applies ``factor * GRADIENTS``, the second time shifted."""
    arrays = {}
    for update in range(updates):
        gradients = factor * GRADIENTS + shift * update * np.arange(4)
        arrays[f"gradients {update}"] = gradients
        arrays[f"parameters {update}"] = 1 - 0.1 * gradients
    return Replayed(Draws([[[0, 1], [2, 3]]], [samples] * updates), arrays)


CASES: dict[str, tuple[list[Replayed], Replayed, str, str]] = {
    "equal": ([replayed(2)] * 2, replayed(4), OK, "2 ranks = one process: largest difference 0"),
    "rounding": ([replayed(2, shift=1e-8)] * 2, replayed(4), OK, "at update 2 of 2 (rounding: up"),
    "sum": ([replayed(2, 2.0)] * 2, replayed(4), FAILED, "2 times those of one process"),
    "not reduced": (
        [replayed(2), replayed(2, shift=0.1)],
        replayed(4, shift=0.05),
        FAILED,
        "2 ranks differ from one process: largest difference 0.05 at update 2 of 2 (rounding: up "
        "to 1e-06); the ranks apply different gradients",
    ),
    "uneven": (
        [replayed(3, shift=0.1), replayed(1, shift=0.1)],
        replayed(4),
        FAILED,
        "the mean of the ranks' means, of 3 + 1 samples",
    ),
    "uneven, weighted": (
        [replayed(3, shift=0.1), replayed(1, shift=0.1)],
        replace(replayed(4), draws=Draws([[[0]]], [4, 4], weighted=True)),
        FAILED,
        "divides by something else",
    ),
    "tokens": ([replayed(2, shift=0.1)] * 2, replayed(4), FAILED, "divides by something else"),
    "other data": ([replayed(2)] * 2, replayed(2), NOT_SEEN, "(2 + 2 samples by rank, 2 on one)"),
    "no update": ([replayed(2)] * 2, replayed(4, updates=0), NOT_SEEN, "no update was made"),
    "a crash": (
        [replayed(2)] * 2,
        replace(replayed(4), draws=Draws(obstacle="UnreplayableError: a send")),
        NOT_SEEN,
        "cannot be replayed: UnreplayableError: a send",
    ),
    "other loaders": (
        [replace(replayed(2), draws=Draws(samples=[2, 2], elements=[3] * n)) for n in (1, 2)],
        replayed(4),
        NOT_SEEN,
        "cannot be replayed: the ranks do not draw from the same loaders",
    ),
    "other parameters": (
        [replace(replayed(2), draws=Draws([[[0]]], [2, 2], start=start)) for start in "ab"],
        replayed(4),
        NOT_SEEN,
        "cannot be replayed: the ranks begin with different parameters",
    ),
    "random numbers": (
        [replace(replayed(2), draws=Draws([[[0]]], [2, 2], random=True))] * 2,
        replayed(4, shift=0.1),
        NOT_SEEN,
        "random numbers drawn in the training loop",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_row_of_the_replay(name: str) -> None:
    ranks, whole, state, evidence = CASES[name]
    row = replay_row(ranks, whole, whole, exact=False)
    assert (row.state, evidence in row.evidence) == (state, True), row
    assert row.data()["title"] == "N ranks = one process"


def test_the_tolerance_is_measured_or_exact() -> None:
    ranks, whole, noisy = [replayed(2, shift=1e-3)] * 2, replayed(4), replayed(4, shift=5e-4)
    assert replay_row(ranks, whole, noisy, exact=False).state == OK
    assert replay_row(ranks, whole, replayed(4), exact=False).state == FAILED
    coarse = replay_row(ranks, whole, replayed(4, shift=0.1), exact=False)
    assert (coarse.state, coarse.evidence[-23:]) == (NOT_SEEN, "use --exact to see more")
    chaotic = replay_row(ranks, whole, noisy, exact=True)
    assert (chaotic.state, chaotic.facts["limit"] > 1e-3) == (OK, True)
    close = [replayed(2, shift=1e-8)] * 2
    assert replay_row(close, whole, whole, exact=True).state == FAILED
    cast = replay_row(close, whole, replayed(4, shift=1e-8), exact=True)  # a loss in fp32
    assert (cast.state, "in fp64 (rounding: up to" in cast.evidence) == (OK, True)
    assert replay_row([replayed(2, shift=1e-12)] * 2, whole, whole, exact=True).state == OK


def test_gradients_clipped_before_the_reduction_are_named() -> None:
    local, factors = np.array([[3.0, 1.0, 0.0], [1.0, 0.0, 2.0]]), np.array([0.5, 0.2])
    run = replayed(2, shift=0.1)
    for update in range(2):
        run.arrays[f"sample {update}"] = factors @ local
    ranks = [Replayed(run.draws, run.arrays | {"local 1": values}) for values in local]
    row = replay_row(ranks, replayed(4), replayed(4), exact=True)
    assert row.evidence.endswith(
        "0.5, 0.2 times the gradients of the ranks: clipped or scaled before the reduction"
    )


def test_rounding_errors_that_an_optimizer_enlarges_are_no_difference() -> None:
    ranks, whole = [replayed(2)] * 2, replayed(4)
    for run, sign in ((ranks[0], 1), (whole, -1)):
        for update in range(2):
            run.gradients(update)[3] = sign * 1e-9
            run.parameters(update)[3] = sign * 0.1
    assert replay_row(ranks, whole, whole, exact=True).state == OK
