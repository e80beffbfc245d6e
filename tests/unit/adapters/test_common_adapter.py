"""The steps that all adapters share, on a model of NumPy arrays and ranks that are threads."""

from __future__ import annotations

import atexit
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.adapters.preflight import exchange
from hvdtrain.adapters.state_view import StateView
from hvdtrain.adapters.strategy import BaseStrategy
from hvdtrain.collectives.base import Communicator, SingleRank
from hvdtrain.errors import HvdtrainError, TrainingError, UsageError
from hvdtrain.steps import integrity
from hvdtrain.steps.checkpoint_files import MODEL_FILE, TRAINING_FILE, Arrays, Checkpoint
from hvdtrain.steps.integrity import RankFacts
from hvdtrain.steps.sharding import Shards
from hvdtrain.steps.world import World
from tests.saves import save

Model = dict[str, Arrays]  # "weights", which all ranks share, and "running", each rank's own


class ArrayView(StateView):
    """All of it is whole on each rank."""

    def trained_names(self) -> set[str]:
        return {"w"}

    def tensors(self, optimizer: Any = None) -> dict[str, Arrays]:
        arrays = {**self.model["weights"], **self.model["running"]}  # no copies, as of PyTorch
        return {MODEL_FILE: arrays, TRAINING_FILE: optimizer or {}}

    def restore(self, optimizer: Any, state: Checkpoint) -> None:
        for part in ("weights", "running"):
            if not set(self.model[part]) <= set(state.model):
                raise UsageError("another model")
            self.model[part] = {name: np.asarray(state.model[name]) for name in self.model[part]}
        if optimizer is not None:
            optimizer.clear()
            optimizer.update({k: np.asarray(v) for k, v in state.training.items()})

    def local_buffers(self) -> Arrays:
        return {k: v.copy() for k, v in self.model["running"].items()}

    def set_local_buffers(self, arrays: Arrays) -> None:
        self.model["running"] = dict(arrays)


class Threads(BaseStrategy):
    """Ranks that are threads."""

    name = "horovod"
    runtime = "the threads"

    def connect(self) -> Communicator:
        return self.adapter.communicator


class ArrayAdapter(CommonAdapter):
    """Weights, momenta and running statistics in dictionaries."""

    def __init__(self, communicator: Communicator, strategy: type[BaseStrategy] = Threads) -> None:
        arrays = SimpleNamespace(
            cpu="cpu", view=ArrayView, shards=Shards, leave_out=lambda *_: None
        )
        super().__init__(lambda: arrays, strategy)  # type: ignore[arg-type]
        self.communicator = communicator
        self.world = World(
            communicator.rank, communicator.size, communicator.rank, communicator.size, "h", 1
        )

    def check_trained(self, model: Any, optimizer: Any) -> None:
        pass


def model_of(rank: int) -> Model:
    return {
        "weights": {"w": np.array([1.0, 2.0]) + rank, "steps": np.array(rank)},
        "running": {"mean": np.array([8.0 * rank], np.float32)},
    }


@pytest.mark.parametrize("size", [1, 2, 3])
def test_after_the_broadcast_all_are_rank_zero(on_ranks: Any, size: int) -> None:
    def act(communicator: Communicator) -> tuple[Any, ...]:
        model, rank = model_of(communicator.rank), communicator.rank
        momenta = {"m": np.array([5.0])} if rank == 0 else {}  # only rank 0 has resumed
        digest = ArrayAdapter(communicator).broadcast_state(model, momenta)
        return digest, model, momenta

    outcomes = on_ranks(size, act)
    assert len({digest for digest, _, _ in outcomes}) == 1
    for _, model, momenta in outcomes:
        assert model["weights"]["w"].tolist() == [1.0, 2.0]
        assert model["weights"]["steps"].shape == ()
        assert model["running"]["mean"].tolist() == [0.0]
        assert momenta["m"].tolist() == [5.0]


