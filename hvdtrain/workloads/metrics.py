"""Former name of ``hvdtrain.tasks.metrics``."""

from hvdtrain.workloads import moved

moved(__name__, "hvdtrain.tasks.metrics")
