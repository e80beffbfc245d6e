"""Steps 6 and 7 in one process: the state of a model and its optimizer as arrays, and back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.adapters.select import adapter
from hvdtrain.config.strategies import PACKAGES, STRATEGIES
from hvdtrain.errors import UsageError
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps.checkpoint_files import Checkpoint
from tests.saves import save


def pytorch(width: int) -> tuple[Any, Any]:
    """A net with running statistics and an optimizer with moments, after an update."""
    torch = pytest.importorskip("torch")
    layers = (torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1))
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(8, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def tensorflow(width: int) -> tuple[Any, Any]:
    """The same in Keras."""
    keras = pytest.importorskip("keras")
    layers = (keras.layers.Dense(width), keras.layers.BatchNormalization(), keras.layers.Dense(1))
    model = keras.Sequential([keras.Input((3,)), *layers])
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(model.trainable_variables)
    gradients = [
        np.random.rand(*variable.shape).astype("f4") for variable in model.trainable_variables
    ]
    optimizer.apply(gradients, model.trainable_variables)
    return model, optimizer


FACTORIES = {"pytorch": pytorch, "tensorflow": tensorflow}


@pytest.fixture(params=FACTORIES)
def single_rank(request: pytest.FixtureRequest) -> tuple[CommonAdapter, Any]:
    """An adapter, which needs no world for this, and what makes a model and an optimizer."""
    return adapter(request.param, "single", environ={}), FACTORIES[request.param]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[[CommonAdapter], CommonAdapter]:
    """Return a function that makes the world of an adapter, in a process that used TensorFlow."""

    def start(hvd: CommonAdapter) -> CommonAdapter:
        monkeypatch.setattr(type(hvd.framework), "claim_device", lambda *_: None, raising=False)
        hvd.initialize()
        return hvd

    return start


def exported(hvd: CommonAdapter, trained: Any) -> dict[str, bytes]:
    state = hvd.export_state(*trained)
    return {name: value.tobytes() for name, value in {**state.model, **state.training}.items()}


def test_a_state_comes_back_bit_for_bit(single_rank: tuple[CommonAdapter, Any]) -> None:
    hvd, make = single_rank
    saved, loaded = make(4), make(4)
    before = exported(hvd, saved)
    assert exported(hvd, loaded) != before
    state = hvd.export_state(*saved)
    parts = (state.model, state.training)
    copies = [{name: np.array(value) for name, value in part.items()} for part in parts]
    hvd.import_state(*loaded, Checkpoint(*copies))
    assert exported(hvd, loaded) == before
    # Running statistics are not trained.
    assert hvd.view(loaded[0]).trained_names() < set(state.model)


def test_a_forked_copy_of_rank_0_writes_without_the_framework(
    single_rank: tuple[CommonAdapter, Any],
    started: Callable[[CommonAdapter], CommonAdapter],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does so if mpirun kills rank 0 within a save that the training waits for."""
    hvd, make = single_rank
    model, optimizer = make(4)
    view = started(hvd).view(model, optimizer)
    write = view.contribute(optimizer, {"step": 1}, {}, None)

    def array(value: Any) -> np.ndarray[Any, Any]:
        assert isinstance(value, np.ndarray), type(value)
        return value

    monkeypatch.setattr(view, "array", array)
    files, _ = write(checkpoints.begin(tmp_path, 1))
    assert len(files) == 2


