"""ResNets for TensorFlow: images read ahead by the threads of tf.data."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.steps.randomness import seed_of
from hvdtrain.steps.sharding import Indices, Part
from hvdtrain.workloads.base import Data, Indexed, Loaded, TaskOptions
from hvdtrain.workloads.resnet import data
from hvdtrain.workloads.resnet.data import DEVIATION, MEAN, RESIZE, ImageFolder
from hvdtrain.workloads.resnet.tensorflow_net import network
from hvdtrain.workloads.tensorflow import TFTask, weight_dtype

AHEAD = 2  # batches that are ready before they are asked for


class Folder(Data):
    """Images of a folder, decoded, cropped and put into batches by a tf.data pipeline.

    Args:
        images: the files.
        options: image size, seed, and number of threads that decode.
        training: random crops and flips; otherwise the centre of each image.
    """

    def __init__(self, images: ImageFolder, options: TaskOptions, *, training: bool) -> None:
        self.samples, self.digest = len(images.paths), images.digest
        self.images, self.options = images, options
        self._read = random_crop if training else centre_crop
        self._paths = np.array([os.fsencode(path) for path in images.paths])  # any name will do

    def training(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Loaded]]:
        """See ``Data``."""
        wanted = list(parts)  # here and not in a thread of tf.data: shards tell their adapter
        batches = self._batches([part.indices for part in wanted], wanted)
        yield from zip(wanted, batches, strict=True)

    def evaluation(self, batches: Iterable[Indices]) -> Iterator[Loaded]:
        """See ``Data``."""
        wanted = list(batches)
        yield from self._batches(wanted, [None] * len(wanted))

    def _batches(self, batches: list[Indices], parts: list[Any]) -> Iterator[Loaded]:
        """The images of each batch, in order; one may be empty."""
        size = self.options.image_size
        full = max((len(indices) for indices in batches), default=0)
        if any(0 < len(indices) < full for indices in batches[:-1]):
            raise ValueError("all batches but the last must have the same size")

        def items() -> Iterator[tuple[Any, ...]]:
            for indices, part in zip(batches, parts, strict=True):
                if len(indices):
                    labels = self.images.labels[indices]
                    yield self._paths[indices], labels, self._seeds(indices, part)

        shapes = (tf.TensorSpec(None, tf.string), tf.TensorSpec(None, tf.int64))
        dataset = tf.data.Dataset.from_generator(
            items, output_signature=(*shapes, tf.TensorSpec((None, 2), tf.int64))
        )
        # Unconverted: autograph would write the function into a file in the temporary folder.
        read = tf.autograph.experimental.do_not_convert(
            lambda path, label, seed: (self._read(path, seed, size), label)
        )
        dataset = dataset.unbatch().map(
            read,
            num_parallel_calls=max(1, self.options.workers),
            deterministic=True,
        )
        dataset = dataset.batch(max(full, 1)).prefetch(AHEAD)
        pipeline = iter(dataset.with_options(_pipeline_options(self.options.workers)))
        for indices in batches:
            if not len(indices):
                yield Loaded(tf.zeros((0, size, size, 3), tf.uint8), tf.zeros(0, tf.int64))
                continue
            try:
                yield Loaded(*next(pipeline))
            except tf.errors.OpError as error:
                raise self._broken(indices, error) from error

    def _seeds(self, indices: Indices, part: Part | None) -> Any:
        # The augmentation is a function of (seed, epoch, sample), whichever thread does it.
        if part is None:
            return np.zeros((len(indices), 2), np.int64)
        epoch, seed = part.start.epoch, self.options.seed
        return np.array([[seed_of(seed, epoch, int(index)), 0] for index in indices], np.int64)

    def _broken(self, indices: Indices, error: Exception) -> Exception:
        """The error that names the file among ``indices`` that cannot be decoded."""
        for index in indices:
            try:
                self._read(self._paths[index], tf.zeros(2, tf.int64), self.options.image_size)
            except tf.errors.OpError as reason:
                # "{{node ...}} why [Op:DecodeImage]": the middle is for the user.
                why = re.sub(r"\{\{.*?\}\}|\[Op:.*", "", str(reason.message))
                return data.broken_image(self.images.paths[index], why.strip(" ."))
        return error


def _pipeline_options(workers: int) -> tf.data.Options:
    options = tf.data.Options()
    # A pool of its own: TensorFlow's threads are one a core, and the training step has them.
    options.threading.private_threadpool_size = max(1, workers) + 1
    options.threading.max_intra_op_parallelism = 1
    return options


def random_crop(path: Any, seed: Any, size: int) -> Any:
    """A random cut of the image (8 to 100 % of its area), resized, flipped or not.

    Args:
        path: of a JPEG or PNG file, a string tensor.
        seed: int64, shape (2,); the same seed gives the same pixels.
        size: side of the result, in pixels.

    Returns:
        uint8, shape (size, size, 3).
    """
    encoded = tf.io.read_file(path)

    def window(shape: Any) -> Any:
        begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
            shape,
            tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
            seed,
            min_object_covered=0.0,
            aspect_ratio_range=(3 / 4, 4 / 3),
            area_range=(0.08, 1.0),
            max_attempts=10,
        )
        return tf.stack([begin[0], begin[1], extent[0], extent[1]])

    def cut_jpeg() -> Any:  # decodes little more than the window
        place = window(tf.image.extract_jpeg_shape(encoded))
        return tf.image.decode_and_crop_jpeg(encoded, place, channels=3)

    def cut_other() -> Any:
        image = _decode(encoded)
        top, left, height, width = tf.unstack(window(tf.shape(image)))
        return image[top : top + height, left : left + width]

    image = tf.cond(tf.io.is_jpeg(encoded), cut_jpeg, cut_other)
    image = _resize(image, (size, size))
    return tf.image.stateless_random_flip_left_right(image, seed + tf.constant([0, 1], tf.int64))


def centre_crop(path: Any, seed: Any, size: int) -> Any:  # noqa: ARG001 (as random_crop)
    """The shorter side resized to 256/224 of ``size``, then the middle square of ``size``."""
    image = _decode(tf.io.read_file(path))
    shape = tf.shape(image)[:2]
    shorter = round(size * RESIZE)
    resized = shape * shorter // tf.reduce_min(shape)
    top, left = tf.unstack((resized - size) // 2)
    return _resize(image, resized)[top : top + size, left : left + size]


def _decode(encoded: Any) -> Any:
    return tf.io.decode_image(encoded, channels=3, expand_animations=False)


def _resize(image: Any, shape: Any) -> Any:
    resized = tf.image.resize(image, shape)  # bilinear, as TensorFlow's ResNets always had it
    return tf.saturate_cast(tf.round(resized), tf.uint8)


class Synthetic(Indexed):
    """Random images made once; as many samples as ImageNet, drawn from a small pool."""

    samples = data.SYNTHETIC_SAMPLES

    def __init__(self, options: TaskOptions) -> None:
        generator = np.random.default_rng(options.seed)
        shape = (data.SYNTHETIC_POOL, options.image_size, options.image_size, 3)
        labels = generator.integers(data.SYNTHETIC_CLASSES, size=data.SYNTHETIC_POOL)
        with tf.device(options.device):
            self.images = tf.constant(generator.standard_normal(shape, np.float32))
            self.labels = tf.constant(labels)

    def fetch(self, indices: Indices) -> Loaded:
        """See ``Indexed``."""
        index = indices % data.SYNTHETIC_POOL
        return Loaded(tf.gather(self.images, index), tf.gather(self.labels, index))


def folder(images: ImageFolder, options: TaskOptions, *, training: bool) -> Folder:
    """The images of a folder."""
    return Folder(images, options, training=training)


def synthetic(options: TaskOptions) -> Synthetic:
    """Random images."""
    return Synthetic(options)


def task(options: TaskOptions, train: Data, test: Data | None, classes: int) -> TFTask:
    """A ResNet as a task."""
    keras.utils.set_random_seed(options.seed)
    model = network(options.model, classes, options.image_size, weight_dtype(options))
    if isinstance(train, Synthetic):
        return TFTask(model, options, train, test)
    scale = 1 / (255 * np.array(DEVIATION)), -np.array(MEAN) / np.array(DEVIATION)
    return TFTask(model, options, train, test, scale=scale)
