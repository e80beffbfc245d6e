"""``hvdtrain.mnist`` that ends where a step asks a tensor for a number.

On a GPU the host would wait there. The optimizer is a fused one and gradients that are not finite
are looked for later, both as on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hvdtrain import mnist
from hvdtrain.system.runtime.exit import run_and_exit
from hvdtrain.tasks.pytorch import TorchTask, make_optimizer
from hvdtrain.training.loop import Run

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")


class NothingIsAsked(TorchDispatchMode):
    """Raises where an operation gives the host a number, or a shape, that the device computes."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, unless it is one of those."""
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense" and args[0].dtype == torch.int32:
            name = ""  # DDP's map of the parameters that were used, which is in host memory
        assert not name.startswith(WAITS), f"a step asks for a number by {name}"
        return func(*args, **(kwargs or {}))


if __name__ == "__main__":
    start, step, begin = TorchTask.__init__, Run._update, Run.__init__

    def on_a_gpu(task: TorchTask, *arguments: Any, **named: Any) -> None:
        """Make the optimizer as it is made for a GPU."""
        start(task, *arguments, **named)
        task.optimizer = make_optimizer(task.model, task.options, fused=True)
        task.may_defer = True

    def seldom(run: Run, *arguments: Any) -> None:
        """Log no step."""
        begin(run, *arguments)
        run.log_every = 1000

    def watched(run: Run, *arguments: Any) -> None:
        """Make an update; the first one may look around."""
        if run.now.step == 0:
            return step(run, *arguments)
        with NothingIsAsked():
            return step(run, *arguments)

    TorchTask.__init__, Run.__init__, Run._update = on_a_gpu, seldom, watched
    run_and_exit(mnist.main)