@pytest.mark.parametrize(
    ("odd", "others"), [(2, "rank 0's"), (1, "rank 0's"), (0, "the other ranks'")]
)
@pytest.mark.parametrize("of_optimizer", [False, True])
def test_a_replica_that_drifts_by_one_bit_is_named(
    on_ranks: Any, odd: int, others: str, of_optimizer: bool
) -> None:
    def act(communicator: Communicator) -> str:
        model, momenta = model_of(0), {"0/m": np.zeros((2, 3)), "1/none": np.zeros((0, 2))}
        model["running"]["mean"] += communicator.rank  # each rank's own, by design
        if communicator.rank == odd and of_optimizer:
            momenta["0/m"][1, 2] = -0.0
        elif communicator.rank == odd:
            model["weights"]["w"] = np.nextafter(model["weights"]["w"], 9)
        return ArrayAdapter(communicator).check_replicas(model, momenta, step=8)

    outcomes = on_ranks(3, act)
    assert {type(outcome) for outcome in outcomes} == {HvdtrainError}
    assert len({str(outcome) for outcome in outcomes}) == 1
    name = "0/m of the optimizer" if of_optimizer else "w"
    expected = (
        f"after step 8 the model of {socket.gethostname()} (rank {odd}) differs from {others}, "
        f"first in {name}: "
    )
    assert str(outcomes[0]).startswith(expected)
    assert "run the same command again" in str(outcomes[0])


def test_metrics_over_all_ranks_with_uneven_and_empty_shares(on_ranks: Any) -> None:
    counts, sums = [3, 0, 1], [6.0, 0.0, 10.0]

    def act(communicator: Communicator) -> Any:
        rank = communicator.rank
        adapter = ArrayAdapter(communicator)
        return adapter.average_metrics(counts[rank], loss=sums[rank], correct=counts[rank])

    assert on_ranks(3, act) == [({"loss": 4.0, "correct": 1.0}, 4)] * 3


def test_the_part_in_hand_gives_the_weight(on_ranks: Any) -> None:
    def act(communicator: Communicator) -> list[float | None]:
        adapter = ArrayAdapter(communicator)
        assert adapter.loss_weight == 1 / 3  # no shards: all ranks count the same
        shards = adapter.shard_data(10, global_batch=4)
        return [adapter.loss_weight for _ in shards.epoch(0)]

    # 4, 4 and 2 samples for three ranks: parts of 2, 1, 1 and of 1, 1, 0.
    assert on_ranks(3, act) == [[0.5, 0.5, 0.5], [0.25, 0.25, 0.5], [0.25, 0.25, None]]


def test_sums_over_all_ranks_are_without_stand_ins(on_ranks: Any) -> None:
    def act(communicator: Communicator) -> list[dict[str, float]]:
        adapter = ArrayAdapter(communicator)
        shards = adapter.shard_data(5, global_batch=4)
        totals = [adapter.total(tokens=7, passes=1) for _ in shards.epoch(0)]
        return [*totals, adapter.total(tokens=7, passes=1)]

    # Of the fifth sample, two of three ranks have a stand-in.
    expected = [{"tokens": 7.0 * ranks, "passes": float(ranks)} for ranks in (3, 1, 3)]
    assert on_ranks(3, act) == [expected] * 3


def test_different_data_of_the_same_size_is_reported(on_ranks: Any) -> None:
    def act(communicator: Communicator) -> int:
        digest = "other" if communicator.rank == 1 else "mine"
        adapter = ArrayAdapter(communicator)
        same = adapter.shard_data(10, global_batch=4, digest=b"the same")
        return same.samples + adapter.shard_data(10, global_batch=4, digest=digest).samples

    for outcome in on_ranks(3, act):
        assert isinstance(outcome, UsageError)
        assert "shard_data" in str(outcome) and "rank 1 differs from rank 0" in str(outcome)


def trained(communicator: Communicator) -> tuple[ArrayAdapter, Model]:
    """After an epoch of 4 samples: 3 ranks have seen 2, 1 and 1."""
    adapter, model = ArrayAdapter(communicator), model_of(communicator.rank)
    model["weights"] = model_of(0)["weights"]
    for _ in adapter.shard_data(4, global_batch=4).epoch(0):
        pass
    return adapter, model


def test_statistics_are_the_mean_in_an_evaluation_and_local_after_it(
    on_ranks: Any,
) -> None:
    def act(communicator: Communicator) -> tuple[float, float]:
        adapter, model = trained(communicator)
        with pytest.raises(ZeroDivisionError), adapter.averaged_buffers(model):
            inside = float(model["running"]["mean"][0])
            raise ZeroDivisionError
        return inside, float(model["running"]["mean"][0])

    # (2 x 0 + 1 x 8 + 1 x 16) / 4
    assert on_ranks(3, act) == [(6.0, 0.0), (6.0, 8.0), (6.0, 16.0)]


