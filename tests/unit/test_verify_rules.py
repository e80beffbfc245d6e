"""What each step's row says of what the ranks measured: the rules, without any rank."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.environment.verification import (
    average_metrics,
    broadcast_state,
    distribute_optimizer,
    initialize,
    pin_device,
    save_checkpoint,
    scale_learning_rate,
    shard_data,
)
from hvdtrain.environment.verification.rows import FAILED, OK
from hvdtrain.steps.learning_rate import LearningRate, scale_factor
from hvdtrain.steps.sharding import Shards

SIZES = st.integers(1, 9)


def worlds(*hosts: str) -> list[dict[str, Any]]:
    """What the ranks on these hosts tell where all is well."""
    return [
        {
            "claimed": vars(initialize.true_world(rank, list(hosts))),
            "launcher": ["mpirun", rank, len(hosts)],
            "strategy": "horovod",
            "host": host,
            "process": 100 + rank,
        }
        for rank, host in enumerate(hosts)
    ]


def test_worlds_over_two_hosts() -> None:
    row = initialize.judge(worlds("a x", "a x", "b y"))
    assert row.state == OK
    assert row.evidence == "ranks 0, 1, 2 once each, 2 on a, 1 on b; mpirun started 3"
    assert (row.facts["hosts"], row.facts["ranks"]) == (2, 3)


def test_one_process() -> None:
    assert initialize.judge(worlds("a x")).evidence == "one process on a; mpirun started 1"


def test_two_hosts_of_one_name_are_two() -> None:
    assert initialize.judge(worlds("a x", "a y")).facts["hosts"] == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda facts: facts[1]["claimed"].update(rank=0), "rank 1 believes it is 0 of 2"),
        (lambda facts: facts[0]["claimed"].update(size=1), "rank 0 believes it is 0 of 1"),
        (lambda facts: facts[1]["claimed"].update(local_rank=0), "(local 0 of 2, 1 host)"),
        (lambda facts: facts[1].update(process=100), "2 ranks are 1 processes"),
        (lambda facts: facts[1].update(launcher=["mpirun", 0, 2]), "numbers them 0, 0"),
        (lambda facts: [one["launcher"].__setitem__(2, 3) for one in facts], "mpirun started 3"),
    ],
)
def test_false_worlds(change: Any, words: str) -> None:
    facts = copy.deepcopy(worlds("a x", "a x"))
    change(facts)
    row = initialize.judge(facts)
    assert row.state == FAILED
    assert words in row.evidence


def processors(*ranks: tuple[str, list[int], str | None, int]) -> list[dict[str, Any]]:
    return [
        {"host": host, "cores": cores, "gpu": gpu, "threads": threads}
        for host, cores, gpu, threads in ranks
    ]


@pytest.mark.parametrize(
    ("ranks", "state", "words"),
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
def test_devices(ranks: Any, state: str, words: str) -> None:
    row = pin_device.judge(processors(*[(f"{host} boot", *rest) for host, *rest in ranks]))
    assert (row.state, words in row.evidence) == (state, True), row.evidence


def drawn(size: int) -> list[dict[str, Any]]:
    """What ``size`` ranks draw by the true rule."""
    samples, batch = 2 * (3 * size + 1) + max(1, size - 1), 3 * size + 1
    return [
        {
            "samples": samples,
            "told": True,
            "epochs": [
                [part.indices.tolist() for part in Shards(samples, batch, 7, rank, size).epoch(e)]
                for e in range(shard_data.EPOCHS)
            ],
        }
        for rank in range(size)
    ]


@given(SIZES)
def test_true_shards(size: int) -> None:
    row = shard_data.judge(drawn(size))
    assert row.state == OK, row.evidence


@given(SIZES, st.data())
def test_any_one_sample_elsewhere_is_found(size: int, data: st.DataObject) -> None:
    facts = drawn(size)
    places = [
        (rank, epoch, step)
        for rank, one in enumerate(facts)
        for epoch, steps in enumerate(one["epochs"])
        for step, part in enumerate(steps)
        if part
    ]
    rank, epoch, step = data.draw(st.sampled_from(places))
    part = facts[rank]["epochs"][epoch][step]
    old = part[0]
    part[0] = data.draw(st.integers(-1, facts[0]["samples"]).filter(lambda new: new != old))
    assert shard_data.judge(facts).state == FAILED


def test_unequal_steps_and_parts_untold() -> None:
    facts = drawn(2)
    facts[1]["epochs"][0].append([])
    assert "steps by rank: 3, 4" in shard_data.judge(facts).evidence
    facts = drawn(2)
    facts[1]["told"] = False
    assert "cannot weigh it" in shard_data.judge(facts).evidence


@given(
    st.sampled_from(list(scale_learning_rate.FACTORS)),
    st.sampled_from(scale_learning_rate.SCHEDULES),
    st.floats(0, 8, exclude_max=True),
    SIZES,
)
def test_the_rule_anew_is_the_rule(scaling: str, schedule: str, place: float, size: int) -> None:
    rate = LearningRate(
        scale_learning_rate.BASE,
        scale_factor(scaling, size),
        epochs=scale_learning_rate.EPOCHS,
        warmup_epochs=scale_learning_rate.WARMUP,
        schedule=schedule,
        milestones=scale_learning_rate.MILESTONES,
        decay=scale_learning_rate.DECAY,
    )
    expected = scale_learning_rate.rule(scaling, schedule, place, size)
    assert math.isclose(rate(place), expected, rel_tol=1e-12, abs_tol=1e-15)


def rates(size: int) -> list[dict[str, Any]]:
    rule = scale_learning_rate.rule
    told = [rule(*kind, place, size) for kind, place in scale_learning_rate._kinds()]
    applied = [rule("linear", "cosine", place, size) for place in scale_learning_rate.APPLIED]
    return [{"told": list(told), "applied": list(applied)} for _ in range(size)]


def test_learning_rates() -> None:
    assert scale_learning_rate.judge(rates(3)).state == OK
    for field in ("told", "applied"):
        for value in (0.1001, float("nan")):
            facts = rates(3)
            facts[2][field][-1] = value
            assert scale_learning_rate.judge(facts).state == FAILED, (field, value)


def gradients(size: int) -> list[dict[str, Any]]:
    whole = [[1.0, -2.0], [0.5, 0.25], [0.0, 3.0]]
    return [{"applied": copy.deepcopy(whole), "whole": whole, "tensors": 2} for _ in range(size)]


def test_gradients() -> None:
    row = distribute_optimizer.judge(gradients(3))
    assert row.state == OK
    assert row.evidence == (
        "max difference between ranks 0, to one rank's 0; 3 ranks, 2 tensors, samples 1+3+5, "
        "0+3+5, 1+3+0"
    )
    facts = gradients(3)
    facts[1]["applied"][2][0] = 1e-7
    row = distribute_optimizer.judge(facts)
    assert row.state == FAILED
    assert row.evidence.startswith("rank 1 applied other gradients than rank 0; ")
    facts = gradients(2)
    for one in facts:  # equal on all ranks, and wrong
        one["applied"][0][0] = 2.0
    assert distribute_optimizer.judge(facts).state == FAILED
    facts[1]["applied"][0][0] = float("nan")
    assert distribute_optimizer.judge(facts).state == FAILED


@given(SIZES)
def test_shares_leave_a_rank_without_samples(size: int) -> None:
    shares = distribute_optimizer.shares(size)
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
    row = broadcast_state.judge(states([0.0, 2.0], [0.0, 2.0]))
    assert row.state == OK
    assert "before 1.0, after 0" in row.evidence
    for wrong in ([1.0, 2.0], [0.0, 2.0 + 4e-16], [0.0], [float("nan"), 2.0]):
        row = broadcast_state.judge(states([0.0, 2.0], wrong))
        assert row.state == FAILED, wrong
        assert row.evidence.startswith("not so on rank 1: ")
    # Equal on all ranks, but not what rank 0 had.
    assert broadcast_state.judge(states([1.0, 2.0], [1.0, 2.0])).state == FAILED


def saved(*written: int, **root: Any) -> list[dict[str, Any]]:
    good = {
        "failure": "",
        "found": ["step-000000001"],
        "bytes": 10_627,
        "tensors": 56,
        "loaded": True,
        "difference": 0.0,
    }
    facts = [{**good, "written": count} for count in written]
    facts[0].update(root)
    return facts


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (saved(3, 3), "ranks 0, 1 wrote"),
        (saved(0, 0), "no rank wrote"),
        (saved(3, 0, found=["step-000000001", ".partial-x"]), "where one checkpoint was due"),
        (saved(3, 0, found=[]), "nothing where one checkpoint was due"),
        (saved(3, 0, loaded=False), "no checkpoint could be read"),
        (saved(3, 0, difference=1e-9), "read back with a difference of 1e-09"),
        (saved(3, 0, difference=math.nan), "read back with a difference of nan"),
        (saved(3, 0, failure="CheckpointError: full"), "rank 0: CheckpointError: full"),
    ],
)
def test_wrong_writers(facts: Any, words: str) -> None:
    row = save_checkpoint.judge(facts)
    assert row.state == FAILED
    assert words in row.evidence


def test_one_writer() -> None:
    row = save_checkpoint.judge(saved(3, 0, 0))
    assert row.state == OK
    assert row.evidence == (
        "rank 0 of 3 wrote 3 files, 10,627 bytes; read back: max difference 0, 56 tensors"
    )


def averaged(size: int) -> list[dict[str, Any]]:
    rounds = []
    for total in (3 * size + 1, sum(map(len, average_metrics.slices(size)))):
        loss = sum(map(average_metrics.loss_of, range(total))) / total
        accuracy = sum(map(average_metrics.is_correct, range(total))) / total
        rounds.append({"loss": loss, "accuracy": accuracy, "count": total, "mine": 1})
    return [{"rounds": copy.deepcopy(rounds)} for _ in range(size)]


@given(SIZES)
def test_metrics(size: int) -> None:
    assert average_metrics.judge(averaged(size)).state == OK
    for field, value in (("loss", math.nan), ("loss", 1.0), ("accuracy", 2.0), ("count", 1)):
        facts = averaged(size)
        facts[-1]["rounds"][1][field] = value
        assert average_metrics.judge(facts).state == FAILED, field


@given(SIZES)
def test_slices_are_disjoint_and_whole(size: int) -> None:
    slices = average_metrics.slices(size)
    assert sorted(sample for part in slices for sample in part) == list(
        range(sum(map(len, slices)))
    )
    assert size == 1 or not slices[0]
