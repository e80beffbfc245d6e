"""ResNets for TensorFlow: the transforms, and the task."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import initializers, layers

from hvdtrain.tasks.dataset import Dataset
from hvdtrain.tasks.training_step_tensorflow import TFTask, weight_dtype
from hvdtrain.workloads.data.image_folder import ImageOptions
from hvdtrain.workloads.data.tf_images import Synthetic
from hvdtrain.workloads.resnet.task import DEVIATION, MAX_LENGTH, MEAN, RESIZE


def random_crop(encoded: Any, seed: Any, size: int) -> Any:
    """Return a random window (8 to 100 % of the area) of the image, resized and randomly flipped.

    The bytes of a JPEG or PNG file, a string tensor, become uint8 of shape (size, size, 3), a
    function of ``seed``, int64 of shape (2,).
    """

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
        crop = window(tf.image.extract_jpeg_shape(encoded))
        return tf.image.decode_and_crop_jpeg(encoded, crop, channels=3)

    def cut_png() -> Any:
        image = _decode(encoded)
        top, left, height, width = tf.unstack(window(tf.shape(image)))
        return image[top : top + height, left : left + width]

    image = tf.cond(tf.io.is_jpeg(encoded), cut_jpeg, cut_png)
    image = _resize(image, (size, size))
    return tf.image.stateless_random_flip_left_right(image, seed + tf.constant([0, 1], tf.int64))


def centre_crop(encoded: Any, seed: Any, size: int) -> Any:  # noqa: ARG001 (as random_crop)
    """Resize the shorter side to 256/224 of ``size``, and return the central square of ``size``."""
    image = _decode(encoded)
    shape = tf.shape(image)[:2]
    shorter, least = round(size * RESIZE), tf.reduce_min(shape)
    middle = tf.minimum(shape, MAX_LENGTH * least + shape % 2)
    top, left = tf.unstack((shape - middle) // 2)
    image = image[top : top + middle[0], left : left + middle[1]]
    resized = middle * shorter // least
    top, left = tf.unstack((resized - size) // 2)
    return _resize(image, resized)[top : top + size, left : left + size]


def _decode(encoded: Any) -> Any:
    return tf.io.decode_image(encoded, channels=3, expand_animations=False)


def _resize(image: Any, shape: Any) -> Any:
    resized = tf.image.resize(image, shape)  # bilinear, as in TensorFlow's ResNets
    return tf.saturate_cast(tf.round(resized), tf.uint8)


def task(options: ImageOptions, train: Dataset, test: Dataset | None, classes: int) -> TFTask:
    """Return a ResNet as a task."""
    keras.utils.set_random_seed(options.seed)
    model = network(options.model, classes, options.image_size, weight_dtype(options))
    deviation = np.array(DEVIATION)
    scale = 1 / (255 * deviation), -np.array(MEAN) / deviation
    return TFTask(model, options, train, test, None if isinstance(train, Synthetic) else scale)


# Blocks of each stage, and whether they are bottlenecks.
STAGES = {
    "resnet18": ((2, 2, 2, 2), False),
    "resnet34": ((3, 4, 6, 3), False),
    "resnet50": ((3, 4, 6, 3), True),
    "resnet101": ((3, 4, 23, 3), True),
    "resnet152": ((3, 8, 36, 3), True),
}
EXPANSION = 4  # of a bottleneck: channels out for each channel within


class BatchNorm(keras.layers.BatchNormalization):
    """Keras' BatchNormalization by TensorFlow's fused operation: 3 to 5 times faster on a CPU.

    Channels last. The running variance is unbiased, as PyTorch's.
    """

    unbiased = True

    def __init__(self, **options: Any) -> None:
        super().__init__(axis=-1, momentum=0.9, epsilon=1e-5, **options)

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """Normalise ``inputs`` of shape (n, height, width, channels)."""
        training = bool(training) and self.trainable
        if self.compute_dtype == "float64":  # the fused operation knows no float64
            return self._normalize(inputs, training)
        result, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=inputs,
            scale=self.gamma.value,
            offset=self.beta.value,
            mean=self.moving_mean.value,
            variance=self.moving_variance.value,
            epsilon=self.epsilon,
            exponential_avg_factor=1 - self.momentum,
            is_training=training,
        )
        if training:
            self.moving_mean.assign(mean)
            self.moving_variance.assign(variance)
        return result

    def _normalize(self, x: Any, training: bool) -> Any:
        if training:
            mean, variance = tf.nn.moments(x, [0, 1, 2])
            n = tf.cast(tf.size(x) // x.shape[-1], x.dtype)
            for running, value in (
                (self.moving_mean, mean),
                (self.moving_variance, variance * n / tf.maximum(n - 1, 1)),
            ):
                running.assign(running * self.momentum + value * (1 - self.momentum))
        else:
            mean, variance = self.moving_mean.value, self.moving_variance.value
        scale = self.gamma.value * tf.math.rsqrt(variance + self.epsilon)
        return (x - mean) * scale + self.beta.value


class _Builder:
    """Layers with the names that torchvision gives them."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def conv(self, x: Any, channels: int, side: int, stride: int, name: str) -> Any:
        # "same" puts the odd padding of a stride of 2 at the end only; torchvision has it evenly.
        if side > 1 and stride > 1:
            x = layers.ZeroPadding2D(side // 2, name=f"{name}.pad", dtype=self.dtype)(x)
        layer = layers.Conv2D(
            channels,
            side,
            stride,
            padding="same" if stride == 1 else "valid",
            use_bias=False,
            kernel_initializer=initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal"),
            name=name,
            dtype=self.dtype,
        )
        return layer(x)

    def norm(self, x: Any, name: str) -> Any:
        return BatchNorm(name=name, dtype=self.dtype)(x)

    def relu(self, x: Any, name: str) -> Any:
        return layers.ReLU(name=name, dtype=self.dtype)(x)

    def block(self, x: Any, width: int, stride: int, bottleneck: bool, name: str) -> Any:
        """Add two 3x3 convolutions, or 1x1, 3x3 and 1x1, and the way around them."""
        if bottleneck:
            convolutions = [(width, 1, 1), (width, 3, stride), (width * EXPANSION, 1, 1)]
        else:
            convolutions = [(width, 3, stride), (width, 3, 1)]
        out = convolutions[-1][0]
        way_around = x
        if stride > 1 or x.shape[-1] != out:
            way_around = self.conv(x, out, 1, stride, f"{name}.downsample.0")
            way_around = self.norm(way_around, f"{name}.downsample.1")
        for number, (channels, side, step) in enumerate(convolutions, 1):
            x = self.conv(x, channels, side, step, f"{name}.conv{number}")
            x = self.norm(x, f"{name}.bn{number}")
            if number < len(convolutions):
                x = self.relu(x, f"{name}.relu{number}")
        x = layers.Add(name=f"{name}.add", dtype=self.dtype)([x, way_around])
        return self.relu(x, f"{name}.relu")


def network(model: str, classes: int, image_size: int, dtype: str = "float32") -> keras.Model:
    """Return the ResNet called ``model``, for images of shape (n, image_size, image_size, 3).

    The names are those of ``STAGES``; ``dtype`` is that of weights and computation.
    """
    blocks, bottleneck = STAGES[model]
    build = _Builder(dtype)
    image = keras.Input((image_size, image_size, 3), dtype=dtype)
    x = build.conv(image, 64, 7, 2, "conv1")
    x = build.relu(build.norm(x, "bn1"), "relu")
    # After a ReLU zeros pad as well as torchvision's minus infinity.
    x = layers.ZeroPadding2D(1, name="maxpool.pad", dtype=dtype)(x)
    x = layers.MaxPooling2D(3, 2, name="maxpool", dtype=dtype)(x)
    for stage, count in enumerate(blocks):
        for number in range(count):
            stride = 2 if stage > 0 and number == 0 else 1
            name = f"layer{stage + 1}.{number}"
            x = build.block(x, 64 * 2**stage, stride, bottleneck, name)
    x = layers.GlobalAveragePooling2D(name="avgpool", dtype=dtype)(x)
    bound = x.shape[-1] ** -0.5
    uniform = initializers.RandomUniform(-bound, bound)
    bias = initializers.RandomUniform(-bound, bound)
    head = layers.Dense(
        classes, kernel_initializer=uniform, bias_initializer=bias, name="fc", dtype=dtype
    )
    return keras.Model(image, head(x), name=model)