def test_keras_state_is_that_of_any_precision() -> None:
    """A model trained with fp16 has a scaled loss; on a CPU its average is evaluated without."""
    keras = pytest.importorskip("keras")
    hvd = adapter("tensorflow", "single", environ={})

    def scaled(initial: float) -> tuple[Any, Any]:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        inner = keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True)
        return model, keras.optimizers.LossScaleOptimizer(inner, initial_scale=initial)

    model, optimizer = scaled(64.0)
    gradients = [np.full(value.shape, 64.0, "f4") for value in model.trainable_variables]
    optimizer.build(model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    saved = hvd.export_state(model, optimizer)

    again, rescaled = scaled(1024.0)
    hvd.import_state(again, rescaled, saved)
    assert float(rescaled.dynamic_scale) == 64.0 and int(rescaled.step_counter) == 1

    plain, unscaled = scaled(1.0)
    hvd.import_state(plain, unscaled.inner_optimizer, saved)
    state = hvd.export_state(plain, unscaled.inner_optimizer)
    assert saved.training.keys() - state.training.keys() == {
        "loss_scale/scale",
        "loss_scale/updates",
    }
    for name, value in state.training.items():
        assert np.array_equal(value, saved.training[name])

    hvd.import_state(*scaled(8.0), state)


def test_the_state_of_another_model_is_named(single_rank: tuple[CommonAdapter, Any]) -> None:
    hvd, make = single_rank
    state = hvd.export_state(*make(5))
    with pytest.raises(UsageError, match=r"is not of this model: \d+ tensors differ"):
        hvd.import_state(*make(4), state)


def test_state_of_a_missing_parameter_is_refused() -> None:
    """As where a layer is frozen that was trained: each strategy of PyTorch loads by this."""
    torch = pytest.importorskip("torch")
    hvd, (model, optimizer) = adapter("pytorch", "single", environ={}), pytorch(2)
    state = hvd.export_state(model, optimizer)
    fewer = torch.optim.Adam(list(model.parameters())[:-1], lr=0.1)
    with pytest.raises(UsageError, match=r"which has 5 parameters: it has state of parameter 6"):
        hvd.import_state(model, fewer, state)


@pytest.mark.parametrize(
    "odd",
    [
        {"x/exp_avg": np.zeros(2)},
        {"-1/exp_avg": np.zeros(2)},
        {"rank_samples": np.array(3)},
        {"rank_samples": np.array([3]), "rank_buffers/MEAN": np.zeros((1, 9))},
    ],
)
def test_odd_tensors_with_correct_checksums_are_refused(
    odd: dict[str, Any],
    single_rank: tuple[CommonAdapter, Any],
    started: Callable[[CommonAdapter], CommonAdapter],
    tmp_path: Path,
) -> None:
    hvd, make = started(single_rank[0]), single_rank[1]
    state = hvd.export_state(*make(2))
    model, training = (
        {name: np.array(value) for name, value in part.items()}
        for part in (state.model, state.training)
    )
    mean = next(name for name in model if name.endswith(("running_mean", "moving_mean")))
    odd = {name.replace("MEAN", mean): value for name, value in odd.items()}
    save(tmp_path, Checkpoint(model, {**training, **odd}, {"step": 1}), keep=1)
    with pytest.raises(UsageError, match="step-000000001"):
        hvd.load_checkpoint(tmp_path, *make(2))


def test_a_scheduler_is_resumed_without_its_milestones(
    started: Callable[[CommonAdapter], CommonAdapter], tmp_path: Path
) -> None:
    """As docs/own.md shows: with the milestones as text it would never decay the rate again."""
    torch = pytest.importorskip("torch")
    hvd = started(adapter("pytorch", "single", environ={}))

    def begin() -> tuple[Any, Any, Any]:
        model, optimizer = pytorch(2)
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])

    def rates(scheduler: Any) -> list[float]:
        values = []
        for _ in range(2):
            scheduler.optimizer.step()
            scheduler.step()
            values += scheduler.get_last_lr()
        return values

    *trained, scheduler = begin()
    seen = rates(scheduler)
    whole = {"step": 2, "scheduler": scheduler.state_dict()}
    with pytest.raises(
        UsageError, match=r"state\['scheduler'\] is not a JSON value .*the key 1 into"
    ):
        hvd.save_checkpoint(tmp_path, *trained, state=whole)
    assert not list(tmp_path.iterdir())
    kept = {k: v for k, v in scheduler.state_dict().items() if k != "milestones"}
    hvd.save_checkpoint(tmp_path, *trained, state={"step": 2, "lr": seen[-1], "scheduler": kept})
    model, optimizer, scheduler = begin()
    state = hvd.resume(tmp_path, model, optimizer)
    assert state
    scheduler.load_state_dict(state["scheduler"])
    optimizer.param_groups[0]["lr"] = state["lr"]
    assert seen + rates(scheduler) == pytest.approx([0.01, 0.01, 0.001, 0.001])


