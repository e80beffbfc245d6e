"""TensorFlow: devices, and state of model and optimizer as variables.

Precision, clipping and accumulation are in ``tasks/training_step_tensorflow.py``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from hvdtrain.adapters.digests import Groups
from hvdtrain.adapters.framework import Framework, Profiler, Rank, SumOverRanks, not_a_count
from hvdtrain.adapters.state_view import StateView, check_names
from hvdtrain.adapters.tensorflow import batchnorm
from hvdtrain.adapters.tensorflow.buckets import Alone, distribute
from hvdtrain.adapters.tensorflow.weights import LossWeights
from hvdtrain.errors import UsageError
from hvdtrain.steps.checkpoint_files import (
    MODEL_FILE,
    TRAINING_FILE,
    Arrays,
    Checkpoint,
    Tensors,
)
from hvdtrain.steps.tensor_file import ArraySpec
from hvdtrain.system.machine.gpus import gpu_of_rank
from hvdtrain.system.machine.threads import local_cores, requested_threads

Variables = dict[str, Any]  # of Keras, by name
SCALE = "loss_scale/"  # begins the names of the state of a LossScaleOptimizer itself
INTER_OP_THREADS = 1  # concurrent operations: on one core a second one would only wait


class KerasView(StateView):
    """State of a Keras model and its optimizer."""

    @override
    def trained_names(self) -> set[str]:
        trained = {id(value) for value in self.model.trainable_weights}
        return {name for name, value in _named_weights(self.model).items() if id(value) in trained}

    @override
    def tensors(self, optimizer: Any = None) -> dict[str, Variables]:
        state = {} if optimizer is None else _named_state(self.model, optimizer)
        return {MODEL_FILE: _named_weights(self.model), TRAINING_FILE: state}

    @override
    def layout(self, tensor: Any) -> ArraySpec:
        kind = np.dtype(tf.as_dtype(tensor.dtype).as_numpy_dtype)
        return ArraySpec(kind, tuple(tensor.shape))

    @override
    def array(self, tensor: Any) -> np.ndarray[Any, Any]:
        return np.asarray(tensor if isinstance(tensor, np.ndarray) else tensor.numpy())

    @override
    def options(self, optimizer: Any) -> Groups:
        if optimizer is None:
            return []
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        numbers = (int, float, type(None))  # no bool: they select variables
        named = ((k, v) for k, v in vars(inner).items() if not k.startswith("_"))
        options = {name: value for name, value in named if type(value) in numbers}
        rate = getattr(inner, "_learning_rate", None)
        if isinstance(rate, keras.Variable):  # not a schedule
            options["learning_rate"] = float(rate)
        return [options]

    @override
    def set_options(self, optimizer: Any, groups: Groups) -> None:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        for name, value in groups[0].items():
            setattr(inner, name, np.asarray(value) if name == "learning_rate" else value)

    @override
    def restore(self, optimizer: Any, state: Checkpoint) -> None:
        source = state.path or "the state of rank 0"
        _assign(_named_weights(self.model), state.model, f"{source} is not of this model")
        if optimizer is not None:
            variables = _named_state(self.model, optimizer)
            _assign(
                _common_scale(variables, state.training),
                _common_scale(state.training, variables),
                f"{source} is not of this optimizer",
            )

    @override
    def local_buffers(self) -> Arrays:
        return {name: np.array(value.numpy()) for name, value in _running(self.model).items()}

    @override
    def set_local_buffers(self, arrays: Arrays) -> None:
        for name, value in _running(self.model).items():
            if name in arrays:
                value.assign(arrays[name])


class TensorFlowFramework(Framework):
    """TensorFlow on this rank."""

    cpu = "/CPU:0"
    kinds = (
        ("keras.Model", keras.Model),
        ("keras.optimizers.Optimizer", keras.optimizers.Optimizer),
    )

    def __init__(self) -> None:
        if keras.backend.backend() != "tensorflow":
            raise UsageError(
                f"KERAS_BACKEND={keras.backend.backend()}: --framework tensorflow needs Keras on "
                "TensorFlow; unset the variable"
            )
        self._gpus: list[Any] = []
        self.loss_weights = LossWeights()
        self.stand_in: Any = False  # whether the samples of the current passes are one
        self._kept: dict[bool, tuple[Any, list[Any]]] = {}  # running statistics before them

    @override
    def claim_device(self, local_rank: int, local_size: int) -> None:
        # Each collective is an operation of TensorFlow, whose runtime then starts.
        self._gpus = tf.config.list_physical_devices("GPU")
        try:
            if self._gpus:
                mine = self._gpus[gpu_of_rank(local_rank, len(self._gpus))]
                tf.config.set_visible_devices(mine, "GPU")
                for gpu in self._gpus:  # scripts that do so later must not change the setting
                    tf.config.experimental.set_memory_growth(gpu, True)
            else:
                cores = local_cores(local_rank, local_size)
                threads = requested_threads(os.environ) or cores
                tf.config.threading.set_intra_op_parallelism_threads(threads)
                tf.config.threading.set_inter_op_parallelism_threads(INTER_OP_THREADS)
        except RuntimeError as error:
            raise UsageError(
                "TensorFlow was used before `initialize`, so this rank can no longer select its "
                "device: call initialize() first"
            ) from error

    @override
    def gpus(self) -> int:
        return len(self._gpus)

    @override
    def gpu_name(self, index: int) -> str:
        details = tf.config.experimental.get_device_details(self._gpus[index])
        return str(details.get("device_name", "unknown"))

    @override
    def use_gpu(self, index: int) -> tuple[str, str]:
        return "/GPU:0", f"gpu {index}"  # the only visible one

    @override
    def use_threads(self, share: Callable[[], int]) -> int:
        return int(tf.config.threading.get_intra_op_parallelism_threads())  # by `claim_device`

    @override
    def peak_memory(self, device: Any) -> int:
        return int(tf.config.experimental.get_memory_info(device)["peak"])

    @override
    def view(self, adapter: Rank, model: Any) -> KerasView:
        return KerasView(adapter, model)

    @override
    def prepare(self, adapter: Rank, model: Any, optimizer: Any) -> None:
        if adapter.world.size == 1:  # Keras has nothing that cannot be saved
            distribute(optimizer, Alone(optimizer, self.loss_weights))

    @override
    def weigh(self, adapter: Rank, count: Any, optimizers: Iterable[Any]) -> None:
        known = not tf.is_tensor(count) or (tf.executing_eagerly() and not adapter.has_gpu)
        if known and np.ndim(count) == 0:
            try:
                is_count = 0 <= float(count) < math.inf
            except (TypeError, ValueError):
                is_count = False
            if not is_count:
                raise not_a_count(count)
        self.loss_weights.set(count)

    @override
    def synchronize_batchnorm(self, adapter: Rank, task: Any, sum_tensor: SumOverRanks) -> None:
        if adapter.world.size > 1:
            batchnorm.convert(task.model, sum_tensor, adapter.world, self)

    @override
    def leave_out(self, models: Iterable[Any], stand_in: Any) -> None:
        # A traced function has a state of its own, in which `stand_in` is a tensor.
        self.stand_in, traced = stand_in, tf.inside_function()
        if not traced:  # a part begins or ends
            self.loss_weights.drop()
        before, kept = self._kept.pop(traced, (False, []))

        def restore() -> None:
            for variable, value in kept:
                variable.assign(value)

        if kept:
            tf.cond(before, restore, lambda: None)
        if stand_in is not False:
            values = [value for model in models for value in batchnorm.statistics(model)]
            self._kept[traced] = stand_in, [(each, tf.identity(each.value)) for each in values]

    @override
    def use_tf32(self, wanted: bool) -> None:
        tf.config.experimental.enable_tensor_float_32_execution(wanted)

    @override
    def start_profiler(self, rank_facts: Mapping[str, object]) -> Profiler:
        from hvdtrain.adapters.tensorflow.profiler import TensorFlowProfiler

        return TensorFlowProfiler(rank_facts)

    @override
    def make_deterministic(self) -> None:
        tf.config.experimental.enable_op_determinism()


FRAMEWORK = TensorFlowFramework


def _assign(variables: Variables, arrays: Tensors, trouble: str) -> None:
    check_names(variables, arrays, trouble)
    for name, value in variables.items():
        value.assign(np.asarray(arrays[name]))


def _running(model: Any) -> Variables:
    frozen = {id(value) for value in model.non_trainable_weights}
    return {
        name: value
        for name, value in _named_weights(model).items()
        if id(value) in frozen and tf.as_dtype(value.dtype).is_floating
    }


def _named_weights(model: Any) -> Variables:
    """Return the weights by path, with default layer names renumbered from 0 within this model.

    Keras numbers the layers within a process (``dense_7``), so the names may differ between two
    processes, and a checkpoint would not match.
    """
    renamed: dict[str, str] = {}
    counts: dict[str, int] = {}
    for layer in [model, *model._flatten_layers(include_self=False)]:
        base = re.sub(r"_\d+$", "", layer.name)
        if base.replace("_", "") == type(layer).__name__.lower() and layer.name not in renamed:
            number = counts.setdefault(base, 0)
            renamed[layer.name] = f"{base}_{number}" if number else base
            counts[base] += 1
    named: Variables = {}
    for value in model.weights:
        name = "/".join(renamed.get(step, step) for step in value.path.split("/"))
        if name in named:
            raise UsageError(f"the model has two weights called {name}: name its layers")
        named[name] = value
    return named


def _named_state(model: Any, optimizer: Any) -> Variables:
    # Learning rate, momentum etc. are options of this run, not of the one that saved.
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    named = {
        f"{number:04d}/{value.name.rpartition('_')[2]}": value
        for number, value in enumerate(inner.variables)
        if not value.name.endswith("learning_rate")
    }
    if inner is not optimizer:
        named[f"{SCALE}scale"] = optimizer.dynamic_scale
        named[f"{SCALE}updates"] = optimizer.step_counter
    return named


def _common_scale(state: Mapping[str, Any], counterpart: Mapping[str, Any]) -> Variables:
    """Return the state without a loss scale that the counterpart, of another precision, lacks."""
    return {n: value for n, value in state.items() if n in counterpart or not n.startswith(SCALE)}
