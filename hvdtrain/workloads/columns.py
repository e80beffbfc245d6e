"""Former name of ``hvdtrain.tasks.columns``, until version 0.2."""

import sys
import warnings

from hvdtrain.tasks import columns

warnings.warn(
    "hvdtrain.workloads.columns is deprecated: import hvdtrain.tasks.columns",
    DeprecationWarning,
    stacklevel=2,
)
sys.modules[__name__] = columns
