"""Wrapping functions so that what they are given and return can be noted."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

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
    """What ``look`` returns; None where it fails: whoever only looks must not stop a script."""
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
