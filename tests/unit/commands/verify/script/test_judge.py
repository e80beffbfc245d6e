"""The rows of a script from what its ranks noted: right scripts, and each fault in its row."""

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
    """What the ranks of a right script note."""
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


ALONE = script(1, 0.1)[0]


def states(everyone: Records, alone: dict[str, Any] | None = ALONE) -> dict[int, str]:
    return {row.step: row.state for row in rows(everyone, alone)}


def test_a_right_script() -> None:
    found = rows(script(), ALONE)
    assert [(row.step, row.state) for row in found] == [(step, OK) for step in range(1, 9)]
    assert [row.evidence for row in found] == [
        "ranks 0, 1 once each, 2 on node; mpirun started 2",
        "node: 1 + 1 = 2 threads on 2 cores",
        "Dataset.shard gives 2 shards; 0 of 160 samples seen were on more than one rank",
        "0.2 in 5 updates on 2 ranks, 0.1 on one alone: linear rule, x 2",
        "max difference between ranks 0 over 5 updates, 4 tensors; to the mean of the ranks' own 0",
        "broadcast_parameters; max difference to rank 0 before update 1: 0, 2 ranks, 4 tensors",
        "rank 0 wrote 1 file, none twice: /work/model.pt",
        "loss: 1, 2 by rank, 1.5 on all after the reduction; a mean of means is right where all "
        "ranks count the same samples",
    ]


def test_one_rank_shows_little() -> None:
    found = states([ALONE], None)
    assert [found[step] for step in range(1, 9)] == [OK, OK, *[NOT_SEEN] * 4, OK, OK]


def each(change: Callable[[dict[str, Any]], object]) -> Callable[[Records], object]:
    return lambda everyone: [change(record) for record in everyone]


def on(rank: int, change: Callable[[dict[str, Any]], object]) -> Callable[[Records], object]:
    return lambda everyone: change(everyone[rank])


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda record: record.update(
        calls=[call for call in record["calls"] if call["name"] != name]
    )


def gradients(values: Callable[[int], list[float]]) -> Callable[[Records], object]:
    def change(everyone: Records) -> None:
        for rank, record in enumerate(everyone):
            for one in record["updates"]:
                one["applied"] = {"digest": str(values(rank)), "sample": values(rank)}

    return change


def drifting(from_update: int) -> Callable[[dict[str, Any]], object]:
    def change(record: dict[str, Any]) -> None:
        for one in record["updates"][from_update:]:
            one["before"] = {"digest": "drifted", "sample": [9.0, 2.0]}

    return change


def different_until(update_number: int) -> Callable[[dict[str, Any]], object]:
    def change(record: dict[str, Any]) -> None:
        for one in record["updates"][:update_number]:
            one["before"] = {"digest": "own", "sample": [7.0, 2.0]}

    return change


def loader(**facts: Any) -> Callable[[dict[str, Any]], object]:
    told = {"sampler": "RandomSampler", "replicas": None, "rank": None, "samples": 99, "epochs": []}
    return lambda record: record.update(loader={**told, **facts})


def unsharded(everyone: Records) -> None:
    each(without("Dataset.shard"))(everyone)


def rate(*values: float) -> Callable[[dict[str, Any]], object]:
    return lambda record: record.update(rates=[*values, *values[-1:] * (5 - len(values))])


def batch(rows: int) -> Callable[[dict[str, Any]], object]:
    return lambda record: [one.update(rows=rows) for one in record["updates"]]


def broadcasting(values: int) -> Callable[[dict[str, Any]], object]:
    """Something else than the model's parameters as a whole is broadcast."""
    call = {"name": "broadcast_", "update": 0, "values": values}
    return lambda record: record["calls"].__setitem__(0, call)


def showing(*marks: str) -> Callable[[dict[str, Any]], object]:
    """The last update has more samples."""
    return lambda record: (record["rows"].extend(marks), record.update(ends=[16, 32, 48, 64, 99]))


