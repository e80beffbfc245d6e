"""Replay scripts of TensorFlow and Keras: see ``replay``.

What the iterators of ``tf.data`` give is kept as arrays, element by element; Keras makes a dataset
of whatever ``fit`` is given. One process gets the union of the ranks' elements. Horovod's
operations act as if N ranks held the same; hvdtrain's adapters are those of one process, and only
what a script reads of them is that of N.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hvdtrain.commands.verify.hooks import Action, Depth, after, replace
from hvdtrain.commands.verify.script.one_process import UnreplayableError
from hvdtrain.commands.verify.script.record import Array
from hvdtrain.commands.verify.script.replay import Replay, undropped
from hvdtrain.commands.verify.script.watch_horovod import SMALL
from hvdtrain.commands.verify.script.watch_tensorflow import TensorFlowWatch, run

MAX_BYTES = 2**30  # of the elements that are kept
RANDOM = ("normal", "truncated_normal", "uniform", "shuffle", "categorical", "gamma", "poisson")
LIBRARIES = ("keras.", "tensorflow")  # whose initializers draw random numbers, too
OURS = "hvdtrain.collectives.horovod_tf"  # whose calls are answered by one process
SIZES = ("size", "local_size", "_process_set_size")
OTHERS = ("alltoall", "_reducescatter", "_grouped_reducescatter", "join", "add_process_set")


class TensorFlowReplay:
    """What ``replay`` needs from TensorFlow and Keras, which ``watch`` watches."""

    def __init__(self, replay: Replay, watch: TensorFlowWatch) -> None:
        self.replay, self.plan, self.draws = replay, replay.plan, replay.draws
        self.tape = watch.tape
        watch.applied = self._applied
        self.adapting = Depth()  # open calls of layers that adapt to data, each rank to its own
        self.bytes = 0  # of the elements
        self.state: Any = None  # of the random numbers at the last update
        self.perturbed: set[int] = set()  # variables, by id

    @property
    def actions(self) -> dict[str, Action]:
        """Return what to do after the import of modules, by their names."""
        actions = {
            "tensorflow": self.tensorflow,
            "keras": self.keras,
            "horovod.tensorflow.mpi_ops": self.horovod,
        }
        return {**actions, "hvdtrain.keras.session": self.session} if self.plan.ranks else actions

    def tensorflow(self, tf: Any) -> None:
        """Take over iterators, random numbers and dropout from now on."""
        self.tf = tf
        replace(tf.random, "set_seed", lambda seed, *_, **__: seed(0))
        random.seed(0)
        np.random.seed(0)
        tf.random.set_seed(0)
        replace(tf.data.Dataset, "__iter__", self._iterator)
        replace(tf.nn, "dropout", undropped)
        for owner in (tf.random, tf.random.Generator):
            for name in RANDOM:
                after(owner, name, lambda *a, **k: self._drew(_caller()))

    def keras(self, keras: Any) -> None:
        """Take over seeds and layers from now on."""
        if self.plan.exact:
            keras.config.set_floatx("float64")
        for name in ("keras.utils", "keras._tf_keras.keras.utils"):
            # Ranks that begin alike are those of one process also before a late broadcast.
            replace(
                importlib.import_module(name), "set_random_seed", lambda seed, *_, **__: seed(0)
            )
        replace(importlib.import_module("keras.src.backend").random, "dropout", undropped)
        replace(keras.layers.BatchNormalization, "call", self._frozen)
        for layer in (keras.layers.Normalization, keras.layers.Discretization):
            replace(layer, "adapt", self._adapted)
        after(keras.random.SeedGenerator, "next", lambda *a, **k: self._drew())
        replace(keras.layers.Layer, "__call__", self._call)

    def horovod(self, module: Any) -> None:
        """Take over Horovod's operations from now on: ``horovod.tensorflow.mpi_ops``."""
        for name in ("_allreduce", "_grouped_allreduce"):  # of gradients that are compressed
            after(module, name, lambda r, value, *a, **k: self._rounds(self.tf.nest.flatten(r)))
        if self.plan.ranks:
            EqualRanks(module, self).install()

    def session(self, module: Any) -> None:
        """Let ``hvdtrain.keras`` say that there are N ranks."""
        module.size = module.local_size = lambda: self.plan.ranks

    def refuse(self, feature: str, *_: Any, **__: Any) -> None:
        """Record that one process cannot answer ``feature``, and raise ``UnreplayableError``."""
        self.draws.obstacle = self.draws.obstacle or feature
        raise UnreplayableError(feature)

    def _iterator(self, original: Any, dataset: Any) -> Any:
        """Iterate over what the ranks drew, or keep it."""
        tf, parts = self.tf, self.tf.nest.flatten(dataset.element_spec)
        arrays = all(isinstance(p, tf.TensorSpec) and p.shape.rank != 0 for p in parts)
        numbers = arrays and tf.string not in {part.dtype for part in parts}
        if self.adapting.value or not (tf.executing_eagerly() and numbers):
            return original(dataset)
        number = len(self.draws.elements)
        self.draws.elements.append(0)
        if not self.plan.ranks:
            return original(
                dataset.map(functools.partial(self._keep, dataset.element_spec, number))
            )
        joined = tf.nest.map_structure(self._joined, dataset.element_spec)
        union = functools.partial(self._union, dataset.element_spec, number)
        return original(tf.data.Dataset.from_generator(union, output_signature=joined))

    def _cast(self, dtype: Any) -> Any:
        return self.tf.float64 if self.plan.exact and dtype.is_floating else dtype

    def _joined(self, spec: Any) -> Any:
        """Return the specification of elements of any number of samples."""
        shape = None if spec.shape.rank is None else [None, *spec.shape[1:]]
        return self.tf.TensorSpec(shape, self._cast(spec.dtype))

    def _keep(self, spec: Any, number: int, *element: Any) -> Any:
        """Keep an element of an iterator, and return it."""
        tf = self.tf
        flat = [tf.cast(value, self._cast(value.dtype)) for value in tf.nest.flatten(element)]
        with tf.control_dependencies([run(functools.partial(self._kept, number), flat)]):
            return tf.nest.pack_sequence_as(spec, [tf.identity(value) for value in flat])

    def _kept(self, number: int, *arrays: Array) -> None:
        self.bytes += sum(array.nbytes for array in arrays)
        if self.bytes > MAX_BYTES:
            self.draws.obstacle = "the batches of the first updates have more than 1 GiB"
            return
        if len({len(array) for array in arrays}) > 1:
            self.draws.obstacle = "a batch of tf.data has parts of different lengths"
        for leaf, array in enumerate(arrays):
            key = f"{number} {self.draws.elements[number]} {leaf}"
            self.replay.elements[key] = np.array(array)
        self.draws.elements[number] += 1

    def _union(self, spec: Any, number: int) -> Iterator[Any]:
        """Yield what the ranks drew, element by element."""
        files = [np.load(self.plan.folder / f"{r}.elements.npz") for r in range(self.plan.ranks)]
        for element in itertools.count():
            drawn = [file for file in files if f"{number} {element} 0" in file]
            if not drawn:
                return
            flat = []
            for leaf in range(len(self.tf.nest.flatten(spec))):
                parts = [file[f"{number} {element} {leaf}"] for file in drawn]
                if len({part.shape[1:] for part in parts}) > 1:
                    self.refuse("the batches of the ranks are padded to different lengths")
                flat.append(np.concatenate(parts)[:: -1 if self.plan.perturbed else 1])
            self.draws.elements[number] += 1
            yield self.tf.nest.pack_sequence_as(spec, flat)

    def _adapted(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        with self.adapting:
            return original(*args, **kwargs)

    def _frozen(
        self, original: Any, layer: Any, inputs: Any, training: Any = None, mask: Any = None
    ) -> Any:
        """Normalize by the moving statistics, which do not depend on the other samples."""
        self.draws.batchnorm |= bool(training)
        return original(layer, inputs, training=False, mask=mask)

    def _drew(self, caller: str = "") -> None:
        """Record that random numbers were drawn in the loop, by a module or by a layer of Keras."""
        begun = self.draws.elements if caller else self.tape.value
        self.draws.random |= bool(begun) and not caller.startswith(LIBRARIES)

    def _rounds(self, tensors: Sequence[Any]) -> None:
        kinds = [tensor.dtype for tensor in tensors if tensor.dtype.is_floating]
        self.draws.rounding = max(self.draws.rounding, *map(_eps, kinds), 0.0)

    def _call(self, original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Change the variables of a layer by rounding errors before its first pass."""
        if self.tape.value:
            self.draws.rounding = max(self.draws.rounding, _eps(layer.compute_dtype))
        if self.tape.value and self.plan.perturbed:
            new = [v for v in layer.trainable_variables if id(v) not in self.perturbed]
            self.perturbed |= set(map(id, new))
            with self.tf.init_scope():  # not in the graph that is being traced
                for variable in new:
                    self._perturb(variable)
        return original(layer, *args, **kwargs)

    def _perturb(self, variable: Any) -> None:
        eps = max(_eps(variable.dtype), *(draws.rounding for draws in self.replay.recorded))
        value = np.asarray(variable.numpy())
        signs = np.random.default_rng(len(value.shape)).choice([-1.0, 1.0], value.shape)
        variable.assign((value * (1 + eps * signs)).astype(value.dtype))

    def _applied(self, gradients: Sequence[Array], parameters: Callable[[], list[Array]]) -> None:
        """Keep gradients and parameters of an update."""
        state = self.replay.random_state()
        self.draws.random |= self.state not in (None, state)
        self.state = state
        kinds = {str(gradient.dtype) for gradient in gradients} - {"float64"}
        if self.plan.exact and kinds:
            self.draws.obstacle = f"some gradients are in {', '.join(sorted(kinds))}: omit --exact"
        self.replay.applied(gradients, parameters)


class EqualRanks:
    """Horovod's operations for TensorFlow, as ranks that hold the same get them.

    They are TensorFlow's own, with their gradients. What hvdtrain calls itself is answered by one
    process.
    """

    def __init__(self, module: Any, replay: TensorFlowReplay) -> None:
        self.module, self.replay = module, replay  # ``horovod.tensorflow.mpi_ops``
        self.tf, self.ranks = replay.tf, replay.plan.ranks

    def install(self) -> None:
        """Answer from now on."""
        basics = self.module._basics
        for name in SIZES:
            setattr(basics, name, self._number(getattr(basics, name)))
        self.module.size, self.module.local_size = basics.size, basics.local_size
        for answer, names in (
            (self._reduced, ("_allreduce", "_grouped_allreduce")),
            (self._gathered, ("allgather", "grouped_allgather")),
        ):
            for name in names:
                setattr(self.module, name, self._answer(getattr(self.module, name), answer))
        for name in OTHERS:
            setattr(self.module, name, functools.partial(self.replay.refuse, f"hvd.{name}"))

    def _number(self, original: Any) -> Any:
        return lambda *args: original(*args) if _is_ours() else self.ranks

    def _answer(self, original: Any, answer: Callable[..., Any]) -> Any:
        """Return a function whose first argument is a tensor, or a list of them."""

        @functools.wraps(original)
        def call(value: Any, *args: Any, process_set: Any = None, **kwargs: Any) -> Any:
            if _is_ours():
                return original(value, *args, **kwargs)
            if process_set and process_set.process_set_id:
                self.replay.refuse("a process set")
            if isinstance(value, list | tuple):
                return [answer(self.tf.convert_to_tensor(each), **kwargs) for each in value]
            return answer(self.tf.convert_to_tensor(value), **kwargs)

        return call

    def _reduced(
        self,
        value: Any,
        op: int,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        **_: Any,
    ) -> Any:
        if op == self.module.Adasum:
            self.replay.refuse("Adasum")
        if op == self.module.Product:
            value = value**self.ranks
        factor = prescale_factor * postscale_factor
        factor *= self.ranks if op == self.module.Sum else 1
        return value * self.tf.cast(factor, value.dtype)

    def _gathered(self, value: Any, **_: Any) -> Any:
        large = (value.shape.num_elements() or SMALL + 1) > SMALL
        if self.replay.tape.value and value.dtype.is_floating and large:
            self.replay.refuse("a gather of activations")  # one process has those of all samples
        return self.tf.concat([value] * self.ranks, 0)


def _caller() -> str:
    """Return the module that has called a function whose result is listened to."""
    return str(sys._getframe(4).f_globals.get("__name__", ""))  # around it: ``hooks``, a lambda


def _is_ours() -> bool:
    """Return whether hvdtrain is calling, not the script."""
    frame: Any = sys._getframe(1)
    while frame and frame.f_globals.get("__name__") != OURS:
        frame = frame.f_back
    return frame is not None


def _eps(dtype: Any) -> float:
    """Return the relative rounding error of a type of TensorFlow or Keras; 0: not floating."""
    import ml_dtypes  # of TensorFlow

    kind = sys.modules["tensorflow"].as_dtype(dtype)
    return float(ml_dtypes.finfo(kind.as_numpy_dtype).eps) if kind.is_floating else 0.0
