"""The eight steps for TensorFlow, with Keras 3 models and optimizers.

For a loop of your own call the eight methods in order, as with PyTorch. ``initialize`` has to come
before TensorFlow computes anything: threads and GPUs cannot be changed once its runtime has begun.

For ``model.fit`` there is ``hvdtrain.keras``. With ``distribute_optimizer`` alone ``fit`` trains on
the global batch, too, but reads ahead and does not tell which part is in hand, so every rank counts
the same: give each rank batches of equal size, and on a GPU pass ``jit_compile=False``, since XLA
knows nothing of Horovod.

Importing this package imports TensorFlow without its banners (processor features, oneDNN, CUDA that
is not here), for which nobody asked: most obey ``TF_CPP_MIN_LOG_LEVEL``; those that its libraries
write while they are loaded obey nothing, so they are caught on their way out.
"""

from __future__ import annotations

import importlib
import os
import re
import sys

from hvdtrain.system.output import stderr

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# Such as "I0000 00:00:1763706155.358886 10749 port.cc:153] oneDNN", or "2025-11-21 06:22:51.1: I".
BANNER = re.compile(
    rb"WARNING: All log messages before absl|[IWE]\d{4} \d\d:\d\d|[-\d]+ [:.\d]+: [IWE] "
)


def import_quietly() -> None:
    """Import TensorFlow and Keras without their banners, unless the user has set their level."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    if LEVEL in os.environ or "tensorflow" in sys.modules:
        return
    os.environ[LEVEL] = "3"  # what its C++ calls an error, Python raises as one
    with stderr.without(BANNER.match):
        importlib.import_module("keras")  # and TensorFlow, its backend


import_quietly()
