"""Step 5 for TensorFlow: an optimizer that sums the gradients of all ranks before it updates.

The optimizer's class is replaced by a subclass with the same name and module, created at run time:
it keeps its type, state and methods, and a saved model is loaded with the original class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
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
    base = type(optimizer)

    class Distributed(base):  # type: ignore[misc,valid-type]
        _hvdtrain = (reduction, base)

        def scale_loss(self, loss: Any) -> Any:
            return reduction.scale_loss(super().scale_loss(loss))

        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            if trainable_variables is None:
                trainable_variables = self._trainable_variables
            variables = list(trainable_variables)
            super().apply(reduction.sum(list(grads), variables), variables)

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Distributed, name, getattr(base, name))
    optimizer.__class__ = Distributed


def reduction_of(optimizer: Any) -> GradientReduction | None:
    """Return the reduction of a distributed optimizer; None for an original one."""
    attributes: tuple[GradientReduction, type] | None = getattr(type(optimizer), "_hvdtrain", None)
    return attributes[0] if attributes else None


def undistribute(optimizer: Any) -> None:
    """Restore the original class of a distributed optimizer."""
    optimizer.__class__ = type(optimizer)._hvdtrain[1]
