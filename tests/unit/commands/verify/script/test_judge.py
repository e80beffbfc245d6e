"""The rows of a script by the records of its ranks: correct scripts, and faults in their rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hvdtrain.commands.verify.rows import FAILED, NOT_SEEN, OK, StepRow
from hvdtrain.commands.verify.script.judge import rows
from hvdtrain.commands.verify.script.record import (
    Call,
    HorovodWorld,
    Loader,
    MetricReduction,
    Record,
    Update,
    Values,
)
from hvdtrain.commands.verify.script.samples import SeenSamples

LOCAL = [[3.0, 0.0, -2.0, 1.0], [1.0, 4.0, 0.0, -1.0]]
MEAN = [2.0, 2.0, -1.0, 0.0]
SUM = [2 * value for value in MEAN]
ENDS = [16, 32, 48, 64, 80]

Records = list[Record]
Change = Callable[[Records], object]


def update(rank: int, number: int) -> Update:
    weights = Values(f"weights {number}", [1.0 * number, 2.0])
    return Update(16, 4, 100, weights, list(MEAN), list(LOCAL[rank]), "state", loss=2.0)


def script(size: int = 2, rate: float = 0.2) -> Records:
    """Return the records of the ranks of a correct script."""
    return [
        Record(
            launcher="mpirun" if size > 1 else None,
            started=size,
            host="node",
            cores=[0, 1],
            world=HorovodWorld(rank, size, rank, size),
            processor=(None, 1),
            calls=[
                Call("broadcast_parameters", 0, values=100),
                Call("Dataset.shard", 0, shards=size, shard=rank),
            ],
            updates=[update(rank, number) for number in range(5)],
            rates=[rate] * 5,
            sample_weights=[None] * 5,
            seen=SeenSamples([f"{rank}-{row}" for row in range(80)], list(ENDS), 5),
            reduced=20,
            metrics=[MetricReduction("loss", [1.0 + rank], [1.5])],
            written=["/work/model.pt"] if rank == 0 else [],
            done=5,
            ended="updates",
        )
        for rank in range(size)
    ]


SINGLE_RANK = script(1, 0.1)[0]


def judged(*changes: Change, single_rank: Record | None = SINGLE_RANK) -> list[StepRow]:
    """Return the rows of a correct script after some changes of its records."""
    records = script()
    for change in changes:
        change(records)
    return rows(records, single_rank)


def single(marks: list[str], ends: list[int]) -> Record:
    """Return the record of one rank that sees these samples."""
    return replace(SINGLE_RANK, seen=SeenSamples(marks, ends, 5))


def on(rank: int, **fields: Any) -> Change:
    """Change fields of one rank's record."""
    return lambda records: vars(records[rank]).update(copy.deepcopy(fields))


def each(**fields: Any) -> Change:
    """Change fields of all records."""
    return lambda records: [on(rank, **fields)(records) for rank in range(len(records))]


def world(**fields: int) -> Change:
    def change(records: Records) -> None:
        for record in records:
            assert record.world
            record.world = replace(record.world, **fields)

    return change


def call(index: int, *ranks: int, **fields: Any) -> Change:
    """Change one of the calls: 0, the broadcast, or 1, the shard."""

    def change(records: Records) -> None:
        for rank in ranks or range(len(records)):
            calls = records[rank].calls
            calls[index] = replace(calls[index], **fields)

    return change


def calling(name: str, **facts: Any) -> Change:
    """Add a call on all ranks."""

    def change(records: Records) -> None:
        for record in records:
            record.calls.append(Call(name, 0, **facts))

    return change


def without(index: int) -> Change:
    """Remove a call on all ranks: 0, the broadcast, or 1, the shard."""
    return lambda records: [record.calls.pop(index) for record in records]


def updates(*ranks: int, until: int = 5, since: int = 0, **fields: Any) -> Change:
    """Change fields of updates."""

    def change(records: Records) -> None:
        for rank in ranks or range(len(records)):
            for number in range(since, until):
                old = records[rank].updates
                old[number] = replace(old[number], **fields)

    return change


def applied(values: Callable[[int], list[float]]) -> Change:
    """Let each rank apply these gradients."""
    return lambda records: [
        updates(rank, applied=values(rank))(records) for rank in range(len(records))
    ]


def rates(*values: float) -> dict[str, list[float]]:
    return {"rates": [*values, *values[-1:] * (5 - len(values))]}


