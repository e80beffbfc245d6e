"""torchvision, with its extension or, where that cannot load, without it."""

from __future__ import annotations

import importlib
from types import ModuleType

import hvdtrain.workloads.torchvision_mend  # noqa: F401
from hvdtrain.errors import UsageError


def torchvision() -> ModuleType:
    """Import torchvision.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        raise UsageError("torchvision is not installed; pip install 'hvdtrain[pytorch]'") from error
