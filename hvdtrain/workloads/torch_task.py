"""Former name of ``hvdtrain.tasks.training_step_pytorch``."""

from hvdtrain.workloads import moved

moved(__name__, "hvdtrain.tasks.training_step_pytorch")