def loader(sampler: str = "RandomSampler", samples: int = 99, **facts: Any) -> Loader:
    return Loader(sampler, None, None, **{"drawn": None, "samples": samples, **facts})


def showing(*marks: str) -> Change:
    """Add samples to the last update of rank 1."""

    def change(records: Records) -> None:
        records[1].seen.marks.extend(marks)
        records[1].seen.ends[-1] = 99

    return change


def same_samples(records: Records) -> None:
    records[1].seen.marks = list(records[0].seen.marks)


def epoch_of(updates: int | None) -> Change:
    """Let the samples repeat after these updates; None: not yet."""
    return lambda records: [setattr(record.seen, "epoch", updates) for record in records]


OTHER = Values("other", [7.0, 2.0])  # weights that differ from those of the other ranks


def test_a_correct_script() -> None:
    fragments = [
        "ranks 0, 1 once each, 2 on node; mpirun started 2",
        "node: 1 + 1 = 2 threads on 2 cores",
        "Dataset.shard gives 2 shards; 0 of 160 samples seen",
        "0.2 in 5 updates on 2 ranks, 0.1 on one rank: linear rule, x 2",
        "max difference between ranks 0 over 5 updates, 4 tensors; to the mean",
        "broadcast_parameters; max difference to rank 0 before update 1: 0, 2 ranks, 4 tensors",
        "1 file by rank 0",
        "loss: 1, 2 by rank, 1.5 on all after the reduction",
    ]
    for step, (row, fragment) in enumerate(zip(judged(), fragments, strict=True), start=1):
        assert (row.step, row.state) == (step, OK)
        assert fragment in row.evidence


def test_a_single_rank_shows_few_steps() -> None:
    states = [row.state for row in rows([SINGLE_RANK], None)]
    assert states == [OK, OK, *[NOT_SEEN] * 4, OK, OK]


OWN = each(hvdtrain=True, metrics=[MetricReduction("average_metrics over 9 samples", [1.0], [1.0])])
EVEN = on(1, seen=SeenSamples([f"1-{row}" for row in range(74)], [*ENDS[:4], 74], 5))
MEANS = [on(rank, sample_weights=[1 / n] * 5) for rank, n in enumerate((16, 10))]
WRAPPED = calling("horovod.torch.DistributedOptimizer")
HALVED = [EVEN, *(updates(rank, local=[v / 2 for v in LOCAL[rank]]) for rank in (0, 1))]

