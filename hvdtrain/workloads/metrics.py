"""Former name of ``hvdtrain.tasks.metrics``, until version 0.2."""

import sys
import warnings

from hvdtrain.tasks import metrics

warnings.warn(
    "hvdtrain.workloads.metrics is deprecated: import hvdtrain.tasks.metrics",
    DeprecationWarning,
    stacklevel=2,
)
sys.modules[__name__] = metrics
