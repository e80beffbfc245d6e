"""Watch TensorFlow and Keras, eagerly and in graphs.

In a graph, a wrapped function runs only when the graph is traced: it then adds an operation that
records the values each time the graph is run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.commands.verify.hooks import Depth, after, best_effort, replace
from hvdtrain.commands.verify.script.record import Array, ScriptRecorder
from hvdtrain.system.machine.gpus import tensorflow_processor


def run(note: Callable[..., None], tensors: Sequence[Any] = ()) -> Any:
    """Call ``note`` with the arrays of ``tensors``: now, or each time the graph is run.

    Returns:
        In a graph, a tensor to depend on; otherwise None.
    """
    tf = sys.modules["tensorflow"]
    if tf.executing_eagerly():
        note(*(np.array(value) for value in tensors))
        return None

    def noted(*arrays: Any) -> Any:
        best_effort(note, *arrays)
        return np.int32(0)

    return tf.numpy_function(noted, list(tensors), tf.int32)


class TensorFlowWatch:
    """Watch both packages; TensorFlow imports ``keras`` only when the script needs it."""

    def __init__(self, recorder: ScriptRecorder) -> None:
        self.recorder = recorder
        self.tape = Depth()  # open gradient tapes
        self.layer = Depth()  # open calls of layers
        self.jacobian = Depth()  # open calls of `jacobian`
        self.applied: Callable[[list[Array], Callable[[], list[Array]]], Any] = lambda *_: None
        self.gradients: list[Any] = []  # of the last tape, until the update
        recorder.gradient_tests.append(self.is_gradient)
        self.tf: Any = None

    def tensorflow(self, tf: Any) -> None:
        """Watch TensorFlow from now on."""
        self.tf = tf
        after(tf.GradientTape, "__enter__", lambda *a: self.tape.__enter__())
        after(tf.GradientTape, "__exit__", lambda *a: self.tape.__exit__())
        replace(tf.GradientTape, "gradient", self._gradient)
        for name in ("jacobian", "batch_jacobian"):  # they call `gradient` in a vectorized loop
            replace(tf.GradientTape, name, self._jacobian)
        after(tf.data.Dataset, "shard", self._shard)
        for owner, name in (
            (tf.train.Checkpoint, "save"),
            (tf.train.Checkpoint, "_write"),  # also of `write` and `tf.train.CheckpointManager`
            (tf.saved_model, "save"),
        ):
            after(owner, name, self._saved)
        from tensorflow.python.eager.polymorphic_function import polymorphic_function

        after(polymorphic_function.Function, "__call__", lambda *a, **k: self._end())
        # Not `Model.compile`: Keras does not compile a loaded model if that has been replaced.
        replace(polymorphic_function.Function, "__init__", _without_xla)

    def keras(self, keras: Any) -> None:
        """Watch Keras from now on."""
        if keras.backend.backend() != "tensorflow":
            return
        classes = keras.optimizers.Optimizer.__mro__
        replace(next(owner for owner in classes if "apply" in vars(owner)), "apply", self._apply)
        replace(keras.layers.Layer, "__call__", self._call)
        for name in ("save", "save_weights", "export"):
            after(keras.Model, name, self._saved)

    def _end(self) -> None:
        if self.tf.executing_eagerly():
            self.recorder.end_if_enough()

    def is_gradient(self, value: Any) -> bool:
        """Return whether ``value`` is a gradient, or computed from one, before the update.

        Scalars computed from one are excluded: they may be the loss.
        """
        if not self.gradients or not self.tf.is_tensor(value):
            return False
        shapes = [tuple(grad.shape) for grad in self.gradients if tuple(grad.shape)]
        return any(value is grad for grad in self.gradients) or tuple(value.shape) in shapes

    def _jacobian(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        with self.jacobian:
            return original(*args, **kwargs)

    def _gradient(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Record this rank's loss and its local gradients, before they are reduced."""
        result = original(*args, **kwargs)
        if self.jacobian.value:
            return result
        tf = self.tf
        flat = tf.nest.flatten(result)
        dense = [tf.convert_to_tensor(value) for value in flat if value is not None]
        targets = tf.nest.flatten(args[1] if len(args) > 1 else kwargs.get("target"))
        losses = [tf.reduce_sum(tf.cast(t, tf.float64)) for t in targets if tf.is_tensor(t)]

        def note(loss: Any, *arrays: Any) -> None:
            if self.recorder.detailed:
                self.recorder.loss, self.recorder.local = float(loss), list(arrays)

        done = run(note, [sum(losses, tf.zeros([], tf.float64)), *dense])
        if done is None:
            self.gradients = [value for value in flat if value is not None]
            return result
        with tf.control_dependencies([done]):  # recorded before they are used
            flat = [tf.identity(value) if tf.is_tensor(value) else value for value in flat]
        self.gradients = [value for value in flat if value is not None]
        return tf.nest.pack_sequence_as(result, flat)

    def _apply(
        self, original: Any, optimizer: Any, grads: Any, trainable_variables: Any = None
    ) -> Any:
        """Record an update of a Keras optimizer, after Horovod's wrapper changed the gradients."""
        tf, grads = self.tf, list(grads)
        if self.recorder.ignored or not grads:
            return original(optimizer, grads, trainable_variables)
        self.gradients = []
        variables = list(
            optimizer._trainable_variables if trainable_variables is None else trainable_variables
        )
        pairs = [(g, v) for g, v in zip(grads, variables, strict=False) if g is not None]
        built = optimizer.built
        rate = tf.identity(tf.convert_to_tensor(optimizer.learning_rate))
        # Variables may be of Keras or of TensorFlow.
        before = [tf.identity(tf.convert_to_tensor(v)) for _, v in pairs]
        # Not `.variables`: Horovod's wrapper overrides it, and that raises in Keras 3.
        slots = [v for v in optimizer._variables if not v.name.endswith("learning_rate")]
        state = [tf.identity(tf.convert_to_tensor(v)) for v in slots] if built else []
        result = original(optimizer, grads, trainable_variables and variables)
        applied = [tf.convert_to_tensor(g) for g, _ in pairs]
        new = [tf.convert_to_tensor(v) for _, v in pairs]
        count = len(pairs)

        def note(*arrays: Any) -> None:
            record = self.recorder.record
            record.processor = record.processor or tensorflow_processor(tf)
            self.recorder.rate(float(arrays[0]))
            if not self.recorder.detailed:
                self.recorder.count()
                return
            values = [arrays[1 + count * n :][:count] for n in range(3)]
            gradients = list(values[1])
            kept = arrays[1 + 3 * count :] if built else None
            self.recorder.update(before=values[0], applied=gradients, state=kept)
            self.applied(gradients, lambda: list(values[2]))

        run(note, [rate, *before, *applied, *new, *state])
        self._end()
        return result

    def _call(self, original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Record the input of the outermost layer with weights, within a gradient tape.

        Layers create their weights in the first call; layers that only augment have none.
        """
        with self.layer as level:
            result = original(layer, *args, **kwargs)
        inputs = self.tf.nest.flatten(args)[:1]
        trained = level == 1 and self.tape.value and layer.trainable_variables
        if trained and inputs and isinstance(inputs[0], self.tf.Tensor):  # not sparse or ragged
            run(self.recorder.samples, inputs)
        return result

    def _shard(self, r: Any, data: Any, num_shards: Any, index: Any, name: Any = None) -> None:
        self.recorder.call("Dataset.shard", shards=int(num_shards), shard=int(index))

    def _saved(self, result: Any, *args: Any, **kwargs: Any) -> None:
        self.recorder.wrote(next(iter([*args[1:2], *kwargs.values()]), None))


def _without_xla(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Disable XLA: it supports neither Horovod nor the operations that record values."""
    if kwargs.get("jit_compile"):
        kwargs["jit_compile"] = False
    return original(*args, **kwargs)
