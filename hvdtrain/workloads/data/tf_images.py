"""Images for TensorFlow: read ahead by the threads of tf.data, or generated once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from hvdtrain.errors import UsageError
from hvdtrain.steps.sharding import Indices, Part, seed_of
from hvdtrain.tasks.dataset import Batch, Dataset, Indexed
from hvdtrain.workloads.data.image_folder import (
    SYNTHETIC_CLASSES,
    SYNTHETIC_POOL,
    SYNTHETIC_SAMPLES,
    ImageFolder,
    ImageOptions,
    broken_image,
)

AHEAD = 2  # number of prefetched batches


class Folder(Dataset):
    """Images of a folder, or packed, decoded, cropped and batched by a tf.data pipeline.

    ``crop`` is a traced function (bytes of a file, seed, side) -> uint8, shape (side, side, 3).
    """

    def __init__(
        self, images: ImageFolder, crop: Callable[..., Any], options: ImageOptions
    ) -> None:
        self.samples, self.digest = len(images.files), images.digest
        self.images, self.options = images, options
        self._crop = crop

    @override
    def training(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Batch]]:
        wanted = list(parts)  # not in a thread of tf.data: shards notify their adapter
        batches = self._batches([part.indices for part in wanted], wanted)
        yield from zip(wanted, batches, strict=True)

    @override
    def evaluation(self, batches: Iterable[Indices]) -> Iterator[Batch]:
        wanted = list(batches)
        yield from self._batches(wanted, [None] * len(wanted))

    def _batches(self, batches: list[Indices], parts: list[Any]) -> Iterator[Batch]:
        """Yield the images of each batch, in order; one may be empty."""
        size = self.options.image_size
        full = max((len(indices) for indices in batches), default=0)
        if any(0 < len(indices) < full for indices in batches[:-1]):
            raise ValueError("all batches but the last must have the same size")

        def items() -> Iterator[tuple[Any, ...]]:
            for indices, part in zip(batches, parts, strict=True):
                if len(indices):
                    self.images.files.will_need(indices.tolist())
                    yield indices, self.images.labels[indices], self._seeds(indices, part)

        shapes = (tf.TensorSpec(None, tf.int64), tf.TensorSpec(None, tf.int64))
        dataset = tf.data.Dataset.from_generator(
            items, output_signature=(*shapes, tf.TensorSpec((None, 2), tf.int64))
        )
        # Not converted: autograph would write the function to a temporary file.
        read = tf.autograph.experimental.do_not_convert(
            lambda index, label, seed: (self._read(index, seed, size), label)
        )
        threads = max(1, self.options.workers or 0)
        dataset = dataset.unbatch().map(read, num_parallel_calls=threads, deterministic=True)
        dataset = dataset.batch(max(full, 1)).prefetch(AHEAD)
        pipeline = iter(dataset.with_options(_pipeline_options(threads)))
        for indices in batches:
            if not len(indices):
                yield Batch(tf.zeros((0, size, size, 3), tf.uint8), tf.zeros(0, tf.int64))
                continue
            try:
                yield Batch(*next(pipeline))
            except tf.errors.OpError as error:
                raise self._broken(indices, error) from error

    def _read(self, index: Any, seed: Any, size: int) -> Any:
        encoded = tf.numpy_function(self._encoded, [index], tf.string, stateful=False)
        return self._crop(tf.reshape(encoded, ()), seed, size)

    def _encoded(self, index: Any) -> bytes:
        with self.images.files.open(int(index)) as file:
            return file.read()

    def _seeds(self, indices: Indices, part: Part | None) -> Any:
        # The augmentation depends only on (seed, epoch, sample), not on the thread.
        if part is None:
            return np.zeros((len(indices), 2), np.int64)
        epoch, seed = part.start.epoch, self.options.seed
        return np.array([[seed_of(seed, epoch, int(index)), 0] for index in indices], np.int64)

    def _broken(self, indices: Indices, error: Exception) -> Exception:
        """Return the error that names the file among ``indices`` that cannot be decoded."""
        for index in indices.tolist():
            name = self.images.files.name(index)
            try:
                encoded = tf.constant(self._encoded(index))
                self._crop(encoded, tf.zeros(2, tf.int64), self.options.image_size)
            except UsageError as reason:
                return reason
            except OSError as reason:
                return broken_image(name, reason.strerror)
            except tf.errors.OpError as reason:
                return broken_image(name, _message(reason))
        return error


def _message(error: tf.errors.OpError) -> str:
    """Return the message within ``{{node ...}} MESSAGE [Op:DecodeImage]``."""
    return re.sub(r"\{\{.*?\}\}|\[Op:.*", "", str(error.message)).strip(" .")


def by_tensorflow(file: IO[bytes]) -> None:
    """Decode an image by TensorFlow.

    It refuses some that Pillow reads, such as a PNG that lacks its last bytes.
    """
    try:
        tf.io.decode_image(file.read(), channels=3, expand_animations=False)
    except tf.errors.OpError as error:
        raise ValueError(_message(error)) from error


def _pipeline_options(threads: int) -> tf.data.Options:
    options = tf.data.Options()
    # A separate pool: TensorFlow's threads, one per core, are used by the training step.
    options.threading.private_threadpool_size = threads + 1
    options.threading.max_intra_op_parallelism = 1
    return options


class Synthetic(Indexed):
    """Random images, generated once, for measuring speed."""

    samples = SYNTHETIC_SAMPLES

    def __init__(self, options: ImageOptions) -> None:
        generator = np.random.default_rng(options.seed)
        shape = (SYNTHETIC_POOL, options.image_size, options.image_size, 3)
        labels = generator.integers(SYNTHETIC_CLASSES, size=SYNTHETIC_POOL)
        with tf.device(options.device):
            self.images = tf.constant(generator.standard_normal(shape, np.float32))
            self.labels = tf.constant(labels)

    @override
    def fetch(self, indices: Indices) -> Batch:
        index = indices % SYNTHETIC_POOL
        return Batch(tf.gather(self.images, index), tf.gather(self.labels, index))
