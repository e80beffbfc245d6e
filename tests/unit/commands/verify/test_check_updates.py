"""The rules of the rows rate, gradients, broadcast and checkpoint, without ranks."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.commands.verify.check_updates import (
    APPLIED,
    BASE,
    DECAY,
    EPOCHS,
    FACTORS,
    MILESTONES,
    SCHEDULES,
    WARMUP,
    expected_rates,
    judge_broadcast,
    judge_checkpoint,
    judge_gradient,
    judge_rate,
    rule,
)
from hvdtrain.commands.verify.check_updates import (
    shares as shares_of,
)
from hvdtrain.commands.verify.rows import FAILED, OK
from hvdtrain.steps.learning_rate import LearningRate, scale_factor

SIZES = st.integers(1, 9)


@given(
    st.sampled_from(list(FACTORS)),
    st.sampled_from(SCHEDULES),
    st.floats(0, 8, exclude_max=True),
    SIZES,
)
def test_the_rule_equals_the_trainers(
    scaling: str, schedule: str, position: float, size: int
) -> None:
    rate = LearningRate(
        BASE,
        scale_factor(scaling, size),
        epochs=EPOCHS,
        warmup_epochs=WARMUP,
        schedule=schedule,
        milestones=MILESTONES,
        decay=DECAY,
    )
    expected = rule(scaling, schedule, position, size)
    assert math.isclose(rate(position), expected, rel_tol=1e-12, abs_tol=1e-15)


def rates(size: int) -> list[dict[str, Any]]:
    returned = expected_rates(size)
    applied = [rule("linear", "cosine", position, size) for position in APPLIED]
    return [{"returned": list(returned), "applied": list(applied)} for _ in range(size)]


def test_learning_rates() -> None:
    assert judge_rate(rates(3)).state == OK
    for field in ("returned", "applied"):
        for value in (0.1001, float("nan")):
            facts = rates(3)
            facts[2][field][-1] = value
            assert judge_rate(facts).state == FAILED, (field, value)


def gradients(size: int) -> list[dict[str, Any]]:
    whole = [[1.0, -2.0], [0.5, 0.25], [0.0, 3.0]]
    return [{"applied": copy.deepcopy(whole), "whole": whole, "tensors": 2} for _ in range(size)]


def test_gradients() -> None:
    row = judge_gradient(gradients(3))
    assert row.state == OK
    assert row.evidence.startswith("max difference between ranks 0, ")
    assert row.evidence.endswith("3 ranks, 2 tensors, samples 1+3+5, 0+3+5, 1+3+0")
    facts = gradients(3)
    facts[1]["applied"][2][0] = 1e-7
    row = judge_gradient(facts)
    assert row.state == FAILED
    assert row.evidence.startswith("rank 1 applied different gradients")
    facts = gradients(2)
    for rank in facts:  # equal on all ranks, and wrong
        rank["applied"][0][0] = 2.0
    assert judge_gradient(facts).state == FAILED
    facts[1]["applied"][0][0] = float("nan")
    assert judge_gradient(facts).state == FAILED


@given(SIZES)
def test_shares_leave_a_rank_without_samples(size: int) -> None:
    shares = shares_of(size)
    assert all(len(step) == size and sum(step) > 0 for step in shares)
    if size > 1:
        assert shares[1][0] == shares[2][-1] == 0
        assert len(set(shares[0])) == size


def states(*after: list[float]) -> list[dict[str, Any]]:
    return [
        {"tensors": 2, "before": [1.0 * rank, 2.0], "after": list(values)}
        for rank, values in enumerate(after)
    ]


def test_broadcast() -> None:
    row = judge_broadcast(states([0.0, 2.0], [0.0, 2.0]))
    assert row.state == OK
    assert "before 1.0, after 0" in row.evidence
    for wrong in ([1.0, 2.0], [0.0, 2.0 + 4e-16], [0.0], [float("nan"), 2.0]):
        row = judge_broadcast(states([0.0, 2.0], wrong))
        assert row.state == FAILED, wrong
        assert row.evidence.startswith("not equal on rank 1: ")
    # Equal on all ranks, but not the state of rank 0.
    assert judge_broadcast(states([1.0, 2.0], [1.0, 2.0])).state == FAILED


def saved(*written: int, **root: Any) -> list[dict[str, Any]]:
    good = {
        "failure": "",
        "entries": ["step-000000001"],
        "bytes": 10_627,
        "tensors": 56,
        "loaded": True,
        "difference": 0.0,
    }
    facts = [{**good, "written": count} for count in written]
    facts[0].update(root)
    return facts


@pytest.mark.parametrize(
    ("facts", "evidence"),
    [
        (saved(3, 3), "ranks 0, 1 wrote"),
        (saved(0, 0), "no rank wrote"),
        (saved(3, 0, entries=["step-000000001", ".partial-x"]), "expected one checkpoint: step-0"),
        (saved(3, 0, entries=[]), "expected one checkpoint: none"),
        (saved(3, 0, loaded=False), "no checkpoint could be loaded"),
        (saved(3, 0, difference=1e-9), "loaded values differ by 1e-09"),
        (saved(3, 0, difference=math.nan), "loaded values differ by nan"),
        (saved(3, 0, failure="CheckpointError: full"), "rank 0: CheckpointError: full"),
    ],
)
def test_wrong_writers(facts: Any, evidence: str) -> None:
    row = judge_checkpoint(facts)
    assert row.state == FAILED
    assert evidence in row.evidence


def test_one_writer() -> None:
    row = judge_checkpoint(saved(3, 0, 0))
    assert row.state == OK
    assert row.evidence.startswith("rank 0 of 3 wrote 3 files, 10,627 bytes; ")
    assert row.evidence.endswith("max difference 0, 56 tensors")