def same_rows(everyone: Records) -> None:
    everyone[1]["rows"] = list(everyone[0]["rows"])


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
    (
        3,
        "the same shard",
        on(1, lambda r: r["calls"][1].update(shard=0)),
        "the ranks ask for shards 0 of 2, 0 of 2",
    ),
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
        "2 times larger; a warm-up that rises once per epoch would show with --updates all",
    ),
    (4, "size squared", each(rate(0.4)), "on one alone: x 4, more than the linear rule's 2"),
    (
        4,
        "a warm-up to size squared",
        each(rate(0.1, 0.2, 0.3, 0.4)),
        "x 4, more than the linear rule's 2",
    ),
    (4, "scaled on one", on(1, rate(0.1)), "at update 1: 0.2, 0.1 by rank"),
    (5, "own gradients", gradients(lambda rank: LOCAL[rank]), "rank 1 applied other gradients"),
    (5, "rank 0's gradients", gradients(lambda rank: LOCAL[0]), "rank 1 do not count (1, "),
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
        "equal only because all ranks drew the same first weights",
    ),
    (
        6,
        "a step count is broadcast",
        each(broadcasting(1)),
        "only 1 value broadcast, of 100 parameters; max difference",
    ),
    (
        6,
        "the optimizer's alone is broadcast",
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
        "broadcast on rank 0 alone",
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
    ("step", "change", "words"),
    [pytest.param(step, change, words, id=name) for step, name, change, words in FAULTS],
)
def test_a_fault_shows_in_its_row_alone(
    step: int, change: Callable[[Records], object], words: str
) -> None:
    everyone = copy.deepcopy(script())
    change(everyone)
    found = rows(everyone, ALONE)
    assert [row.step for row in found if row.state == FAILED] == [step]
    assert words in found[step - 1].evidence, found[step - 1].evidence


def summed_at(value: float, everyone: Records) -> None:
    gradients(lambda rank: [2 * v for v in MEAN])(everyone)
    each(rate(value))(everyone)


