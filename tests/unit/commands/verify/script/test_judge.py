"""The rows of a script by the records of its ranks: correct scripts, and faults in their rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from hvdtrain.commands.verify.rows import FAILED, NOT_SEEN, OK
from hvdtrain.commands.verify.script.judge import rows

LOCAL = [[3.0, 0.0, -2.0, 1.0], [1.0, 4.0, 0.0, -1.0]]
MEAN = [2.0, 2.0, -1.0, 0.0]

Records = list[dict[str, Any]]


def update(rank: int, number: int, rows: int) -> dict[str, Any]:
    weights = {"digest": f"weights {number}", "sample": [1.0 * number, 2.0]}
    return {
        "rows": rows,
        "tensors": 4,
        "values": 100,
        "before": weights,
        "after": weights,
        "applied": {"digest": "applied", "sample": list(MEAN)},
        "local": {"digest": f"local {rank}", "sample": list(LOCAL[rank])},
        "state": "state",
    }


def script(size: int = 2, rate: float = 0.2) -> Records:
    """Return the records of the ranks of a correct script."""
    return [
        {
            "launcher": ["mpirun", rank, size] if size > 1 else [None, 0, 1],
            "host": "node",
            "process": rank,
            "cores": [0, 1],
            "world": {"rank": rank, "size": size, "local_rank": rank, "local_size": size},
            "processor": {"gpu": None, "threads": 1},
            "calls": [
                {"name": "broadcast_parameters", "update": 0, "values": 100},
                {"name": "Dataset.shard", "update": 0, "shards": size, "shard": rank},
            ],
            "updates": [update(rank, number, 16) for number in range(5)],
            "rates": [rate] * 5,
            "initial_rate": 0.0,
            "epoch": 5,
            "ends": [16, 32, 48, 64, 80],
            "rows": [f"{rank}-{row}" for row in range(80)],
            "loader": None,
            "reduced": 20,
            "metrics": [["loss", [1.0 + rank], [1.5]]],
            "written": ["/work/model.pt"] if rank == 0 else [],
            "waiting": None,
            "done": 5,
            "hvdtrain": False,
            "ended": "updates",
        }
        for rank in range(size)
    ]


SINGLE_RANK = script(1, 0.1)[0]


def states(records: Records, single_rank: dict[str, Any] | None = SINGLE_RANK) -> dict[int, str]:
    return {row.step: row.state for row in rows(records, single_rank)}


def test_a_correct_script() -> None:
    judged = rows(script(), SINGLE_RANK)
    assert [(row.step, row.state) for row in judged] == [(step, OK) for step in range(1, 9)]
    fragments = [
        "ranks 0, 1 once each, 2 on node; mpirun started 2",
        "node: 1 + 1 = 2 threads on 2 cores",
        "Dataset.shard gives 2 shards; 0 of 160 samples seen",
        "0.2 in 5 updates on 2 ranks, 0.1 on one rank: linear rule, x 2",
        "max difference between ranks 0 over 5 updates, 4 tensors; to the mean",
        "broadcast_parameters; max difference to rank 0 before update 1: 0, 2 ranks, 4 tensors",
        "rank 0 wrote 1 file",
        "loss: 1, 2 by rank, 1.5 on all after the reduction",
    ]
    for row, fragment in zip(judged, fragments, strict=True):
        assert fragment in row.evidence


def test_a_single_rank_shows_few_steps() -> None:
    judged = states([SINGLE_RANK], None)
    assert [judged[step] for step in range(1, 9)] == [OK, OK, *[NOT_SEEN] * 4, OK, OK]


def each(change: Callable[[dict[str, Any]], object]) -> Callable[[Records], object]:
    return lambda records: [change(record) for record in records]


def on(rank: int, change: Callable[[dict[str, Any]], object]) -> Callable[[Records], object]:
    return lambda records: change(records[rank])


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda record: record.update(
        calls=[call for call in record["calls"] if call["name"] != name]
    )


def gradients(values: Callable[[int], list[float]]) -> Callable[[Records], object]:
    def change(records: Records) -> None:
        for rank, record in enumerate(records):
            for update in record["updates"]:
                update["applied"] = {"digest": str(values(rank)), "sample": values(rank)}

    return change


def drifting(from_update: int) -> Callable[[dict[str, Any]], object]:
    def change(record: dict[str, Any]) -> None:
        for update in record["updates"][from_update:]:
            update["before"] = {"digest": "drifted", "sample": [9.0, 2.0]}

    return change


def different_until(update_number: int) -> Callable[[dict[str, Any]], object]:
    def change(record: dict[str, Any]) -> None:
        for update in record["updates"][:update_number]:
            update["before"] = {"digest": "own", "sample": [7.0, 2.0]}

    return change


def loader(**facts: Any) -> Callable[[dict[str, Any]], object]:
    random = {"sampler": "RandomSampler", "replicas": None, "rank": None, "samples": 99}
    return lambda record: record.update(loader={**random, "epochs": [], **facts})


def unsharded(records: Records) -> None:
    each(without("Dataset.shard"))(records)


def rate(*values: float) -> Callable[[dict[str, Any]], object]:
    return lambda record: record.update(rates=[*values, *values[-1:] * (5 - len(values))])


def batch(rows: int) -> Callable[[dict[str, Any]], object]:
    return lambda record: [update.update(rows=rows) for update in record["updates"]]


def broadcasting(values: int) -> Callable[[dict[str, Any]], object]:
    """Broadcast single values instead of all parameters."""
    call = {"name": "broadcast_", "update": 0, "values": values}
    return lambda record: record["calls"].__setitem__(0, call)


def showing(*marks: str) -> Callable[[dict[str, Any]], object]:
    """Add samples to the last update."""
    return lambda record: (record["rows"].extend(marks), record.update(ends=[16, 32, 48, 64, 99]))


def same_rows(records: Records) -> None:
    records[1]["rows"] = list(records[0]["rows"])


FAULTS: list[tuple[int, str, Callable[[Records], object], str]] = [
    (1, "init is not called", each(lambda r: r.update(world=None)), "hvd.init() was not called"),
    (
        1,
        "worlds of one",
        each(lambda r: r["world"].update(rank=0, size=1)),
        "rank 0 of 1; rank 0 of 1",
    ),
    (1, "local ranks", each(lambda r: r["world"].update(local_rank=0)), "local ranks"),
    (2, "all cores each", each(lambda r: r["processor"].update(threads=2)), "4 threads on 2 cores"),
    (3, "the same samples", same_rows, "80 of 80 samples seen were on more than one rank"),
    (3, "the same shard", on(1, lambda r: r["calls"][1].update(shard=0)), "shards 0 of 2, 0 of 2"),
    (3, "too many shards", each(lambda r: r["calls"][1].update(shards=4)), "0 of 4, 1 of 4"),
    (
        3,
        "a sampler of all",
        lambda e: (unsharded(e), each(loader(drawn=99, samples=99, probes=["a"]))(e)),
        "every rank draws from the same 99 samples",
    ),
    (
        3,
        "the same order in each epoch",
        each(loader(sampler="DistributedSampler", epochs=[[0, 0], [0, 2]])),
        "call set_epoch(epoch) of the DistributedSampler",
    ),
    (4, "not scaled", each(rate(0.1)), "though the global batch is 2 times larger"),
    (
        4,
        "not scaled in the first updates",
        lambda e: (each(rate(0.1))(e), each(lambda r: r.update(epoch=None))(e)),
        "2 times larger; use --updates all",
    ),
    (4, "size squared", each(rate(0.4)), "on one rank: x 4, more than the linear rule's 2"),
    (
        4,
        "a warm-up to size squared",
        each(rate(0.1, 0.2, 0.3, 0.4)),
        "x 4, more than the linear rule's 2",
    ),
    (4, "scaled on one", on(1, rate(0.1)), "at update 1: 0.2, 0.1 by rank"),
    (5, "own gradients", gradients(lambda rank: LOCAL[rank]), "rank 1 applied different gradients"),
    (5, "rank 0's gradients", gradients(lambda rank: LOCAL[0]), "rank 1 not used (1, "),
    (5, "the sum", gradients(lambda rank: [2 * v for v in MEAN]), "the sum, not the mean"),
    (5, "nothing reduced", each(lambda r: r.update(reduced=0)), "Horovod reduced nothing"),
    (
        6,
        "no broadcast, other weights",
        lambda e: (each(without("broadcast_parameters"))(e), on(1, different_until(5))(e)),
        "no broadcast was executed; max difference to rank 0 before update 1: 7",
    ),
    (
        6,
        "no broadcast, same seed",
        each(without("broadcast_parameters")),
        "equal only because",
    ),
    (
        6,
        "a step count is broadcast",
        each(broadcasting(1)),
        "only 1 value broadcast, of 100 parameters; max difference",
    ),
    (
        6,
        "only the optimizer's state is broadcast",
        each(lambda r: r["calls"][0].update(values=2)),
        "only 2 values broadcast, of 100 parameters",
    ),
    (
        6,
        "a batch is broadcast in each update",
        each(lambda r: r["calls"][0].update(update=3)),
        "no broadcast was executed",
    ),
    (6, "broadcast in vain", on(1, different_until(5)), "before update 1: 7"),
    (
        6,
        "momentum of a checkpoint on one rank",
        on(0, lambda r: r["updates"][0].update(state="resumed")),
        "the optimizer's state differs by rank",
    ),
    (
        6,
        "broadcast on rank 0 only",
        lambda e: (
            on(0, lambda r: r.update(waiting="broadcast_parameters"))(e),
            each(without("broadcast_parameters"))(e),
        ),
        "rank 0 waits in broadcast_parameters, rank 1 did not call it",
    ),
    (7, "all write", on(1, lambda r: r.update(written=["/work/model.pt"])), "ranks 0, 1 wrote"),
    (
        8,
        "not reduced",
        on(1, lambda r: r.update(metrics=[["loss", [2.0], [2.0]]])),
        "loss is 1.5, 2 by rank after the reduction",
    ),
    (8, "on one rank", on(1, lambda r: r.update(metrics=[])), "but not on rank 1"),
]


@pytest.mark.parametrize(
    ("step", "change", "evidence"),
    [pytest.param(step, change, text, id=name) for step, name, change, text in FAULTS],
)
def test_a_fault_fails_only_its_row(
    step: int, change: Callable[[Records], object], evidence: str
) -> None:
    records = copy.deepcopy(script())
    change(records)
    judged = rows(records, SINGLE_RANK)
    assert [row.step for row in judged if row.state == FAILED] == [step]
    assert evidence in judged[step - 1].evidence, judged[step - 1].evidence


def summed_at(value: float, records: Records) -> None:
    gradients(lambda rank: [2 * v for v in MEAN])(records)
    each(rate(value))(records)


RIGHT: list[tuple[int, str, Callable[[Records], object], str, str]] = [
    (4, "square root", each(rate(0.1 * 2**0.5)), OK, "square root rule, x 1.41"),
    (
        4,
        "fixed global batch",
        lambda e: (each(rate(0.1))(e), each(batch(8))(e)),
        OK,
        "unchanged, like the global batch",
    ),
    (
        4,
        "warm-up",
        each(rate(0.1, 0.11, 0.12, 0.13, 0.14)),
        OK,
        "0.1 to 0.14 in 5 updates on 2 ranks, 0.1 on one rank: a warm-up, from x 1 to x 1.4",
    ),
    (
        4,
        "a scheduler that warms up by epochs",
        lambda e: (each(rate(0.1))(e), each(lambda r: r.update(initial_rate=0.2))(e)),
        OK,
        "linear rule, x 2",
    ),
    (4, "rate of one rank, gradients summed", lambda e: summed_at(0.1, e), OK, "linear rule"),
    (5, "gradients summed, rate of one rank", lambda e: summed_at(0.1, e), OK, "at the rate of"),
    (
        4,
        "the rule of hvdtrain",
        lambda e: (
            each(rate(0.17))(e),
            each(
                lambda r: r["calls"].append(
                    {"name": "scale_learning_rate", "update": 0, "base": 0.1, "factor": 2.0}
                )
            )(e),
        ),
        OK,
        "scale_learning_rate gives 0.1 x 2",
    ),
    (4, "another rule", each(rate(0.17)), NOT_SEEN, "x 1.7, no known rule"),
    (
        5,
        "uneven parts",
        gradients(lambda rank: [0.6 * a + 0.4 * b for a, b in zip(*LOCAL, strict=True)]),
        OK,
        "0.6, 0.4 times the local",
    ),
    *(
        (
            step,
            f"Adasum, row {step}",
            lambda e: (
                gradients(lambda rank: LOCAL[rank])(e),
                each(rate(0.1))(e),
                each(lambda r: r["calls"].append({"name": "hvd", "update": 0, "adasum": True}))(e),
            ),
            NOT_SEEN,
            "Adasum",
        )
        for step in (4, 5)
    ),
    (5, "clipped", gradients(lambda rank: [v / 7 for v in MEAN]), OK, "0.0714, 0.0714 times"),
    (
        5,
        "weighed sum",
        lambda e: (
            gradients(lambda rank: [2 * v for v in MEAN])(e),
            each(
                lambda r: r.update(
                    hvdtrain=True, metrics=[["average_metrics over 9 samples", [1.0], [1.0]]]
                )
            )(e),
        ),
        OK,
        "the sum, not the mean, of the local gradients, which are weighted",
    ),
    (6, "tensor by tensor", each(broadcasting(100)), OK, "broadcast_; max difference"),
    (6, "after the first update", on(1, different_until(1)), OK, "before update 2: 0"),
    (6, "drift of later updates", on(1, drifting(1)), OK, "before update 1: 0"),
    (
        3,
        "different data",
        lambda e: (
            unsharded(e),
            [
                loader(drawn=99, samples=99, probes=[str(rank)])(record)
                for rank, record in enumerate(e)
            ],
        ),
        OK,
        "different data on each rank",
    ),
    (
        3,
        "an evaluation in the order of the training",
        each(loader(sampler="DistributedSampler", epochs=[[0, 0], [0, 3], [1, 3], [1, 5]])),
        OK,
        "Dataset.shard gives 2 shards",
    ),
    (3, "nothing to go by", unsharded, NOT_SEEN, "no sampler and no shard call"),
    (
        3,
        "a sampler that pads",
        on(1, showing("0-1", "0-2", "0-3", "0-4")),
        OK,
        "4 of",
    ),
    (3, "duplicates in the data", on(1, showing("0-1")), OK, "1 of 160"),
    (
        7,
        "each its own file",
        on(1, lambda r: r.update(written=["/work/log.1"])),
        OK,
        "in common",
    ),
    (7, "no file", on(0, lambda r: r.update(written=[])), NOT_SEEN, "in 5 updates"),
    (8, "no metric", each(lambda r: r.update(metrics=[])), NOT_SEEN, "in 5 updates"),
]


@pytest.mark.parametrize(
    ("step", "change", "state", "evidence"),
    [pytest.param(s, c, state, text, id=name) for s, name, c, state, text in RIGHT],
)
def test_a_correct_or_unseen_step_is_no_failure(
    step: int, change: Callable[[Records], object], state: str, evidence: str
) -> None:
    records = copy.deepcopy(script())
    change(records)
    judged = rows(records, SINGLE_RANK)
    assert [row.step for row in judged if row.state == FAILED] == []
    assert (judged[step - 1].state, evidence in judged[step - 1].evidence) == (state, True), judged


@pytest.mark.parametrize(
    ("duplicates", "state", "evidence"),
    [
        (
            8,
            OK,
            "80 + 80 samples, all that a single rank sees; 0 of 152 samples seen were on more ",
        ),
        (80, FAILED, "80 of 80 samples seen were on more than one rank"),
    ],
)
def test_duplicates_in_the_data_are_counted_separately(
    duplicates: int, state: str, evidence: str
) -> None:
    """But not if all samples occur twice: the ranks then draw at random."""
    records = copy.deepcopy(script())
    unsharded(records)
    first, second = (record["rows"] for record in records)
    second[:duplicates] = first[:duplicates]
    single_rank = {**SINGLE_RANK, "rows": first + second, "ends": [32, 64, 96, 128, 160]}
    row = rows(records, single_rank)[2]
    assert (row.state, evidence in row.evidence) == (state, True), row
    assert (f"{duplicates} duplicates in the data" in row.evidence) == (duplicates == 8)


def test_a_script_that_ends_before_it_trains() -> None:
    records = script()
    for record in records:
        record.update(
            world=None, updates=[], rows=[], calls=[], metrics=[], written=[], processor=None
        )
    assert set(states(records, None).values()) == {NOT_SEEN}


def test_keras_optimizer_of_horovod_is_named() -> None:
    records = script()
    gradients(lambda rank: LOCAL[rank])(records)
    for record in records:
        record["reduced"] = 0
        name = "horovod.tensorflow.keras.DistributedOptimizer"
        record["calls"].append({"name": name, "update": 0})
    evidence = rows(records, SINGLE_RANK)[4].evidence
    assert "horovod.tensorflow.keras.DistributedOptimizer reduces nothing with Keras 3" in evidence


def summed(part: float) -> Records:
    """A script whose gradients are sums, the local ones ``part`` times ``LOCAL``."""
    records = copy.deepcopy(script())
    for rank, record in enumerate(records):
        for update in record["updates"]:
            update["local"]["sample"] = [part * value for value in LOCAL[rank]]
            update["applied"]["sample"] = [part * sum(pair) for pair in zip(*LOCAL, strict=True)]
    return records


@pytest.mark.parametrize(("part", "state"), [(0.5, OK), (0.7, OK), (1.0, FAILED), (1.4, FAILED)])
def test_a_sum_is_correct_if_divided_by_the_global_batch(part: float, state: str) -> None:
    assert states(summed(part))[5] == state
    assert states(summed(part), single_rank=None)[5] == NOT_SEEN


def sharded_by(rows_of: Callable[[int], list[str]]) -> Records:
    """A script that shards its samples without a known call."""
    records = copy.deepcopy(script())
    for rank, record in enumerate(records):
        record["calls"] = [{"name": "broadcast_parameters", "update": 0, "values": 100}]
        record["rows"] = rows_of(rank)
    return records


def test_shards_are_seen_if_the_ranks_cover_the_samples_of_one_rank() -> None:
    whole = [str(number) for number in range(80)]
    single_rank = {**SINGLE_RANK, "rows": whole}
    assert states(sharded_by(lambda rank: whole[rank::2]), single_rank)[3] == OK
    assert states(sharded_by(lambda rank: whole), single_rank)[3] == FAILED
    assert (
        states(sharded_by(lambda rank: whole[rank:-8:2]), single_rank)[3] == OK
    )  # incomplete batches
    assert states(sharded_by(lambda rank: whole[rank:-12:2]), single_rank)[3] == NOT_SEEN
    assert (
        states(sharded_by(lambda rank: whole[rank::2]))[3] == NOT_SEEN
    )  # other samples on one rank


def ramp(start: float, peak: float, updates: int, offset: float) -> list[float]:
    """A warm-up over an epoch; ``offset``: position within an update that the schedule uses."""
    return [start + (peak - start) * (number + offset) / updates for number in range(updates)]


def judge_rates(ranks: list[float], single_rank: list[float]) -> tuple[str, str]:
    """Judge the rates of two ranks and of one rank, which makes twice as many updates."""
    records = copy.deepcopy(script())
    for record in records:
        record["rates"] = ranks
    row = rows(records, {**SINGLE_RANK, "rates": single_rank})[3]
    return row.state, row.evidence


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("peak", "state"), [(0.1, NOT_SEEN), (0.2, OK)])
def test_a_warm_up_from_zero_is_compared_at_the_same_position(
    offset: float, peak: float, state: str
) -> None:
    """By epochs; only its end distinguishes an unscaled one from a scaled one by updates."""
    result = judge_rates(ramp(0.0, peak, 5, offset), ramp(0.0, 0.1, 10, offset))
    assert result[0] == state, result


@pytest.mark.parametrize(("peak", "state"), [(0.1, FAILED), (0.2, OK)])
def test_a_warm_up_that_has_ended_is_judged_by_its_peak(peak: float, state: str) -> None:
    """By updates; an update of two ranks is at twice the position in the epoch."""
    single_rank = [*ramp(0.0, 0.1, 4, 1.0), *[0.1] * 8]
    result = judge_rates([*ramp(0.0, peak, 4, 1.0), peak, peak], single_rank)
    assert result[0] == state, result


def test_an_unfinished_warm_up_by_updates_is_no_failure() -> None:
    assert judge_rates(ramp(0.0, 0.05, 6, 1.0), ramp(0.0, 0.05, 12, 1.0))[0] == NOT_SEEN


def test_rates_that_also_rise_on_one_rank_are_no_warm_up() -> None:
    cycle = [0.1, 0.2, 0.3, 0.2, 0.1, 0.2, 0.3, 0.2, 0.1, 0.1]
    assert judge_rates(cycle[:5], cycle)[0] == FAILED
    assert judge_rates([2 * rate for rate in cycle[:5]], cycle)[0] == OK


@pytest.mark.parametrize(("scale", "state"), [(1, FAILED), (2, OK)])
def test_a_decay_by_updates_is_no_warm_up(scale: int, state: str) -> None:
    decay = [0.1 / (1 + number) for number in range(10)]
    assert judge_rates([scale * rate for rate in decay[:5]], decay)[0] == state


def test_a_rank_may_gather_no_value() -> None:
    records = copy.deepcopy(script())
    records[0]["metrics"] = [["wrong ones", [], [3.0, 5.0]]]
    records[1]["metrics"] = [["wrong ones", [3.0, 5.0], [3.0, 5.0]]]
    row = rows(records, SINGLE_RANK)[7]
    assert (row.state, "wrong ones: none, 3 by rank, 3 on all" in row.evidence) == (OK, True)


def test_a_script_that_never_initializes_fails_its_first_row() -> None:
    records = copy.deepcopy(script())
    for record in records:
        record |= {"world": None, "updates": [], "done": 0, "ended": None}
    assert states(records, single_rank=None)[1] == NOT_SEEN
    # The launcher may have killed the other rank before it recorded the error.
    records[1]["ended"] = "ValueError: Horovod has not been initialized; use hvd.init()."
    assert states(records, single_rank=None)[1] == FAILED


def test_threads_set_by_the_script_are_reported_as_such() -> None:
    records = script()
    for record in records:
        record["processor"]["threads"] = 4
        record["calls"].append({"name": "torch.set_num_threads", "update": 0, "threads": 4})
    evidence = rows(records, SINGLE_RANK)[1].evidence
    assert evidence.endswith("on 2 cores; the script calls torch.set_num_threads(4)")


def test_a_rank_ended_too_early_shows_no_metrics() -> None:
    records = script()
    records[0].update(metrics=[], ended=None)  # mpirun ended it when rank 1 failed
    records[1]["ended"] = "FileNotFoundError: model.tmp"
    row = rows(records, SINGLE_RANK)[7]
    assert (row.state, row.evidence[:12]) == (NOT_SEEN, "rank 0 ended")
