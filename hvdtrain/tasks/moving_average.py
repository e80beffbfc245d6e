"""An exponential moving average of the weights, for PyTorch: ``--ema``.

Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992), with a decay
as in "Rethinking the Inception Architecture" (Szegedy et al., 2016). It is part of the optimizer's
state, so it is saved, resumed and sharded as that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hvdtrain.tasks.optimizers_pytorch import local, locals_of

KEY = "ema"  # in the state of a parameter


class MovingAverage:
    """The moving average of the parameters of an optimizer, from its first update on.

    After each update the average is multiplied by ``decay``, and the weights times 1 - ``decay``
    are added; the first update begins it with the weights. Create it before a strategy distributes
    the optimizer: a strategy that hides the gradients of other ranks' parameters shares the average
    as well.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        self.optimizer, self.decay = optimizer, decay
        optimizer.register_step_post_hook(self._update)

    @torch.no_grad()
    def _update(self, optimizer: Any, *_: Any) -> None:
        state = optimizer.state
        updated = [p for p in self._parameters() if p.grad is not None]
        averaged = [p for p in updated if KEY in state[p]]
        skipped = getattr(optimizer, "found_inf", None)  # of a fused optimizer: no update was made
        weight = 1 - self.decay if skipped is None else (1 - self.decay) * (1 - skipped)
        averages = locals_of(state[p][KEY] for p in averaged)
        for average, weights in zip(averages, locals_of(averaged), strict=True):
            average.lerp_(weights, weight)
        begun = [p for p in updated if KEY not in state[p]]
        if begun and not skipped:  # synchronizes with a GPU, but not later
            for parameter in begun:
                state[parameter][KEY] = parameter.detach().clone()

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [value for group in self.optimizer.param_groups for value in group["params"]]

    @contextmanager
    def in_use(self, send: Callable[[], None]) -> Iterator[None]:
        """Replace the weights by their average within the block; all ranks must call it together.

        ``send`` sends the weights that this rank owns to the ranks that have copies of them. After
        an error it is not called: the other ranks may still be computing.
        """
        state = self.optimizer.state
        averaged = [p for p in self._parameters() if KEY in state.get(p, {})]
        weights = [local(parameter).detach().clone() for parameter in averaged]
        self._set(averaged, [local(state[parameter][KEY]) for parameter in averaged])
        send()
        try:
            yield
        except BaseException:
            self._set(averaged, weights)
            raise
        self._set(averaged, weights)
        send()

    @staticmethod
    @torch.no_grad()
    def _set(parameters: Any, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(parameters, values, strict=True):
            local(parameter).copy_(value)
