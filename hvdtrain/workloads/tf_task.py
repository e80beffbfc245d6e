"""Former name of ``hvdtrain.tasks.tensorflow``."""

from hvdtrain.workloads import moved

moved(__name__, "hvdtrain.tasks.tensorflow")
