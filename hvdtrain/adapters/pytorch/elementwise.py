"""Which optimizers are exact with a strategy by which a rank updates only a part of the model."""

from __future__ import annotations

import inspect
from typing import Any

from hvdtrain.errors import UsageError

# Of torch.optim. Their steps compute each element by itself,
ELEMENTWISE = frozenset(
    ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
)
# those of these, also by other authors, do not.
COUPLED = {
    "Adafactor": "scales by norms of whole parameters",
    "LBFGS": "computes one step of all parameters together",
    "Muon": "orthogonalizes whole matrices",
    "Rprop": "indexes by masks, which PyTorch supports only for whole tensors",
}
ROWS, PARAMETERS = "rows of each parameter", "some of the parameters"  # that a rank updates


def check(optimizer: Any, strategy: str, part: str) -> str:
    """Raise ``UsageError`` if the updates would be wrong; return a warning if they may be.

    Optimizers with the attribute ``sum_shards`` sum norms over the ranks.
    """
    refused = COUPLED.keys() if part == ROWS else {"LBFGS"}
    known = ELEMENTWISE | COUPLED.keys() - refused
    prefix = f"--strategy {strategy}: a rank updates only {part}"
    for name in (kind.__name__ for kind in type(optimizer).__mro__):
        if name in refused:
            others = "" if name == "LBFGS" else "zero, "
            raise UsageError(
                f"{prefix}, but {name} {COUPLED[name]}: use --strategy {others}ddp, horovod or mpi"
            )
    step = inspect.unwrap(type(optimizer).step)  # a subclass may have replaced it
    by_torch = step.__module__.startswith("torch.optim.")
    if hasattr(optimizer, "sum_shards") or (by_torch and step.__qualname__.split(".")[0] in known):
        return ""
    return (
        f"{prefix}. This is exact if {type(optimizer).__name__} computes each "
        f"{'element' if part == ROWS else 'parameter'} by itself; otherwise use --strategy ddp, "
        "horovod or mpi"
    )
