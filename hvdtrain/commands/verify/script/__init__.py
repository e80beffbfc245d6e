"""Watch an unmodified script of Horovod or torch.distributed, and report the same eight rows.

``python -m`` this package runs the script on a rank with some functions of Horovod and the
frameworks wrapped to record their arguments and results. Nothing else is changed, except that XLA
is disabled (it does not support Horovod's operations) and that the script is ended after some
updates. ``judge`` turns the records of all ranks into rows; a step without record is ``not seen``.
"""
