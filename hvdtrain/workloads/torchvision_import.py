"""torchvision beside a torch that it was not built for.

torchvision's wheel is linked for CUDA. Beside a CPU build of torch its extension cannot load, and
then its import fails, since a module registers shapes for operators that nobody has defined.
Defining their signatures first is enough for models, datasets and transforms; the image decoders
and the box operators of the extension stay away, and nothing here needs them.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

from hvdtrain.errors import UsageError

SIGNATURES = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library: Any = None  # keeps the definitions alive


def torchvision() -> ModuleType:
    """Import torchvision, with its extension or without it.

    Raises:
        UsageError: it is not installed.
    """
    global _library
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        raise UsageError("torchvision is not installed; pip install 'hvdtrain[pytorch]'") from error
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    _library = torch.library.Library("torchvision", "DEF")
    for signature in SIGNATURES:
        _library.define(signature)
    return importlib.import_module("torchvision")
