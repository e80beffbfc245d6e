"""The optimizers of a task in PyTorch: PyTorch's own, and LARS and LAMB for large batches.

With LARS and LAMB the step of each weight is proportional to its norm, so that one learning rate
fits all layers. Biases and the parameters of normalization layers (one dimension or none) are
neither decayed nor scaled. Of a weight of which this rank holds only a part, e.g. with ``--strategy
fsdp``, the norm is that of the whole.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from typing_extensions import override

from hvdtrain.config.options import Options

Tensors = list[torch.Tensor]
Group = dict[str, Any]  # options of the optimizer, and ``scaled``
AVERAGE = "ema"  # in the state of a parameter


def make_optimizer(
    model: torch.nn.Module, options: Options, *, fused: bool = False
) -> torch.optim.Optimizer:
    """Return the optimizer that ``options`` name; its learning rate is set before each step."""
    decay, momentum = options.weight_decay or 0.0, options.momentum
    parameters = [p for p in model.parameters() if p.requires_grad]
    if options.optimizer == "lars":
        return Lars(parameters, momentum=momentum, weight_decay=decay)
    if options.optimizer == "lamb":
        return Lamb(parameters, weight_decay=decay)
    groups: Any = parameters
    if options.no_decay_on_norm:
        weights = [p for p in parameters if p.ndim > 1]
        others = [p for p in parameters if p.ndim < 2]
        groups = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
    common: Any = {"lr": 1.0, "weight_decay": decay, "fused": fused}
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=momentum, nesterov=options.nesterov, **common)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[options.optimizer]
    return kind(groups, **common)


def keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Keep an exponential moving average of the weights, from the first update on: ``--ema``.

    After each update it is multiplied by ``decay``, and the weights times 1 - ``decay`` are added;
    the first update begins it with the weights. Polyak and Juditsky, "Acceleration of Stochastic
    Approximation by Averaging" (1992), with a decay as in "Rethinking the Inception Architecture"
    (Szegedy et al., 2016).

    It is part of the optimizer's state, so it is saved, resumed and sharded as that is. Call this
    before a strategy distributes the optimizer: a strategy that hides the gradients of other ranks'
    parameters shares the average as well.
    """

    @torch.no_grad()
    def update(optimizer: Any, *_: Any) -> None:
        state = optimizer.state
        updated = [p for p in _parameters(optimizer) if p.grad is not None]
        averaged = [p for p in updated if AVERAGE in state[p]]
        skipped = getattr(optimizer, "found_inf", None)  # of a fused optimizer: no update was made
        weight = 1 - decay if skipped is None else (1 - decay) * (1 - skipped)
        averages = locals_of(state[p][AVERAGE] for p in averaged)
        for average, weights in zip(averages, locals_of(averaged), strict=True):
            average.lerp_(weights, weight)
        begun = [p for p in updated if AVERAGE not in state[p]]
        if begun and not skipped:  # synchronizes with a GPU, but not later
            for parameter in begun:
                state[parameter][AVERAGE] = parameter.detach().clone()

    optimizer.register_step_post_hook(update)


def averages_of(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return this rank's part of each weight that has a moving average, and of the average."""
    averages = [(p, optimizer.state.get(p, {}).get(AVERAGE)) for p in _parameters(optimizer)]
    return [(local(p.detach()), local(value)) for p, value in averages if value is not None]


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Layerwise(torch.optim.Optimizer):
    """An optimizer that scales the update of each weight by a trust ratio.

    Attributes:
        sum_shards: function that sums a tensor over the ranks that hold parts of the parameters.
    """

    sum_shards: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda values: values)

    @torch.no_grad()
    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make an update with the gradients; all ranks must call it if the parameters are sharded.

        Parameters without a gradient are not updated.
        """
        if closure is not None:
            raise ValueError("a closure is not supported: call backward() before step()")
        for group in self.param_groups:
            parameters = [value for value in group["params"] if value.grad is not None]
            for scaled in (True, False):
                chosen = [value for value in parameters if (value.ndim > 1) == scaled]
                if chosen:
                    self._update(chosen, {**group, "scaled": scaled})

    @abstractmethod
    def _update(self, parameters: Sequence[torch.nn.Parameter], group: Group) -> None:
        """Update ``parameters``, which are all scaled and decayed, or none (``scaled``)."""

    def _buffers(self, parameters: Iterable[torch.nn.Parameter], name: str) -> Tensors:
        """Return this rank's part of a tensor of the state for each parameter, zero at first."""
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter)
        return [local(self.state[parameter][name]) for parameter in parameters]

    def _norms(
        self, parameters: Sequence[torch.nn.Parameter], *lists: Tensors
    ) -> list[torch.Tensor]:
        """Return the L2 norms of the whole tensors of each list, as a vector per list.

        Each list has this rank's part of a tensor for each of the ``parameters``.
        """
        norms = torch.stack([norm for tensors in lists for norm in torch._foreach_norm(tensors)])
        if any(hasattr(parameter, "to_local") for parameter in parameters):
            norms = self.sum_shards(norms.square()).sqrt()
        return list(norms.split([len(tensors) for tensors in lists]))


