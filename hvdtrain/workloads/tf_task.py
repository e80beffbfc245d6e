"""Former name of ``hvdtrain.tasks.tensorflow``, until version 0.2."""

import sys
import warnings

from hvdtrain.tasks import tensorflow

warnings.warn(
    "hvdtrain.workloads.tf_task is deprecated: import hvdtrain.tasks.tensorflow",
    DeprecationWarning,
    stacklevel=2,
)
sys.modules[__name__] = tensorflow
