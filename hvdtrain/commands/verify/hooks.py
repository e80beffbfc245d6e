"""Hook into a program that knows nothing of it: its calls, its imports, the files it writes."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from typing_extensions import override

Seen = Callable[[tuple[Any, ...], dict[str, Any], Any], object]
"""(arguments, keyword arguments, result): what to note of a call that has returned."""


def after(owner: Any, name: str, seen: Seen) -> None:
    """Let ``seen`` look at each call of ``owner.name`` that returns; nothing where it has none."""

    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        quietly(seen, args, kwargs, result)
        return result

    replace(owner, name, call)


def replace(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Let ``replacement(original, ...)`` stand for ``owner.name``; nothing where it has none."""
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, wrapped)


def quietly(look: Callable[..., Any], *args: Any) -> Any:
    """Return what ``look`` does; None where it fails: whoever only looks must not stop a script."""
    try:
        return look(*args)
    except Exception as error:
        what = getattr(look, "__qualname__", look)
        sys.stderr.write(f"hvdtrain verify: {what} overlooked something: {error!r}\n")
        return None


class Depth:
    """How many calls of a kind are open; to tell the outermost from those inside it."""

    def __init__(self) -> None:
        self.value = 0

    def __enter__(self) -> int:
        self.value += 1
        return self.value

    def __exit__(self, *_: object) -> None:
        self.value -= 1


Action = Callable[[Any], None]


class AfterImport(MetaPathFinder):
    """A finder that finds nothing itself: it only adds an action to what the others find.

    Args:
        actions: what to do with a module, by its full name; done once, when the module is whole.
    """

    def __init__(self, actions: Mapping[str, Action]) -> None:
        self.actions = dict(actions)

    def install(self) -> None:
        """Act from now on, and at once on modules that are imported already."""
        for name in [name for name in self.actions if name in sys.modules]:
            self.actions.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    @override
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
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


WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_listeners: list[Callable[[str], None]] = []
_installed = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not _listeners:
        return
    path, _, flags = arguments
    nameless = flags & os.O_TMPFILE == os.O_TMPFILE
    if isinstance(path, str | bytes | os.PathLike) and flags & WRITES and not nameless:
        name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 (Path would touch the disk)
        for listener in _listeners:
            listener(name)


def on_write(listener: Callable[[str], None]) -> None:
    """Give ``listener`` each path that Python code opens to write from now on.

    Files that a C++ library opens by itself are not seen.
    """
    global _installed
    if not _installed:
        sys.addaudithook(_audit)  # it cannot be taken away again
        _installed = True
    _listeners.append(listener)


@contextmanager
def watch_writes() -> Iterator[list[str]]:
    """Collect the paths that this process opens to write within the block."""
    paths: list[str] = []
    on_write(paths.append)
    try:
        yield paths
    finally:
        _listeners.remove(paths.append)