@pytest.mark.parametrize(
    ("size", "statistics"), [(3, [0.0, 8.0, 16.0]), (2, [6.0, 6.0]), (1, [6.0])]
)
def test_a_checkpoint_resumes_with_the_own_statistics_or_on_other_ranks_with_the_mean(
    on_ranks: Any, tmp_path: Path, size: int, statistics: list[float]
) -> None:
    def save(communicator: Communicator) -> Path:
        adapter, model = trained(communicator)
        state = {"step": 1, "origin": {"model": "array"}}
        return adapter.save_checkpoint(tmp_path, model, {"m": np.array([3.0])}, state=state)

    assert on_ranks(3, save) == [tmp_path / "step-000000001"] * 3

    def resume(communicator: Communicator) -> tuple[Any, ...]:
        adapter, model = ArrayAdapter(communicator), model_of(7)
        momenta: Arrays = {}
        state = adapter.load_checkpoint(tmp_path, model, momenta, origin={"model": "array"})
        for _ in range(2):  # so that the order of those who do it does not count
            adapter.broadcast_state(model, momenta)
        later = {**model, "running": {"mean": model["running"]["mean"] + 1}}
        adapter.samples_seen += 1
        adapter.broadcast_state(later, momenta)
        return state, model, momenta, later

    for rank, (state, model, momenta, later) in enumerate(on_ranks(size, resume)):
        assert state["step"] == 1
        assert state["world_size"] == 3
        assert model["weights"]["w"].tolist() == [1.0, 2.0]
        assert model["weights"]["steps"].shape == ()
        assert {name: value.tolist() for name, value in momenta.items()} == {"m": [3.0]}
        assert model["running"]["mean"].tolist() == [statistics[rank]]
        assert later["running"]["mean"].tolist() == [statistics[0] + 1]  # the checkpoint's are over


def test_a_foreign_checkpoint_is_refused_on_all_ranks(on_ranks: Any, tmp_path: Path) -> None:
    def act(communicator: Communicator) -> Any:
        adapter, model = trained(communicator)
        assert adapter.load_checkpoint(tmp_path, model, {}, origin={}) is None  # there is none yet
        state = {"step": 1, "origin": {"model": "array"}}
        adapter.save_checkpoint(tmp_path, model, {}, state=state)
        return adapter.load_checkpoint(tmp_path, model, {}, origin={"model": "other"})

    outcomes = on_ranks(2, act)
    assert {type(outcome) for outcome in outcomes} == {UsageError}
    assert all("'array' there, 'other' here" in str(outcome) for outcome in outcomes)


@pytest.mark.parametrize("where", ["w", "momentum", "mean"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_neither_saved_nor_resumed(
    on_ranks: Any, tmp_path: Path, where: str, value: float
) -> None:
    mask = where == "mean" and value == np.inf  # a mask holds infinities, and they are welcome

    def act(communicator: Communicator) -> Any:
        adapter, model = trained(communicator)
        adapter.save_checkpoint(tmp_path, model, {"m": np.ones(1)}, state={"step": 1})
        momenta = {"m": np.array([value if where == "momentum" else 1.0])}
        if where == "w":
            model["weights"]["w"] = np.array([1.0, value])
        elif where == "mean" and communicator.rank == 1:
            model["running"]["mean"] = np.array([value], np.float32)
        return adapter.save_checkpoint(tmp_path, model, momenta, state={"step": 2})

    name = {"w": "w", "momentum": "m", "mean": "mean"}[where]
    for outcome in on_ranks(2, act):
        if mask:
            assert outcome == tmp_path / "step-000000002"
        else:
            assert isinstance(outcome, TrainingError)
            assert str(outcome).startswith(f"{name} is not finite after step 2: nothing was saved")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step-00000000{step}" for step in (1, 2)[: 1 + mask]
    ]
    # As if it had been saved nevertheless.
    arrays = {"w": np.ones(2), "steps": np.array(0), "mean": np.zeros(1, np.float32)}
    arrays |= {name: np.array([value])} if where != "momentum" else {}
    momenta = {"m": np.array([value if where == "momentum" else 1.0])}
    save(tmp_path, Checkpoint(arrays, momenta, {"step": 3}), keep=9)

    def resume(communicator: Communicator) -> Any:
        state = ArrayAdapter(communicator).load_checkpoint(tmp_path, model_of(0), {})
        return state and state["step"]

    assert on_ranks(2, resume) == [3 if mask else 1] * 2


def test_the_world_counts_hosts(on_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a", "b", "a", "b", "b"]
    of_thread: dict[int, str] = {}
    monkeypatch.setattr(socket, "gethostname", lambda: of_thread[threading.get_ident()])
    for name in ("OMPI_MCA_mpi_yield_when_idle", "HOROVOD_FUSION_THRESHOLD"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))  # put back at the end
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "5")
    # This process would wait at its end for the other ranks, once for each thread.
    monkeypatch.setattr(atexit, "register", lambda *_: None)

    def act(communicator: Communicator) -> World:
        of_thread[threading.get_ident()] = names[communicator.rank]
        return ArrayAdapter(communicator).initialize()

    worlds = on_ranks(5, act)
    assert [world.rank for world in worlds] == [0, 1, 2, 3, 4]
    assert [world.host for world in worlds] == names
    assert [world.local_rank for world in worlds] == [0, 0, 1, 1, 2]
    assert [world.local_size for world in worlds] == [2, 3, 2, 3, 3]
    assert {world.hosts for world in worlds} == {2}


