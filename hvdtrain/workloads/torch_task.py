"""Former name of ``hvdtrain.tasks.pytorch``, until version 0.2."""

import sys
import warnings

from hvdtrain.tasks import pytorch

warnings.warn(
    "hvdtrain.workloads.torch_task is deprecated: import hvdtrain.tasks.pytorch",
    DeprecationWarning,
    stacklevel=2,
)
sys.modules[__name__] = pytorch
