"""The rules of the eight rows, without ranks."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.commands.verify import check_ranks, check_updates
from hvdtrain.commands.verify.check_ranks import (
    DRAWN,
    is_correct,
    judge_devices,
    judge_metrics,
    judge_shards,
    judge_world,
    loss_of,
    true_world,
)
from hvdtrain.commands.verify.check_updates import (
    expected_rates,
    judge_broadcast,
    judge_checkpoint,
    judge_gradient,
    judge_rate,
)
from hvdtrain.commands.verify.rows import FAILED, OK
from hvdtrain.steps.sharding import Shards

SIZES = st.integers(1, 9)


def worlds(*hosts: str) -> list[dict[str, Any]]:
    """Correct measurements of ranks on these hosts."""
    return [
        {
            "claimed": vars(true_world(rank, list(hosts))),
            "launcher": ["mpirun", rank, len(hosts)],
            "strategy": "horovod",
            "host": host,
            "process": 100 + rank,
        }
        for rank, host in enumerate(hosts)
    ]


def test_true_worlds() -> None:
    row = judge_world(worlds("a x", "a x", "b y"))
    assert row.state == OK
    assert row.evidence == "ranks 0, 1, 2 once each, 2 on a, 1 on b; mpirun started 3"
    assert (row.facts["hosts"], row.facts["ranks"]) == (2, 3)
    assert judge_world(worlds("a x")).evidence == "one process on a; mpirun started 1"
    assert judge_world(worlds("a x", "a y")).facts["hosts"] == 2  # two hosts of one name


@pytest.mark.parametrize(
    ("change", "evidence"),
    [
        (lambda facts: facts[1]["claimed"].update(rank=0), "rank 1 was initialized as rank 0 of 2"),
        (lambda facts: facts[0]["claimed"].update(size=1), "rank 0 was initialized as rank 0 of 1"),
        (lambda facts: facts[1]["claimed"].update(local_rank=0), "(local rank 0 of 2, 1 host)"),
        (lambda facts: facts[1].update(process=100), "processes: 1 for 2 ranks"),
        (lambda facts: facts[1].update(launcher=["mpirun", 0, 2]), "launcher's ranks: 0, 0"),
        (lambda facts: [rank["launcher"].__setitem__(2, 3) for rank in facts], "mpirun started 3"),
    ],
)
def test_false_worlds(change: Any, evidence: str) -> None:
    facts = copy.deepcopy(worlds("a x", "a x"))
    change(facts)
    row = judge_world(facts)
    assert row.state == FAILED
    assert evidence in row.evidence


def processors(
    *ranks: tuple[str, list[int], str | None, int], shares: bool = False
) -> list[dict[str, Any]]:
    return [
        {"host": host, "cores": cores, "gpu": gpu, "threads": threads, "shares": shares}
        for host, cores, gpu, threads in ranks
    ]


@pytest.mark.parametrize(
    ("ranks", "state", "evidence"),
    [
        ([("a", [0, 1], None, 1)] * 2, OK, "1 + 1 = 2 threads on 2 cores"),
        ([("a", [0], None, 1), ("a", [1], None, 1)], OK, "1 + 1 = 2 threads on 2 cores"),
        ([("a", [0, 1], None, 1)], OK, "a: 1 thread on 2 cores"),
        ([("a", [0, 1], None, 2)] * 2, FAILED, "2 + 2 = 4 threads on 2 cores"),
        ([("a", [0, 1], None, 1)] * 3, OK, "3 threads on 2 cores for 3 ranks"),
        ([("a", [0, 1], None, 2), ("b", [0, 1], None, 2)], OK, "a, b: 2 threads on 2 cores"),
        ([("a", [0], "u", 0), ("a", [0], "v", 0)], OK, "2 GPUs for 2 ranks"),
        ([("a", [0], "u", 0), ("a", [0], "u", 0)], FAILED, "1 GPU for 2 ranks"),
        ([("a", [0], "u", 0), ("b", [0], "u", 0)], OK, "a, b: 1 GPU for 1 rank"),
        ([("a", [0], "u", 0), ("a", [0], None, 1)], FAILED, "1 of them on the CPU"),
    ],
)
def test_devices(ranks: Any, state: str, evidence: str) -> None:
    row = judge_devices(processors(*[(f"{host} boot", *rest) for host, *rest in ranks]))
    assert (row.state, evidence in row.evidence) == (state, True), row.evidence


def test_a_gpu_may_be_shared_if_the_user_allows_it() -> None:
    row = judge_devices(processors(("a boot", [0], "u", 0), ("a boot", [1], "u", 0), shares=True))
    assert row.state == OK
    assert row.evidence == "a: 1 GPU for 2 ranks (HVDTRAIN_ALLOW=shared-gpu)"


def drawn(size: int) -> list[dict[str, Any]]:
    """The samples that ``size`` ranks draw if all is correct."""
    samples, batch = 2 * (3 * size + 1) + max(1, size - 1), 3 * size + 1
    return [
        {
            "samples": samples,
            "tracked": True,
            "epochs": [
                [
                    part.indices[: part.count].tolist()
                    for part in Shards(samples, batch, 7, rank, size).epoch(e)
                ]
                for e in range(DRAWN)
            ],
        }
        for rank in range(size)
    ]


@given(SIZES)
def test_true_shards(size: int) -> None:
    row = judge_shards(drawn(size))
    assert row.state == OK, row.evidence


@given(SIZES, st.data())
def test_any_single_wrong_sample_is_detected(size: int, data: st.DataObject) -> None:
    facts = drawn(size)
    parts = [
        (rank, epoch, step)
        for rank, drawn_by_rank in enumerate(facts)
        for epoch, steps in enumerate(drawn_by_rank["epochs"])
        for step, part in enumerate(steps)
        if part
    ]
    rank, epoch, step = data.draw(st.sampled_from(parts))
    part = facts[rank]["epochs"][epoch][step]
    old = part[0]
    part[0] = data.draw(st.integers(-1, facts[0]["samples"]).filter(lambda new: new != old))
    assert judge_shards(facts).state == FAILED


def test_unequal_steps_and_untracked_parts() -> None:
    facts = drawn(2)
    facts[1]["epochs"][0].append([])
    assert "steps by rank: 3, 4" in judge_shards(facts).evidence
    facts = drawn(2)
    facts[1]["tracked"] = False
    assert "current part" in judge_shards(facts).evidence


def averaged(size: int) -> list[dict[str, Any]]:
    rounds = []
    for total in (3 * size + 1, sum(map(len, check_ranks.slices(size)))):
        loss = sum(map(loss_of, range(total))) / total
        accuracy = sum(map(is_correct, range(total))) / total
        rounds.append({"loss": loss, "accuracy": accuracy, "count": total, "local": 1})
    return [{"rounds": copy.deepcopy(rounds)} for _ in range(size)]


@given(SIZES)
def test_metrics(size: int) -> None:
    assert judge_metrics(averaged(size)).state == OK
    for field, value in (("loss", math.nan), ("loss", 1.0), ("accuracy", 2.0), ("count", 1)):
        facts = averaged(size)
        facts[-1]["rounds"][1][field] = value
        assert judge_metrics(facts).state == FAILED, field


@given(SIZES)
def test_slices_are_disjoint_and_complete(size: int) -> None:
    slices = check_ranks.slices(size)
    assert sorted(sample for part in slices for sample in part) == list(
        range(sum(map(len, slices)))
    )
    assert size == 1 or not slices[0]


def rates(size: int) -> list[dict[str, Any]]:
    return [{name: expected_rates(size) for name in ("returned", "applied")} for _ in range(size)]


def test_learning_rates() -> None:
    row = judge_rate(rates(3))
    assert row.state == OK
    assert row.evidence.endswith("in 8 updates; peak 0.1 x 3 = 0.3")
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
    assert row.evidence.startswith("max difference: between ranks 0, ")
    assert row.evidence.endswith("(3 ranks, 2 tensors; samples per rank 1+3+5, 0+3+5, 1+3+0)")
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
    shares = check_updates.shares(size)
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
