"""Step 5 for TensorFlow: an optimizer that sums the gradients of all ranks before it updates.

The optimizer gets a subclass of its own class, made at run time, with the same name and module: so
it keeps its type, state and methods, and a saved model is read back with the plain class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class Reduction(ABC):
    """How the gradients of one optimizer are brought together, inside a trace or outside."""

    @abstractmethod
    def sum(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return what the optimizer is to apply, one for each variable.

        Args:
            gradients: one per variable, or None.
            variables: the variables, in an order that is the same on all ranks.
        """

    def scale_loss(self, loss: Any) -> Any:
        """Return ``loss`` for the gradients; a loop that calls ``optimizer.scale_loss`` uses it."""
        return loss


def distribute(optimizer: Any, reduction: Reduction) -> None:
    """Make ``optimizer`` apply what ``reduction`` returns, from now on."""
    own = type(optimizer)

    class Distributed(own):  # type: ignore[misc,valid-type]
        _hvdtrain = (reduction, own)

        def scale_loss(self, loss: Any) -> Any:
            return reduction.scale_loss(super().scale_loss(loss))

        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            if trainable_variables is None:
                trainable_variables = self._trainable_variables
            variables = list(trainable_variables)
            super().apply(reduction.sum(list(grads), variables), variables)

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Distributed, name, getattr(own, name))
    optimizer.__class__ = Distributed


def reduction_of(optimizer: Any) -> Reduction | None:
    """Return what ``distribute`` was given for this optimizer; None for a plain one."""
    found: tuple[Reduction, type] | None = getattr(type(optimizer), "_hvdtrain", None)
    return found[0] if found else None


def undistribute(optimizer: Any) -> None:
    """Give a distributed optimizer its own class back."""
    optimizer.__class__ = type(optimizer)._hvdtrain[1]
