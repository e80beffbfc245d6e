"""Step 5 for TensorFlow: gradients summed over the ranks in a few large buckets.

A bucket is one flat tensor, so Horovod starts few collectives, and there is one order of
summation: results are bit-equal from run to run. The buckets go from the last layer to the first,
as the backward pass produces them, so the sum of one runs beside the computation of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.adapters.common import in_buckets
from hvdtrain.config.levers import BUCKET_BYTES
from hvdtrain.system.runtime.waits import TracedCalls

Reduce = Callable[[Any, str], Any]
"""(flat tensor, name) -> its sum over all ranks."""


class Buckets:
    """Sums the gradients of an optimizer over the ranks, inside a traced function or outside.

    Every rank must call ``sum`` for the same variables; a rank without samples gives zeros.

    Args:
        name: of this optimizer, the same on all ranks.
        reduce: sums a tensor over all ranks; the name is the same on all of them.
        kind: the 16-bit type in which gradients are sent and summed; None: their own. See
            ``adapters/pytorch/compression.py`` for what becomes of large ones.
        full: bytes from which on a bucket takes no other gradient.
    """

    def __init__(
        self, name: str, reduce: Reduce, kind: Any = None, full: int = BUCKET_BYTES
    ) -> None:
        self.name, self.reduce, self.kind, self.full = name, reduce, kind, full
        self.combine: Reduce | None = None  # a bucket's gradients, in place of their sum
        self.weight = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="part_weight")
        self.sums = tf.Variable(0, dtype=tf.int64, trainable=False, name="sums")  # made so far
        self._begun = tf.Variable(0, dtype=tf.int64, trainable=False, name="sums_begun")
        self._done = tf.Variable(0, dtype=tf.int64, trainable=False, name="sums_done")
        # They travel with the last bucket: this rank's wish to stop, and whether anyone has it.
        self.stop = tf.Variable(0.0, trainable=False, name="stop_wanted")
        self.agreed = tf.Variable(0.0, trainable=False, name="stop_agreed")
        self.messages: dict[str, int] | None = None  # of a step: count and bytes
        self._blocked = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="blocked")
        self._watched = False

    def sum(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        *,
        weighted: bool = False,
        weight: Any = None,
    ) -> list[Any]:
        """Sum the gradients, times ``weight``, over all ranks.

        Args:
            gradients: one per variable; None stands for zeros.
            variables: the variables, in an order that is the same on all ranks.
            weighted: the loss was multiplied by ``weight`` already. A weight of 0 otherwise makes
                zeros of whatever they are: the mean over no samples is not a number.
            weight: of this rank, a number or a tensor; None: the variable of that name.
        """
        weight = None if weighted else self.weight if weight is None else weight
        dense = [_dense(g, v) for g, v in zip(gradients, variables, strict=True)]
        result: list[Any] = [None] * len(dense)
        ready, done = [], []
        for number, group in enumerate(groups := self._groups(dense)):
            parts = [_weighed(tf.reshape(dense[index], [-1]), weight) for index in group]
            # Every bucket has this element, from a variable: a bucket of constants alone would be
            # summed once, when TensorFlow folds constants, and never again.
            ready.append(tf.concat([*parts, tf.cast(self.stop, parts[0].dtype)[None]], 0))
            done.append(self._reduced(ready[-1], f"{self.name}.{number}"))
            lengths = [dense[index].shape.num_elements() for index in group]
            *pieces, stop = tf.split(done[-1], [*lengths, 1])
            for index, piece in zip(group, pieces, strict=True):
                result[index] = tf.reshape(piece, dense[index].shape)
            if number == len(groups) - 1:
                self.sums.assign_add(1)
                self.agreed.assign(tf.cast(stop[0], tf.float32))
        # Outside of a trace, each sum is waited for before the next one begins.
        if tf.inside_function():
            self._count(ready, done)
            if _has_clock():
                self._watch(ready, done)
        return result

    def _groups(self, dense: Sequence[Any]) -> list[list[int]]:
        """Return which gradients share a bucket, by place; note what that makes of a step."""
        lengths = [one.shape.num_elements() for one in dense]
        sizes = [length * one.dtype.size for length, one in zip(lengths, dense, strict=True)]
        kinds = [(one.dtype, size) for one, size in zip(dense, sizes, strict=True)]
        groups = in_buckets(kinds, self.full)
        sent = self.kind.size * sum(lengths) if self.kind else sum(sizes)
        self.messages = {"count": len(groups), "bytes": sent}
        return groups

    def _reduced(self, flat: Any, name: str) -> Any:
        """Return the sum of ``flat``, or what ``combine`` makes of it without its last element."""
        sent = tf.cast(flat, self.kind or flat.dtype)
        if self.combine is None:
            total = self.reduce(sent, name)
        else:
            whole, stop = self.combine(sent[:-1], name), self.reduce(sent[-1:], f"{name}.stop")
            total = tf.concat([whole, stop], 0)
        return tf.cast(total, flat.dtype)

    def _count(self, ready: list[Any], done: list[Any]) -> None:
        """Count, whenever the trace runs, sums that this rank has come to, and those done."""
        with tf.control_dependencies(ready):
            self._begun.assign_add(1)
        with tf.control_dependencies(done):
            self._done.assign_add(1)

    def _watch(self, ready: list[Any], done: list[Any]) -> None:
        """Add up, whenever the trace runs, how long the sums take once all gradients are there."""
        with tf.control_dependencies(ready):
            start = tf.timestamp()
        with tf.control_dependencies(done):
            end = tf.timestamp()
        self._blocked.assign_add(end - start)
        self._watched = True

    def traced_calls(self) -> TracedCalls:
        """Return how often a trace has begun to wait for the other ranks, and has gone on."""
        return TracedCalls(int(self._begun), int(self._done))

    @property
    def blocked_seconds(self) -> float | None:
        """Seconds that this rank waited for sums, in all; None where that was not measured."""
        return float(self._blocked.numpy()) if self._watched else None

    @property
    def stop_agreed(self) -> bool:
        """Whether any rank wanted to stop at the last step."""
        return bool(self.agreed.numpy() > 0)


def _weighed(flat: Any, weight: Any) -> Any:
    """Multiply; each pass over all gradients is one too many, so a weight of None costs none."""
    return flat if weight is None else tf.math.multiply_no_nan(flat, tf.cast(weight, flat.dtype))


def _has_clock() -> bool:
    """Return whether a trace may ask for the time: not where it has to be deterministic."""
    try:
        with tf.init_scope():
            tf.timestamp()
    except tf.errors.FailedPreconditionError:
        return False
    return True


def _dense(gradient: Any, variable: Any) -> Any:
    if gradient is None:
        return tf.zeros(variable.shape, variable.dtype)
    gradient = tf.convert_to_tensor(gradient)  # the sparse gradient of an embedding too
    return tf.ensure_shape(gradient, variable.shape)