class Lars(Layerwise):
    r"""LARS: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (2017).

    For the weights w of a layer with gradient g, learning rate r, momentum m, weight decay b and
    trust coefficient t:

        l = t |w| / (|g| + b |w|)          (1 if |w| or |g| is 0, or w is not scaled)
        v = m v + r l (g + b w)
        w = w - v

    Args:
        parameters: parameters to update.
        lr: learning rate r.
        momentum: m.
        weight_decay: b; 0 for parameters that are not scaled.
        trust: trust coefficient t, 0.001 in the paper.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(parameters, defaults)

    @override
    def _update(self, parameters: Sequence[torch.nn.Parameter], group: Group) -> None:
        weights, gradients = locals_of(parameters), locals_of(value.grad for value in parameters)
        velocities = self._buffers(parameters, "momentum_buffer")
        rate, decay = group["lr"], group["weight_decay"]
        if group["scaled"]:
            weight_norms, gradient_norms = self._norms(parameters, weights, gradients)
            ratio = group["trust"] * weight_norms / (gradient_norms + decay * weight_norms)
            updates = torch._foreach_add(gradients, weights, alpha=decay)
            torch._foreach_mul_(updates, rates(rate, ratio, weight_norms, gradient_norms))
        else:
            updates = torch._foreach_mul(gradients, rate)
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, updates)
        torch._foreach_sub_(weights, velocities)


class Lamb(Layerwise):
    r"""LAMB: You et al., "Large Batch Optimization for Deep Learning" (2020), algorithm 2.

    For the weights w of a layer with gradient g in update number n, learning rate r and weight
    decay b, with the moments of Adam:

        m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2
        u = (m / (1 - b1^n)) / (sqrt(v / (1 - b2^n)) + eps) + b w
        w = w - r |w| / |u| u              (the ratio is 1 if |w| or |u| is 0, or w is not scaled)

    Args:
        parameters: parameters to update.
        lr: learning rate r.
        betas: b1 and b2.
        eps: added to the root, 1e-6 in the paper.
        weight_decay: b; 0 for parameters that are not scaled.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, defaults)

    @override
    def _update(self, parameters: Sequence[torch.nn.Parameter], group: Group) -> None:
        weights, gradients = locals_of(parameters), locals_of(value.grad for value in parameters)
        means = self._buffers(parameters, "exp_avg")
        squares = self._buffers(parameters, "exp_avg_sq")
        first, second = group["betas"]
        numbers = self._counts(parameters)
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        roots = torch._foreach_div(squares, [1 - second**number for number in numbers])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        updates = list(torch._foreach_div(means, [1 - first**number for number in numbers]))
        torch._foreach_div_(updates, roots)
        if group["scaled"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
            weight_norms, update_norms = self._norms(parameters, weights, updates)
            ratio = weight_norms / update_norms
            torch._foreach_mul_(updates, rates(group["lr"], ratio, weight_norms, update_norms))
        else:
            torch._foreach_mul_(updates, group["lr"])
        torch._foreach_sub_(weights, updates)

    def _counts(self, parameters: Iterable[torch.nn.Parameter]) -> list[int]:
        """Return the number of updates of each parameter, with this one."""
        numbers = []
        for parameter in parameters:
            state = self.state[parameter]
            state["step"] = state.get("step", torch.zeros(())) + 1
            numbers.append(int(state["step"]))
        return numbers


def rates(
    rate: float, ratio: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> list[torch.Tensor]:
    """Return the ``rate`` of each tensor: times its ``ratio``, unless one of its norms is 0."""
    ratio = torch.where((first > 0) & (second > 0), ratio, torch.ones_like(ratio))
    return list((rate * ratio).unbind())


def locals_of(tensors: Iterable[Any]) -> Tensors:
    """Return the parts of ``tensors`` on this rank."""
    return [local(tensor) for tensor in tensors]


def local(tensor: Any) -> torch.Tensor:
    """Return the part of a tensor on this rank; of a ``DTensor`` it may be empty."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
