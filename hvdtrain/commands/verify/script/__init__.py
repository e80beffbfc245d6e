"""Watch a Horovod script that knows nothing of hvdtrain, and report the same eight rows.

``python -m`` this package runs the script on a rank with some of the frameworks' and Horovod's
functions wrapped: they do what they always do, and note what they were given. Nothing is changed
but that XLA stays off (Horovod's operations do not work in it) and that the script is ended after
some updates. ``judge`` makes rows of what all ranks noted; what nobody saw is ``not seen``.
"""