RIGHT: list[tuple[int, str, Callable[[Records], object], str, str]] = [
    (4, "square root", each(rate(0.1 * 2**0.5)), OK, "square root rule, x 1.41"),
    (
        4,
        "fixed global batch",
        lambda e: (each(rate(0.1))(e), each(batch(8))(e)),
        OK,
        "as the global batch, which stays the same",
    ),
    (
        4,
        "warm-up",
        each(rate(0.1, 0.11, 0.12, 0.13, 0.14)),
        OK,
        "0.1 to 0.14 in 5 updates on 2 ranks, 0.1 on one alone: a warm-up, from x 1 to x 1.4",
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
    (4, "another rule", each(rate(0.17)), NOT_SEEN, "x 1.7, which is no rule"),
    (
        5,
        "uneven parts",
        gradients(lambda rank: [0.6 * a + 0.4 * b for a, b in zip(*LOCAL, strict=True)]),
        OK,
        "0.6, 0.4 times the ranks' own",
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
            "Adasum adds the ranks' steps by a rule of its own",
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
        "the sum, not the mean, of the ranks' own, which are weighed before",
    ),
    (6, "tensor by tensor", each(broadcasting(100)), OK, "broadcast_; max difference"),
    (6, "after the first update", on(1, different_until(1)), OK, "before update 2: 0"),
    (6, "drift of later updates", on(1, drifting(1)), OK, "before update 1: 0"),
    (
        3,
        "own data",
        lambda e: (
            unsharded(e),
            [
                loader(drawn=99, samples=99, probes=[str(rank)])(record)
                for rank, record in enumerate(e)
            ],
        ),
        OK,
        "data of its own on each rank",
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
    (7, "each its own file", on(1, lambda r: r.update(written=["/work/log.1"])), OK, "none twice"),
    (7, "no file", on(0, lambda r: r.update(written=[])), NOT_SEEN, "in 5 updates"),
    (8, "no metric", each(lambda r: r.update(metrics=[])), NOT_SEEN, "in 5 updates"),
]


@pytest.mark.parametrize(
    ("step", "change", "state", "words"),
    [pytest.param(s, c, state, words, id=name) for s, name, c, state, words in RIGHT],
)
def test_what_is_right_or_cannot_be_seen_is_no_failure(
    step: int, change: Callable[[Records], object], state: str, words: str
) -> None:
    everyone = copy.deepcopy(script())
    change(everyone)
    found = rows(everyone, ALONE)
    assert [row.step for row in found if row.state == FAILED] == []
    assert (found[step - 1].state, words in found[step - 1].evidence) == (state, True), found


@pytest.mark.parametrize(
    ("twins", "state", "words"),
    [
        (
            8,
            OK,
            "80 + 80 samples, all that one rank alone sees; 0 of 152 samples seen were on more ",
        ),
        (80, FAILED, "80 of 80 samples seen were on more than one rank"),
    ],
)
def test_what_the_data_has_twice_is_counted_apart(twins: int, state: str, words: str) -> None:
    """But not if all come twice: one rank draws at random then, as the others do."""
    everyone = copy.deepcopy(script())
    unsharded(everyone)
    first, second = (record["rows"] for record in everyone)
    second[:twins] = first[:twins]
    alone = {**ALONE, "rows": first + second, "ends": [32, 64, 96, 128, 160]}
    found = rows(everyone, alone)[2]
    assert (found.state, words in found.evidence) == (state, True), found
    assert (f"({twins} more that the data has several times)" in found.evidence) == (twins == 8)


def test_a_script_that_ends_before_it_trains() -> None:
    everyone = script()
    for record in everyone:
        record.update(
            world=None, updates=[], rows=[], calls=[], metrics=[], written=[], processor=None
        )
    assert set(states(everyone, None).values()) == {NOT_SEEN}


def test_keras_optimizer_of_horovod_is_named() -> None:
    everyone = script()
    gradients(lambda rank: LOCAL[rank])(everyone)
    for record in everyone:
        record["reduced"] = 0
        name = "horovod.tensorflow.keras.DistributedOptimizer"
        record["calls"].append({"name": name, "update": 0})
    evidence = rows(everyone, ALONE)[4].evidence
    assert "horovod.tensorflow.keras.DistributedOptimizer reduces nothing with Keras 3" in evidence


def summed(part: float) -> Records:
    """A script whose gradients are sums, each rank's own ``part`` times as large as ``LOCAL``."""
    everyone = copy.deepcopy(script())
    for rank, record in enumerate(everyone):
        for one in record["updates"]:
            one["local"]["sample"] = [part * value for value in LOCAL[rank]]
            one["applied"]["sample"] = [part * sum(pair) for pair in zip(*LOCAL, strict=True)]
    return everyone


@pytest.mark.parametrize(("part", "state"), [(0.5, OK), (0.7, OK), (1.0, FAILED), (1.4, FAILED)])
def test_a_sum_is_right_if_divided_by_the_global_batch(part: float, state: str) -> None:
    assert states(summed(part))[5] == state
    assert states(summed(part), alone=None)[5] == NOT_SEEN


def unnamed(rows_of: Callable[[int], list[str]]) -> Records:
    """A script that shares its samples out by no call that is known."""
    everyone = copy.deepcopy(script())
    for rank, record in enumerate(everyone):
        record["calls"] = [{"name": "broadcast_parameters", "update": 0, "values": 100}]
        record["rows"] = rows_of(rank)
    return everyone


def test_shards_are_seen_where_the_ranks_cover_what_one_alone_sees() -> None:
    whole = [str(number) for number in range(80)]
    alone = {**ALONE, "rows": whole}
    assert states(unnamed(lambda rank: whole[rank::2]), alone)[3] == OK
    assert states(unnamed(lambda rank: whole), alone)[3] == FAILED
    assert states(unnamed(lambda rank: whole[rank:-8:2]), alone)[3] == OK  # tails are dropped
    assert states(unnamed(lambda rank: whole[rank:-12:2]), alone)[3] == NOT_SEEN
    assert states(unnamed(lambda rank: whole[rank::2]))[3] == NOT_SEEN  # other samples alone


def ramp(start: float, peak: float, updates: int, place: float) -> list[float]:
    """A warm-up over an epoch; ``place``: where in its update the schedule looks."""
    return [start + (peak - start) * (number + place) / updates for number in range(updates)]


def rates_of(ranks: list[float], alone: list[float]) -> tuple[str, str]:
    """The row of the learning rate where one rank makes two updates for each of two ranks."""
    everyone = copy.deepcopy(script())
    for record in everyone:
        record["rates"] = ranks
    found = rows(everyone, {**ALONE, "rates": alone})[3]
    return found.state, found.evidence


@pytest.mark.parametrize("place", [0.0, 1.0])
@pytest.mark.parametrize(("peak", "state"), [(0.1, NOT_SEEN), (0.2, OK)])
def test_a_warm_up_from_nothing_is_compared_at_the_same_place(
    place: float, peak: float, state: str
) -> None:
    """Counted by epochs; unscaled, it is told from a scaled one by updates at its end only."""
    found = rates_of(ramp(0.0, peak, 5, place), ramp(0.0, 0.1, 10, place))
    assert found[0] == state, found


@pytest.mark.parametrize(("peak", "state"), [(0.1, FAILED), (0.2, OK)])
def test_a_warm_up_that_has_ended_is_judged_by_its_peak(peak: float, state: str) -> None:
    """Counted by updates, each of two ranks' ones comes at twice the place in the epoch."""
    found = rates_of([*ramp(0.0, peak, 4, 1.0), peak, peak], [*ramp(0.0, 0.1, 4, 1.0), *[0.1] * 8])
    assert found[0] == state, found


def test_a_warm_up_by_updates_that_goes_on_is_no_failure() -> None:
    assert rates_of(ramp(0.0, 0.05, 6, 1.0), ramp(0.0, 0.05, 12, 1.0))[0] == NOT_SEEN


def test_what_rises_on_one_rank_too_is_no_warm_up() -> None:
    cycle = [0.1, 0.2, 0.3, 0.2, 0.1, 0.2, 0.3, 0.2, 0.1, 0.1]
    assert rates_of(cycle[:5], cycle)[0] == FAILED
    assert rates_of([2 * rate for rate in cycle[:5]], cycle)[0] == OK


@pytest.mark.parametrize(("scale", "state"), [(1, FAILED), (2, OK)])
def test_a_decay_by_updates_is_no_warm_up(scale: int, state: str) -> None:
    decay = [0.1 / (1 + number) for number in range(10)]
    assert rates_of([scale * rate for rate in decay[:5]], decay)[0] == state


def test_a_rank_may_gather_nothing() -> None:
    everyone = copy.deepcopy(script())
    everyone[0]["metrics"] = [["wrong ones", [], [3.0, 5.0]]]
    everyone[1]["metrics"] = [["wrong ones", [3.0, 5.0], [3.0, 5.0]]]
    found = rows(everyone, ALONE)[7]
    assert (found.state, "wrong ones: nothing, 3 by rank, 3 on all" in found.evidence) == (OK, True)


def test_a_script_that_never_initializes_fails_its_first_row() -> None:
    everyone = copy.deepcopy(script())
    for record in everyone:
        record |= {"world": None, "updates": [], "done": 0, "ended": None}
    assert states(everyone, alone=None)[1] == NOT_SEEN
    # The launcher may have killed the other rank before it could tell.
    everyone[1]["ended"] = "ValueError: Horovod has not been initialized; use hvd.init()."
    assert states(everyone, alone=None)[1] == FAILED


def test_threads_that_the_script_has_set_are_told_as_its_own() -> None:
    everyone = script()
    for record in everyone:
        record["processor"]["threads"] = 4
        record["calls"].append({"name": "torch.set_num_threads", "update": 0, "threads": 4})
    evidence = rows(everyone, ALONE)[1].evidence
    assert evidence.endswith("on 2 cores; the script itself calls torch.set_num_threads(4)")


def test_a_rank_that_was_ended_too_early_shows_nothing_of_metrics() -> None:
    everyone = script()
    everyone[0].update(metrics=[], ended=None)  # mpirun ended it where rank 1 failed
    everyone[1]["ended"] = "FileNotFoundError: model.tmp"
    found = rows(everyone, ALONE)[7]
    assert (found.state, found.evidence) == (
        "not seen",
        "rank 0 had to end before any metric was reduced there",
    )
