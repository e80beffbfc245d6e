"""Options as fields of a frozen dataclass, for the trainers and the verbs alike.

::

    @dataclass(frozen=True)
    class Options:
        ranks: tuple[int, ...] = option((1, 2), "numbers of ranks", positives, group="runs")

    add_options(parser, Options)
    options = from_namespace(Options, parser.parse_args())
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.config.values import counts, local_folder, numbers, span

T = TypeVar("T")
LISTS = (counts, numbers)  # kinds of options that accept several words
METAVARS: Mapping[Any, str] = {
    Path: "PATH",
    local_folder: "PATH",
    str: "NAME",
    counts: "N,N",
    numbers: "N,N",
    span: "A:B",
}


def option(
    default: Any,
    text: str,
    kind: Callable[[Any], Any] = str,
    choices: Sequence[str] = (),
    *,
    group: str = "",
    metavar: str = "",
    repeated: bool = False,
    either: str = "",
) -> Any:
    """Return a field that is an option.

    Args:
        default: its value if the option is not given.
        text: its help text.
        kind: the function that reads its value (``config/values.py``); ``bool``: a switch.
        choices: the valid names.
        group: title of its group in the help; empty: that of the field before it.
        metavar: its value in the help; empty: by ``kind``.
        repeated: whether it may be given several times, each value one item of a tuple.
        either: a name that it shares with the options of which at most one may be given.
    """
    metadata = {
        "help": text,
        "kind": kind,
        "choices": tuple(choices),
        "group": group,
        "metavar": metavar,
        "repeated": repeated,
        "either": either,
    }
    return dataclasses.field(default=default, metadata=metadata)


def declared(kind: type[Any]) -> list[dataclasses.Field[Any]]:
    """Return the fields of ``kind`` that are options."""
    return [field for field in dataclasses.fields(kind) if "help" in field.metadata]


def add_options(
    parser: argparse.ArgumentParser,
    kind: type[Any],
    titles: Sequence[str] = (),
    *,
    defaults: bool = False,
) -> None:
    """Declare an option per field of ``kind``, a trailing underscore of its name aside.

    Args:
        parser: where they are declared.
        kind: the dataclass.
        titles: groups that come first in the help, in this order; others follow by field.
        defaults: whether options that are not given have their default, and not None.
    """
    groups: dict[str, Any] = {title: parser.add_argument_group(title) for title in titles}
    exclusive: dict[str, Any] = {}
    title = ""
    for field in declared(kind):
        title = field.metadata["group"] or title
        if title not in groups:
            groups[title] = parser.add_argument_group(title or None)
        target = groups[title]
        if either := field.metadata["either"]:
            if either not in exclusive:
                exclusive[either] = target.add_mutually_exclusive_group()
            target = exclusive[either]
        default = field.default if defaults and field.default != () else None
        if defaults and field.metadata["repeated"]:
            default = []
        name = "--" + field.name.rstrip("_").replace("_", "-")
        target.add_argument(name, dest=field.name, default=default, **_settings(field))


def _settings(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for a field."""
    text, kind, choices = (field.metadata[name] for name in ("help", "kind", "choices"))
    if kind is bool:
        return {"action": "store_true", "help": text}
    if field.default not in (None, "", ()) and "(default" not in text:
        text += f" (default: {field.default})"
    settings: dict[str, Any] = {"type": kind, "help": text}
    settings["metavar"] = field.metadata["metavar"] or "|".join(choices) or METAVARS.get(kind, "N")
    if choices:
        settings["choices"] = [kind(choice) for choice in choices]
    elif kind in LISTS:
        settings["nargs"] = "+"
    if field.metadata["repeated"]:
        settings["action"] = "append"
    return settings


def from_namespace(kind: type[T], parsed: argparse.Namespace) -> T:
    """Return a ``kind`` of the parsed options; absent ones have their default."""
    values = {field.name: getattr(parsed, field.name) for field in declared(kind)}
    return kind(**{name: value for name, value in values.items() if value is not None})
