"""Former name of ``hvdtrain.tasks.pytorch``."""

from hvdtrain.workloads import moved

moved(__name__, "hvdtrain.tasks.pytorch")
