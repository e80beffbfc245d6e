"""Step 5 for TensorFlow: an optimizer that sums the gradients of all ranks before it updates.

Two methods of the object are replaced, not its class: so it is saved as the original one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import MethodType
from typing import Any


class GradientReduction(ABC):
    """Reduction of the gradients of one optimizer, inside a traced function or outside."""

    @abstractmethod
    def sum(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients to apply, one per variable; those passed may be None."""

    def scale_loss(self, loss: Any) -> Any:
        """Return ``loss`` scaled for the gradients; called by ``optimizer.scale_loss``."""
        return loss


def distribute(optimizer: Any, reduction: GradientReduction) -> None:
    """Make ``optimizer`` apply the gradients that ``reduction`` returns, from now on."""
    optimizer._hvdtrain = reduction
    for method in _METHODS:
        setattr(optimizer, method.__name__, MethodType(method, optimizer))


def reduction_of(optimizer: Any) -> GradientReduction | None:
    """Return the reduction of a distributed optimizer; None for an original one."""
    return getattr(optimizer, "_hvdtrain", None)


def undistribute(optimizer: Any) -> None:
    """Restore the original methods of a distributed optimizer."""
    del optimizer._hvdtrain
    for method in _METHODS:
        delattr(optimizer, method.__name__)


def scale_loss(self: Any, loss: Any) -> Any:
    """Return the loss scaled by the optimizer, then by its reduction."""
    return self._hvdtrain.scale_loss(type(self).scale_loss(self, loss))


def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
    """Apply the gradients that the reduction returns."""
    if trainable_variables is None:
        trainable_variables = self._trainable_variables
    variables = list(trainable_variables)
    type(self).apply(self, self._hvdtrain.sum(list(grads), variables), variables)


_METHODS = (scale_loss, apply)  # of a distributed optimizer