FAULTS: dict[str, tuple[int, list[Change], str]] = {
    "init is not called": (1, [each(world=None)], "hvd.init() was not called"),
    "worlds of one": (1, [world(rank=0, size=1)], "rank 0 was initialized as rank 0 of 1 ("),
    "local ranks": (1, [world(local_rank=0)], "rank 1 was initialized as rank 1 of 2 ("),
    "all cores each": (2, [each(processor=(None, 2))], "4 threads on 2 cores"),
    "the same samples": (3, [same_samples], "80 of 80 samples seen were on more than one rank"),
    "the same shard": (3, [call(1, shard=0)], "shards 0 of 2, 0 of 2"),
    "too many shards": (3, [call(1, shards=4)], "0 of 4, 1 of 4"),
    "a sampler of all": (
        3,
        [without(1), each(loader=loader(drawn=99, probes=["a"]))],
        "every rank draws from the same 99 samples",
    ),
    "the same order in each epoch": (
        3,
        [each(loader=loader("DistributedSampler", epochs=[(0, 0), (0, 2)]))],
        "call set_epoch(epoch) of the DistributedSampler",
    ),
    "not scaled": (4, [each(**rates(0.1))], "though the global batch is 2 times larger"),
    "not scaled in the first updates": (
        4,
        [each(**rates(0.1)), epoch_of(None)],
        "2 times larger; use --updates all",
    ),
    "scaled, at a fixed global batch": (
        4,
        [updates(samples=8)],
        "linear rule, x 2, though the global batch is that of one rank",
    ),
    "size squared": (4, [each(**rates(0.4))], "on one rank: x 4, more than the linear rule's 2"),
    "a warm-up to size squared": (
        4,
        [each(**rates(0.1, 0.2, 0.3, 0.4))],
        "x 4, more than the linear rule's 2",
    ),
    "scaled on one": (4, [on(1, **rates(0.1))], "at update 1: 0.2, 0.1 by rank"),
    "own gradients": (5, [applied(lambda rank: LOCAL[rank])], "rank 1 applied different gradients"),
    "rank 0's gradients": (5, [updates(applied=LOCAL[0])], "rank 1 not used (1, "),
    "the sum": (5, [updates(applied=SUM)], "the sum, not the mean"),
    "averaged, and divided by the global batch": (
        5,
        [updates(loss=1.02)],
        "though each rank's gradient was already divided by the global batch",
    ),
    "means of uneven parts": (5, [EVEN, WRAPPED, *MEANS], "of the ranks' means"),
    "their sum, divided by the ranks": (
        5,
        [*HALVED, WRAPPED, *MEANS],
        "parts of 16 + 10 samples at update 5: the mean of the ranks' means",
    ),
    "a stand-in that is counted": (
        8,
        [OWN, on(1, stand_ins_counted=2)],
        "average_metrics counts 2 stand-ins of empty parts as samples: count part.count",
    ),
    "nothing reduced": (5, [each(reduced=0)], "Horovod reduced nothing"),
    "no broadcast, other weights": (
        6,
        [without(0), updates(1, before=OTHER)],
        "no broadcast was executed; max difference to rank 0 before update 1: 7",
    ),
    "no broadcast, same seed": (6, [without(0)], "equal only because"),
    "a step count is broadcast": (
        6,
        [call(0, name="broadcast_", values=1)],
        "only 1 value broadcast, of 100 parameters; max difference",
    ),
    "only the optimizer's state is broadcast": (
        6,
        [call(0, values=2)],
        "only 2 values broadcast, of 100 parameters",
    ),
    "a batch is broadcast in each update": (6, [call(0, update=3)], "no broadcast was executed"),
    "broadcast in vain": (6, [updates(1, before=OTHER)], "before update 1: 7"),
    "momentum of a checkpoint on one rank": (
        6,
        [updates(0, until=1, state="resumed")],
        "the optimizer's state differs by rank",
    ),
    "broadcast on rank 0 only": (
        6,
        [on(0, waiting="broadcast_parameters"), without(0)],
        "rank 0 waits in broadcast_parameters, rank 1 did not call it",
    ),
    "all write": (7, [on(1, written=["/work/model.pt"])], "ranks 0, 1 wrote"),
    "not reduced": (
        8,
        [on(1, metrics=[MetricReduction("loss", [2.0], [2.0])])],
        "loss is 1.5, 2 by rank after the reduction",
    ),
    "on one rank": (8, [on(1, metrics=[])], "but not on rank 1"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fails_only_its_row(name: str) -> None:
    step, changes, evidence = FAULTS[name]
    result = judged(*changes)
    assert [row.step for row in result if row.state == FAILED] == [step]
    assert evidence in result[step - 1].evidence, result[step - 1].evidence


FIXED = updates(samples=8)
SUMMED = [updates(applied=SUM), each(**rates(0.1))]
ADASUM = [applied(lambda rank: LOCAL[rank]), each(**rates(0.1), adasum=True)]
UNEVEN = [0.6 * first + 0.4 * second for first, second in zip(*LOCAL, strict=True)]

BY_RULE = calling("scale_learning_rate", base=0.1, factor=2.0)

NO_FAULTS: dict[str, tuple[int, list[Change], str, str]] = {
    "square root": (4, [each(**rates(0.1 * 2**0.5))], OK, "square root rule, x 1.41"),
    "fixed global batch": (
        4,
        [each(**rates(0.1)), FIXED],
        OK,
        "unchanged, like the global batch",
    ),
    "a dataset of one batch": (4, [FIXED, epoch_of(1)], OK, "linear rule, x 2"),
    "a dataset of one batch, augmented": (4, [FIXED, each(loader=loader(drawn=8))], OK, "x 2"),
    "one update": (4, [FIXED, each(done=1)], OK, "linear rule, x 2"),
    "a batch size that was not seen": (4, [updates(samples=0)], OK, "linear rule, x 2"),
    "sums of a fixed global batch, averaged": (4, [FIXED, updates(loss=1.0)], OK, "x 2"),
    "half the gradients at twice the rate": (5, [FIXED, updates(loss=1.0)], OK, "equivalent to it"),
    "warm-up": (
        4,
        [each(**rates(0.1, 0.11, 0.12, 0.13, 0.14))],
        OK,
        "0.1 to 0.14 in 5 updates on 2 ranks, 0.1 on one rank: a warm-up, from x 1 to x 1.4",
    ),
    "a scheduler that warms up by epochs": (
        4,
        [each(**rates(0.1), initial_rate=0.2)],
        OK,
        "linear rule, x 2",
    ),
    "rate of one rank, gradients summed": (4, SUMMED, OK, "linear rule"),
    "gradients summed, rate of one rank": (5, SUMMED, OK, "at the rate of"),
    "the rule of hvdtrain": (
        4,
        [each(**rates(0.17)), BY_RULE],
        OK,
        "scale_learning_rate gives 0.1 x 2",
    ),
    "another rule": (4, [each(**rates(0.17))], NOT_SEEN, "x 1.7, no known rule"),
    "reduced, but to what is unknown": (
        5,
        [updates(applied=SUM, local=None)],
        NOT_SEEN,
        "; reduced, but the local gradients were not seen",
    ),
    "a batch of small losses": (5, [updates(loss=1.2)], OK, "to the mean"),
    "half the loss, of other weights": (5, [updates(loss=1.0, before=OTHER)], OK, "to the mean"),
    "a loss that was not seen": (5, [updates(1, loss=None), updates(0, loss=1.0)], OK, "to the m"),
    "gradients that are not finite": (
        5,
        [updates(since=2, applied=[1.0, math.nan, 0.0, 0.0])],
        NOT_SEEN,
        "the gradients of update 3 are not finite on any rank",
    ),
    "uneven parts": (5, [updates(applied=UNEVEN)], OK, "0.6, 0.4 times the local"),
    "means of uneven parts, weighted before": (
        5,
        [EVEN, WRAPPED, each(sample_weights=[1 / 13] * 5)],
        OK,
        "4 tensors; to the mean",
    ),
    "means of uneven parts, reduced by the script": (
        5,
        [EVEN, *MEANS],
        NOT_SEEN,
        "16 + 10 samples at update 5: correct if the losses are weighted by these numbers",
    ),
    "uneven parts, losses that were not seen": (5, [EVEN], NOT_SEEN, "correct if the losses are"),
    "sums of uneven parts, losses that were not seen": (5, [EVEN, *HALVED], OK, "before"),
    "uneven parts, weighted by hvdtrain": (5, [EVEN, OWN], OK, "4 tensors; to the mean"),
    "a stand-in of hvdtrain has no weight": (
        5,
        [OWN, updates(1, samples=0), updates(applied=LOCAL[0]), BY_RULE],
        OK,
        "to the mean of the local gradients 0",
    ),
    "Adasum, the rate": (4, ADASUM, NOT_SEEN, "Adasum"),
    "Adasum, the gradients": (5, ADASUM, NOT_SEEN, "Adasum"),
    "clipped": (5, [updates(applied=[v / 7 for v in MEAN])], OK, "0.0714, 0.0714 times"),
    "clipped by value": (
        5,
        [updates(applied=[1.0, 1.0, -1.0, 0.0])],
        NOT_SEEN,
        "no weighted sum of the local gradients",
    ),
    "weighed sum": (
        5,
        [updates(applied=SUM), OWN],
        OK,
        "the sum, not the mean, of the local gradients, which are weighted",
    ),
    "tensor by tensor": (6, [call(0, name="broadcast_")], OK, "broadcast_; max difference"),
    "after the first update": (6, [updates(1, until=1, before=OTHER)], OK, "before update 2: 0"),
    "drift of later updates": (6, [updates(1, since=1, before=OTHER)], OK, "before update 1: 0"),
    "different data": (
        3,
        [
            without(1),
            on(0, loader=loader(drawn=99, probes=["0"])),
            on(1, loader=loader(drawn=99, probes=["1"])),
        ],
        OK,
        "different data on each rank",
    ),
    "an evaluation in the order of the training": (
        3,
        [each(loader=loader("DistributedSampler", epochs=[(0, 0), (0, 3), (1, 3), (1, 5)]))],
        OK,
        "Dataset.shard gives 2 shards",
    ),
    "shards that may be of the validation set": (
        3,
        [each(seen=SeenSamples(["0", "1"], [2], 1)), on(1, seen=SeenSamples(["2", "3"], [2], 1))],
        NOT_SEEN,
        "0 of 4 samples seen were on more than one rank, too few to show that these shards are",
    ),
    "a sampler that shows few samples": (
        3,
        [
            each(seen=SeenSamples(["0", "1"], [2], 1)),
            on(1, seen=SeenSamples(["2", "3"], [2], 1)),
            each(loader=Loader("DistributedSampler", 2, 0, None, 99)),
        ],
        OK,
        "gives 2 shards; 0 of 4",
    ),
    "nothing to go by": (3, [without(1)], NOT_SEEN, "no sampler and no shard call"),
    "a sampler that pads": (3, [showing("0-1", "0-2", "0-3", "0-4")], OK, "4 of"),
    "duplicates in the data": (3, [showing("0-1")], OK, "1 of 160"),
    "each its own file": (7, [on(1, written=["/work/log.1"])], OK, "by two ranks"),
    "no file": (7, [on(0, written=[])], NOT_SEEN, "in 5 updates"),
    "no metric": (8, [each(metrics=[])], NOT_SEEN, "in 5 updates"),
    "a barrier": (
        8,
        [each(metrics=[MetricReduction("barrier", [0.0], [0.0])])],
        NOT_SEEN,
        "equal on all ranks before, too",
    ),
    "a barrier before the metric": (
        8,
        [lambda records: [r.metrics.insert(0, MetricReduction("b", [], [])) for r in records]],
        OK,
        "loss: 1, 2 by rank",
    ),
    "a rank that gathers no value": (
        8,
        [
            on(0, metrics=[MetricReduction("wrong ones", [], [3.0, 5.0])]),
            on(1, metrics=[MetricReduction("wrong ones", [3.0, 5.0], [3.0, 5.0])]),
        ],
        OK,
        "wrong ones: none, 3 by rank, 3 on all",
    ),
    "a rank that mpirun ended when another failed": (
        8,
        [on(0, metrics=[], ended=None), on(1, ended="FileNotFoundError: model.tmp")],
        NOT_SEEN,
        "rank 0 ended",
    ),
}


@pytest.mark.parametrize("name", NO_FAULTS)
def test_a_correct_or_unseen_step_is_no_failure(name: str) -> None:
    step, changes, state, evidence = NO_FAULTS[name]
    result = judged(*changes)
    assert [row.step for row in result if row.state == FAILED] == []
    assert (result[step - 1].state, evidence in result[step - 1].evidence) == (state, True), result


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
    marks = [record.seen.marks for record in script()]
    marks[1][:duplicates] = marks[0][:duplicates]
    row = judged(
        without(1),
        on(1, seen=SeenSamples(marks[1], ENDS, 5)),
        single_rank=single(marks[0] + marks[1], [32, 64, 96, 128, 160]),
    )[2]
    assert (row.state, evidence in row.evidence) == (state, True), row
    assert (f"{duplicates} duplicates in the data" in row.evidence) == (duplicates == 8)


@pytest.mark.parametrize(
    ("ended", "epoch", "common", "state"),
    [
        ("updates", None, 0, NOT_SEEN),  # in the middle of an epoch of unknown length
        ("updates", None, 40, OK),  # as without shuffling, with which other ranks would share, too
        ("updates", None, 4, NOT_SEEN),
        ("updates", 5, 0, OK),
        ("its own end", None, 0, OK),
        (None, None, 0, NOT_SEEN),  # killed
    ],
)
def test_a_call_that_shards_is_judged_by_the_samples_of_an_epoch(
    ended: str | None, epoch: int | None, common: int, state: str
) -> None:
    """A call may be of the validation set, and shuffled data that are not sharded seem disjoint."""
    marks = [f"{rank}-{row}" for row in range(common) for rank in (0, 1)]
    seen = SeenSamples([*marks, *map(str, range(80 - 2 * common))], ENDS, epoch)
    row = judged(single_rank=replace(SINGLE_RANK, seen=seen, ended=ended))[2]
    assert row.state == state
    assert row.evidence.endswith("; use --updates all") == (state == NOT_SEEN)


def test_a_script_that_ends_before_it_trains() -> None:
    untrained = each(world=None, processor=None, seen=SeenSamples(), updates=[], calls=[])
    silent = each(metrics=[], written=[])
    assert {row.state for row in judged(untrained, silent, single_rank=None)} == {NOT_SEEN}


def test_keras_optimizer_of_horovod_is_named() -> None:
    name = "horovod.tensorflow.keras.DistributedOptimizer"
    result = judged(applied(lambda rank: LOCAL[rank]), each(reduced=0), calling(name))
    assert f"{name} reduces nothing with Keras 3" in result[4].evidence


@pytest.mark.parametrize(("part", "state"), [(0.5, OK), (0.7, OK), (1.0, FAILED), (1.4, FAILED)])
def test_a_sum_is_correct_if_divided_by_the_global_batch(part: float, state: str) -> None:
    changes = [
        updates(0, local=[part * value for value in LOCAL[0]]),
        updates(1, local=[part * value for value in LOCAL[1]]),
        updates(applied=[part * value for value in SUM]),
    ]
    assert judged(*changes)[4].state == state
    assert judged(*changes, single_rank=None)[4].state == NOT_SEEN


def test_shards_are_seen_if_the_ranks_cover_the_samples_of_one_rank() -> None:
    whole = [str(number) for number in range(80)]

    def state(*parts: list[str], single_rank: Record | None = None) -> str:
        seen = [on(rank, seen=SeenSamples(part, ENDS, 5)) for rank, part in enumerate(parts)]
        return judged(without(1), *seen, single_rank=single_rank or single(whole, ENDS))[2].state

    assert state(whole[::2], whole[1::2]) == OK
    assert state(whole, whole) == FAILED
    assert state(whole[:-8:2], whole[1:-8:2]) == OK  # incomplete batches
    assert state(whole[:-12:2], whole[1:-12:2]) == NOT_SEEN
    assert state(whole[::2], whole[1::2], single_rank=SINGLE_RANK) == NOT_SEEN  # other samples


def ramp(peak: float, updates: int, offset: float) -> list[float]:
    """A warm-up from zero over an epoch; ``offset``: position in an update that it uses."""
    return [peak * (number + offset) / updates for number in range(updates)]


CYCLE = [0.1, 0.2, 0.3, 0.2, 0.1, 0.2, 0.3, 0.2, 0.1, 0.1]
DECAY = [0.1 / (1 + number) for number in range(10)]
ENDED = [*ramp(0.1, 4, 1.0), *[0.1] * 8]  # a warm-up by updates, and its end


@pytest.mark.parametrize(
    ("ranks", "one_rank", "state"),
    [
        pytest.param(ramp(0.1, 5, 0.0), ramp(0.1, 10, 0.0), NOT_SEEN, id="not scaled, rising"),
        pytest.param(ramp(0.2, 5, 1.0), ramp(0.1, 10, 1.0), NOT_SEEN, id="scaled, rising"),
        pytest.param(ramp(0.05, 6, 1.0), ramp(0.05, 12, 1.0), NOT_SEEN, id="by updates, rising"),
        pytest.param([*ramp(0.1, 4, 1.0), 0.1, 0.1], ENDED, FAILED, id="not scaled, ended"),
        pytest.param([*ramp(0.2, 4, 1.0), 0.2, 0.2], ENDED, OK, id="scaled, ended"),
        pytest.param(CYCLE[:5], CYCLE, FAILED, id="a cycle on one rank, too"),
        pytest.param([2 * rate for rate in CYCLE[:5]], CYCLE, OK, id="a scaled cycle"),
        pytest.param(DECAY[:5], DECAY, FAILED, id="a decay by updates"),
        pytest.param([2 * rate for rate in DECAY[:5]], DECAY, OK, id="a scaled decay"),
    ],
)
def test_a_schedule_is_judged_by_its_peak_once_it_has_ended_to_rise(
    ranks: list[float], one_rank: list[float], state: str
) -> None:
    """An update of two ranks is at twice the position in the epoch of one rank's."""
    row = judged(each(rates=ranks), single_rank=replace(SINGLE_RANK, rates=one_rank))[3]
    assert row.state == state, row


def test_a_script_that_never_initializes_fails_its_first_row() -> None:
    ended = each(world=None, updates=[], done=0, ended=None)
    assert judged(ended, single_rank=None)[0].state == NOT_SEEN
    # The launcher may have killed the other rank before it recorded the error.
    error = on(1, ended="ValueError: Horovod has not been initialized; use hvd.init().")
    assert judged(ended, error, single_rank=None)[0].state == FAILED


def test_threads_set_by_the_script_are_reported_as_such() -> None:
    calls = calling("torch.set_num_threads", threads=4)
    evidence = judged(each(processor=(None, 4)), calls)[1].evidence
    assert evidence.endswith("on 2 cores; the script calls torch.set_num_threads(4)")


DDP = [without(0), calling("DistributedDataParallel"), each(distributed=True, **rates(0.1))]
SAMPLE = [each(sample_weights=[1 / 16] * 5)]  # a mean over the samples of a rank
ONE_RANK = replace(SINGLE_RANK, rates=[0.1] * 5, sample_weights=[1 / 16] * 5)


@pytest.mark.parametrize(
    ("changes", "step", "state", "evidence"),
    [
        ([], 4, OK, "not multiplied by the ranks, a choice; the linear rule would be x 2"),
        ([on(1, **rates(0.2))], 4, FAILED, "at update 1: 0.1, 0.2 by rank"),
        ([], 5, OK, "to the mean of the local gradients"),
        ([each(sample_weights=[1 / 32] * 5)], 5, FAILED, "already divided by the global batch"),
        ([updates(applied=SUM)], 5, FAILED, "the sum, not the mean"),
        ([updates(applied=SUM), each(sample_weights=[1 / 32] * 5)], 5, OK, "before"),
        ([each(reduced=0)], 5, FAILED, "call the wrapper, not model.module"),
        ([each(graded=False)], 5, FAILED, "no parameter of the optimizer had a gradient in 5 upd"),
        ([updates(applied=[0.0] * 4)], 5, NOT_SEEN, "all gradients are 0"),
        ([updates(since=1, applied=SUM)], 5, OK, "added to those before: call zero_grad()"),
        ([updates(1, since=3, before=OTHER)], 6, FAILED, "before update 4: 4, they drift apart"),
        (
            [on(rank, loader=loader(probes=[f"{rank}"], fixed=True)) for rank in range(2)],
            3,
            NOT_SEEN,
            "the dataset has another sample on each rank at the same index",
        ),
        ([], 6, OK, "DistributedDataParallel; max difference to rank 0 before update 1: 0"),
        (
            [each(loader=loader("DistributedSampler", epochs=[(0, 0), (0, 2)]))],
            3,
            OK,
            "note: epoch 2 has the same order of samples as the epoch before",
        ),
        (
            [
                on(0, metrics=[MetricReduction("reduce", [1.0], [3.0])]),
                on(1, metrics=[MetricReduction("reduce", [2.0], [])]),
            ],
            8,
            OK,
            "reduce: 1, 2 by rank, 3 on one rank after the reduction",
        ),
    ],
)
def test_a_script_of_torch_distributed(
    changes: list[Change], step: int, state: str, evidence: str
) -> None:
    result = judged(*DDP, *SAMPLE, *changes, single_rank=ONE_RANK)
    assert [row.step for row in result if row.state != OK] == [step] * (state != OK), result
    assert evidence in result[step - 1].evidence


def test_an_update_filled_with_samples_of_the_first_is_no_mistake() -> None:
    parts = [[f"{rank}-{row}" for row in range(80)] for rank in range(2)]
    parts[1][64:] = parts[0][:16]
    seen = [on(rank, seen=SeenSamples(marks, list(ENDS))) for rank, marks in enumerate(parts)]
    row = judged(*seen)[2]
    assert (row.state, "16 only in the last update" in row.evidence) == (OK, True), row
    parts[1][48:] = parts[0][:32]
    assert judged(*seen)[2].state == FAILED


@pytest.mark.parametrize(("ended", "cause"), [("ValueError: 2", "ValueError: 2"), (None, "resume")])
def test_a_run_on_one_rank_without_an_update(ended: str | None, cause: str) -> None:
    row = judged(single_rank=replace(SINGLE_RANK, rates=[], updates=[], ended=ended))[3]
    assert (row.state, cause in row.evidence) == (NOT_SEEN, True)


def test_a_model_that_is_neither_wrapped_nor_reduced() -> None:
    result = judged(each(distributed=True, reduced=0), applied(lambda rank: LOCAL[rank]))[4]
    assert "nothing was reduced: wrap the model in DistributedDataParallel" in result.evidence
    error = "ValueError: Default process group has not been initialized, please make sure to call"
    row = judged(each(distributed=True, world=None, ended=error), single_rank=None)[0]
    assert (row.state, "init_process_group() was not called" in row.evidence) == (FAILED, True)
