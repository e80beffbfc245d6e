"""What a trainer asks of a task: one update and one evaluation, in one process.

The whole update is here: loss, label smoothing, mixtures of samples (mixup), precision,
accumulation, gradient clipping, optimizer, where the learning rate is set, and averaged weights
(EMA). ``training`` decides when it is made, ``adapters`` sum its gradients over the ranks.
"""
