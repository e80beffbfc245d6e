"""The eight steps for TensorFlow, with Keras 3 models and optimizers.

For a loop of your own call the eight methods in order, as with PyTorch. ``initialize`` has to come
before TensorFlow computes anything: threads and GPUs cannot be changed once its runtime has begun.

For ``model.fit`` give ``compile`` the optimizer that ``distribute_optimizer`` returned: it sums the
gradients of all ranks inside its ``apply``, so ``fit`` trains on the global batch (Horovod's own
wrapper does not average with Keras 3). ``fit`` reads ahead and does not tell which part is in hand,
so every rank counts the same then: give each rank batches of equal size. On a GPU pass
``jit_compile=False``: XLA knows nothing of Horovod.
"""

from __future__ import annotations

from hvdtrain.adapters.tensorflow.quiet import import_quietly

import_quietly()
