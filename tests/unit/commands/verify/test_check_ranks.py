"""The rules of the rows world, devices, shards and metrics, without ranks."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from hvdtrain.commands.verify.check_ranks import (
    slices as slices_of,
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


def test_worlds_over_two_hosts() -> None:
    row = judge_world(worlds("a x", "a x", "b y"))
    assert row.state == OK
    assert row.evidence == "ranks 0, 1, 2 once each, 2 on a, 1 on b; mpirun started 3"
    assert (row.facts["hosts"], row.facts["ranks"]) == (2, 3)


def test_one_process() -> None:
    assert judge_world(worlds("a x")).evidence == "one process on a; mpirun started 1"


def test_two_hosts_of_one_name_are_two() -> None:
    assert judge_world(worlds("a x", "a y")).facts["hosts"] == 2


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


def processors(*ranks: tuple[str, list[int], str | None, int]) -> list[dict[str, Any]]:
    return [
        {"host": host, "cores": cores, "gpu": gpu, "threads": threads}
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


def drawn(size: int) -> list[dict[str, Any]]:
    """The samples that ``size`` ranks draw if all is correct."""
    samples, batch = 2 * (3 * size + 1) + max(1, size - 1), 3 * size + 1
    return [
        {
            "samples": samples,
            "tracked": True,
            "epochs": [
                [part.indices.tolist() for part in Shards(samples, batch, 7, rank, size).epoch(e)]
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
    for total in (3 * size + 1, sum(map(len, slices_of(size)))):
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
    slices = slices_of(size)
    assert sorted(sample for part in slices for sample in part) == list(
        range(sum(map(len, slices)))
    )
    assert size == 1 or not slices[0]
