"""The eight steps for TensorFlow, with Keras 3 models and optimizers.

In a custom training loop call the eight methods in order, as with PyTorch. Call ``initialize``
before TensorFlow computes anything: threads and GPUs cannot be changed once its runtime has begun.
A gradient of None counts as zeros, since other ranks may have one: so exclude a variable that the
loss does not use from a ``weight_decay``.

Call ``weight_loss`` once before each ``apply``, in the ``tf.function`` of the step or outside of
it, with a tensor if the count depends on the batch. No function with ``apply`` may have been called
before its first call. With ``gradient_accumulation_steps`` weigh all passes or none.

For ``model.fit`` use ``hvdtrain.keras``. With ``distribute_optimizer`` alone ``fit`` trains on the
global batch, too, but reads ahead and does not report the current part, so all ranks have the same
weight: use batches of equal size on all ranks, and on a GPU pass ``jit_compile=False``, since XLA
does not support Horovod.

Importing this package imports TensorFlow without its banners (processor features, oneDNN, missing
CUDA): most obey ``TF_CPP_MIN_LOG_LEVEL``; those that its libraries write while they are loaded do
not, and are filtered from the standard error.
"""

from __future__ import annotations

import importlib
import os
import re
import sys

from hvdtrain.system.output import stderr

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# E.g. "I0000 00:00:1763706155.358886 10749 port.cc:153] oneDNN", or "2025-11-21 06:22:51.1: I".
BANNER = re.compile(
    rb"WARNING: All log messages before absl|[IWE]\d{4} \d\d:\d\d|[-\d]+ [:.\d]+: [IWE] "
)


def import_quietly() -> None:
    """Import TensorFlow and Keras without their banners, unless the user has set their level."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    if LEVEL in os.environ or "tensorflow" in sys.modules:
        return
    os.environ[LEVEL] = "3"  # errors of its C++ code are raised in Python, too
    with stderr.without(BANNER.match):
        importlib.import_module("keras")  # and TensorFlow, its backend


import_quietly()
