"""Doing something to a module right after it was imported, whoever imports it and when."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[Any], None]


class AfterImport(MetaPathFinder):
    """A finder that finds nothing itself: it only adds an action to what the others find.

    Args:
        actions: what to do with a module, by its full name; done once, when the module is whole.
    """

    def __init__(self, actions: Mapping[str, Action]) -> None:
        self.actions = dict(actions)

    def install(self) -> None:
        """From now on act; modules that are imported already are acted on at once."""
        for name in [name for name in self.actions if name in sys.modules]:
            self.actions.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        """See ``MetaPathFinder``."""
        if fullname not in self.actions:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec: ModuleSpec | None = next((spec for spec in found if spec), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if action := self.actions.pop(fullname, None):  # a spec may be asked for in vain
                action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