@pytest.mark.parametrize("allowed", [False, True])
def test_ranks_of_two_versions(
    on_ranks: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, allowed: bool
) -> None:
    def facts_of(environ: Any, mpi: str) -> RankFacts:
        number = of_thread[threading.get_ident()]
        return RankFacts(f"node{number}", "", {"torch": f"2.{number}"}, tuple(allow))

    of_thread: dict[int, int] = {}
    allow = ["mixed-versions"] if allowed else []
    monkeypatch.setattr(integrity, "rank_facts", facts_of)

    def act(communicator: Communicator) -> Any:
        of_thread[threading.get_ident()] = communicator.rank
        return exchange(communicator)

    outcomes = on_ranks(2, act)
    text = "torch 2.0 on node0 (rank 0), 2.1 on node1 (rank 1)"
    if allowed:
        assert [facts.host for facts in outcomes[1]] == ["node0", "node1"]
        assert len([r for r in caplog.records if text in r.message]) == 1  # said once
    else:
        assert {type(outcome) for outcome in outcomes} == {UsageError}
        assert all(text in str(outcome) for outcome in outcomes)


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        ((1, 1), "ranks 0-1 on host node1 use the same GPU"),
        ((3, 3, 0), "node1 (rank 2) sees no GPU"),
        ((2, 2), None),
        ((0, 0), None),
    ],
)
@pytest.mark.parametrize("allowed", [False, True])
def test_gpus_that_are_shared_or_missing_are_reported_on_all_ranks(
    on_ranks: Any,
    caplog: pytest.LogCaptureFixture,
    visible: tuple[int, ...],
    message: str | None,
    allowed: bool,
) -> None:
    def act(communicator: Communicator) -> Any:
        adapter = ArrayAdapter(communicator)
        allow = ("shared-gpu",) if allowed else ()
        adapter.ranks = [RankFacts("node1", "", {}, allow)] * communicator.size
        count = visible[communicator.rank]
        return adapter.check_devices("a GPU", communicator.rank % max(1, count), count)

    outcomes = on_ranks(len(visible), act)
    if message and not allowed:
        assert {type(outcome) for outcome in outcomes} == {UsageError}
        assert len({str(outcome) for outcome in outcomes}) == 1
        assert message in str(outcomes[0])
    else:
        assert outcomes == [None] * len(visible)
        assert len([r for r in caplog.records if message and message in r.message]) == (
            message is not None  # by one rank
        )


@pytest.mark.parametrize(
    ("value", "threads"), [("3", 3), ("12", 12), ("", 4), ("many", 4), ("0", 4)]
)
def test_threads_are_those_of_the_user_or_the_share_of_the_cores(
    on_ranks: Any, monkeypatch: pytest.MonkeyPatch, value: str, threads: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    assert on_ranks(3, lambda c: ArrayAdapter(c).cpu_threads()) == [threads] * 3


def test_sums_of_several_optimizers_are_combined() -> None:
    class Sums:
        def __init__(self, seconds: float | None, messages: dict[str, int] | None) -> None:
            self.blocked_seconds, self.messages = seconds, messages

    class Several(Threads):
        gradient_sums: Any = ()

    adapter = ArrayAdapter(SingleRank(), Several)
    strategy: Any = adapter.strategy
    assert (adapter.blocked_seconds, adapter.gradient_messages) == (0.0, None)
    adapter.world = World(0, 2, 0, 2, "h", 1)
    assert adapter.blocked_seconds is None
    first, second = {"count": 2, "bytes": 8}, {"count": 1, "bytes": 4}
    strategy.gradient_sums = (Sums(0.5, first), Sums(0.25, second))
    assert adapter.blocked_seconds == 0.75
    assert adapter.gradient_messages == {"count": 3, "bytes": 12}
    strategy.gradient_sums = (Sums(None, None), Sums(0.25, second))
    assert adapter.blocked_seconds is None
    assert adapter.gradient_messages == second
