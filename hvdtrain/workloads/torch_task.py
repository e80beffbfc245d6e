"""Former name of ``hvdtrain.tasks.training_step_pytorch``, until version 0.2."""

import sys
import warnings

from hvdtrain.tasks import training_step_pytorch as pytorch

warnings.warn(
    "hvdtrain.workloads.torch_task is deprecated: import hvdtrain.tasks.training_step_pytorch",
    DeprecationWarning,
    stacklevel=2,
)
sys.modules[__name__] = pytorch
