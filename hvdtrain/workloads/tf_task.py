"""Former name of ``hvdtrain.tasks.training_step_tensorflow``, until version 0.2."""

import sys
import warnings

from hvdtrain.tasks import training_step_tensorflow as tensorflow

warnings.warn(
    "hvdtrain.workloads.tf_task is deprecated: import hvdtrain.tasks.training_step_tensorflow",
    DeprecationWarning,
    stacklevel=2,
)
sys.modules[__name__] = tensorflow
