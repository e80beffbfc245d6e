"""A user's script with model.fit and Horovod's optimizer for Keras, which reduces nothing."""

from __future__ import annotations

import horovod.tensorflow.keras as hvd
import keras
import numpy as np

hvd.init()
keras.utils.set_random_seed(hvd.rank())
draw = np.random.default_rng(hvd.rank())
x, y = draw.standard_normal((160, 10)).astype("float32"), draw.integers(0, 3, 160)
model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(3)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size()))
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(x, y, batch_size=16, epochs=1, verbose=0)
