"""The problems: data, network and loss, without ranks."""

import importlib
import sys
import warnings


def moved(name: str, new_name: str) -> None:
    """Make module ``name``, which was moved, stand for ``new_name``; call it while it is imported.

    The former names remain until version 0.2.
    """
    # Attributed to the importer of the former name.
    warnings.warn(f"{name} is deprecated: import {new_name}", DeprecationWarning, stacklevel=3)
    sys.modules[name] = importlib.import_module(new_name)
