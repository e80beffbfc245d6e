"""Former name of ``hvdtrain.tasks.columns``."""

from hvdtrain.workloads import moved

moved(__name__, "hvdtrain.tasks.columns")