@pytest.mark.parametrize("keep", [0, -1])
def test_a_save_that_would_delete_itself_is_refused(
    keep: int,
    single_rank: tuple[CommonAdapter, Any],
    started: Callable[[CommonAdapter], CommonAdapter],
    tmp_path: Path,
) -> None:
    hvd, make = started(single_rank[0]), single_rank[1]
    with pytest.raises(UsageError, match=f"keep={keep} would delete what is saved: use at least 1"):
        hvd.save_checkpoint(tmp_path, *make(2), state={"step": 1}, keep=keep)
    assert not list(tmp_path.iterdir())


def test_a_tensor_without_a_type_in_the_format_is_refused(
    started: Callable[[CommonAdapter], CommonAdapter], tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    hvd, (model, optimizer) = started(adapter("pytorch", "single", environ={})), pytorch(2)
    model.register_buffer("phases", torch.ones(2, dtype=torch.complex128))
    for options in ({}, {"wait": False}):
        with pytest.raises(UsageError, match="phases is of type complex128, which safetensors"):
            save = hvd.save_checkpoint(tmp_path, model, optimizer, state={"step": 1}, **options)
            save.result()
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("state", [{}, {"seeds": 3, "learning_rate": 0.1}, {"seeds": [[[1]]]}])
def test_a_checkpoint_of_a_trainer_is_not_resumed_by_fit(
    state: dict[str, Any],
    started: Callable[[CommonAdapter], CommonAdapter],
    tmp_path: Path,
) -> None:
    pytest.importorskip("keras")
    from hvdtrain.keras.checkpoint import restore

    hvd, trained = started(adapter("tensorflow", "single", environ={})), tensorflow(2)
    hvd.save_checkpoint(tmp_path, *trained, state={"step": 1, **state})
    with pytest.raises(UsageError, match="step-000000001 was not saved by BackupAndRestore"):
        restore(hvd, tmp_path, *trained)


@pytest.mark.parametrize("name", ["model.keras", "model.h5", "model.weights.h5"])
def test_a_file_of_keras_follows_no_link_and_is_flushed_before_it_is_renamed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("keras")
    from hvdtrain.keras.checkpoint import WholeFiles

    path, victim, flushed, fsync = tmp_path / name, tmp_path / "victim", [], os.fsync
    victim.write_text("mine")
    (tmp_path / f".{os.getpid()}.{name}").symlink_to(victim)  # the name that was used before

    def seen(handle: int) -> None:
        flushed.append((Path(f"/proc/self/fd/{handle}").readlink(), path.exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", seen)
    model, before = tensorflow(2)[0], sorted(tmp_path.iterdir())
    umask = os.umask(0o027)
    try:
        save = "save_weights" if "weights" in name else "save"
        getattr(WholeFiles(model), save)(str(path))
    finally:
        os.umask(umask)
    assert victim.read_bytes() == b"mine"
    assert sorted(tmp_path.iterdir()) == sorted([*before, path])
    assert path.stat().st_mode & 0o777 == 0o640
    (file, named), *after = flushed
    assert (file.name, named, after) == (name, False, [(tmp_path, True)])


@pytest.mark.parametrize("framework", PACKAGES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_adapter_can_be_created(framework: str, strategy: str) -> None:
    if framework not in STRATEGIES[strategy].adapters:
        return
    selected = adapter(framework, strategy, environ={})
    assert selected.name == strategy
    module = type(selected.strategy).__module__.split(".")
    if strategy == "single":  # which is for any framework
        assert module[-1] == "strategy"
    else:
        assert module[-2:] == [framework, strategy.replace("-", "_")]


@pytest.mark.parametrize("version", ["3.8.0", "3.11.2"])
def test_a_keras_that_may_execute_a_model_does_not_load_it(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keras = pytest.importorskip("keras")
    import hvdtrain.keras as hvd

    model, optimizer = tensorflow(2)
    model.compile(optimizer, "mse")
    model.save(tmp_path / "model.keras")
    monkeypatch.setattr(keras, "__version__", version)
    with pytest.raises(UsageError, match=f"Keras {version} may execute code in it .*3.11.3"):
        hvd.load_model(tmp_path / "model.keras")
