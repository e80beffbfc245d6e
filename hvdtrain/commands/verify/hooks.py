"""Observe an unmodified program: its calls, its imports, and the files that it writes."""

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


def after(owner: Any, name: str, listener: Callable[..., object]) -> None:
    """Call ``listener`` with result and arguments of each call of ``owner.name``, if it exists."""

    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        listener(result, *args, **kwargs)
        return result

    replace(owner, name, call)


def replace(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``replacement(original, ...)``; do nothing if there is none.

    The program gets the result or error of the original, even if the replacement fails.
    """
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        ends: list[Any] = []

        @functools.wraps(original)
        def call(*passed: Any, **named: Any) -> Any:
            ends.append(None)
            ends[-1] = (original(*passed, **named),)
            return ends[-1][0]

        try:
            return replacement(call, *args, **kwargs)
        except Exception as error:
            if None in ends:  # raised by the original
                raise
            _report(replacement, error)
        return ends[-1][0] if ends else original(*args, **kwargs)

    setattr(owner, name, wrapped)


def best_effort(listener: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return the result of ``listener``, or None if it fails: it must never stop the script."""
    try:
        return listener(*args, **kwargs)
    except Exception as error:
        _report(listener, error)
        return None


def _report(listener: Callable[..., Any], error: Exception) -> None:
    name = getattr(listener, "__qualname__", listener)
    sys.stderr.write(f"hvdtrain verify: internal probe {name} failed: {error!r}\n")


class Depth:
    """Number of open calls of a kind, to distinguish the outermost from nested ones."""

    def __init__(self) -> None:
        self.value = 0

    def __enter__(self) -> int:
        self.value += 1
        return self.value

    def __exit__(self, *_: object) -> None:
        self.value -= 1


Action = Callable[[Any], None]


class AfterImport(MetaPathFinder):
    """A finder that finds no module itself, but runs an action after another finder's import.

    Args:
        actions: by full name of a module; called with it once, when it is completely imported.
    """

    def __init__(self, actions: Mapping[str, Action]) -> None:
        self.actions = dict(actions)

    def install(self) -> None:
        """Run the actions from now on, and at once for modules that are already imported."""
        for name in [name for name in self.actions if name in sys.modules]:
            self.actions.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    @override
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if fullname not in self.actions:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec: ModuleSpec | None = next((spec for spec in specs if spec), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if action := self.actions.pop(fullname, None):  # find_spec does not mean import
                action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def on_write(listener: Callable[[str], None]) -> None:
    """Call ``listener`` with each path that Python code opens for writing, or renames a file to.

    Files that a C++ library opens itself are not seen.
    """

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename":  # of a file that is complete
            path, flags = arguments[1], os.O_WRONLY
        elif event == "open":
            path, _, flags = arguments
        else:
            return
        nameless = flags & os.O_TMPFILE == os.O_TMPFILE
        if isinstance(path, str | bytes | os.PathLike) and flags & WRITES and not nameless:
            listener(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100 (Path would touch the disk)

    sys.addaudithook(audit)  # it cannot be removed again


@contextmanager
def watch_writes() -> Iterator[list[str]]:
    """Collect the paths that this process opens for writing within the block."""
    paths: list[str] = []
    watching = True
    on_write(lambda path: paths.append(path) if watching else None)
    try:
        yield paths
    finally:
        watching = False
