"""Distributed training on HPC clusters: public names for user scripts.

Types are in ``__init__.pyi``. Each name is imported on first access, so that ``import hvdtrain``
needs no framework and does not initialize MPI.
"""

import importlib

__version__ = "0.2.0"

_MODULES = {
    "Adapter": "adapters.base",
    "CheckpointError": "errors",
    "CommOptions": "config.strategies",
    "HvdtrainError": "errors",
    "LearningRate": "steps.learning_rate",
    "Part": "steps.sharding",
    "Position": "steps.sharding",
    "Save": "adapters.save",
    "Shards": "steps.sharding",
    "TrainingError": "errors",
    "UsageError": "errors",
    "World": "steps.world",
    "adapter": "adapters.select",
}
__all__ = sorted(["__version__", *_MODULES])


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
