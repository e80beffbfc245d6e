"""Run on every rank by test_keras.py: one ``model.fit`` with Horovod's own wrapper for Keras."""

from __future__ import annotations

import sys
from pathlib import Path

import horovod.tensorflow.keras as hvd
import keras
import numpy as np

hvd.init()
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
model.fit(np.ones((4, 1)), np.full((4, 1), float(hvd.rank())), batch_size=2, verbose=0)
(weight,) = model.get_weights()
Path(sys.argv[1], f"{hvd.rank()}-of-{hvd.size()}").write_text(str(weight[0, 0]))
