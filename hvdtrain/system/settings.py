"""Small YAML files of settings, read with line numbers for error messages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.system.files import read_regular

MAX_BYTES = 2**14  # of a file: far more than needed, and read in less than a second
DEEPEST = 8  # nested collections; more, and aliases, can take gigabytes or many seconds
PLAIN = {
    "": None,
    "~": None,
    "null": None,
    "true": True,
    "false": False,
}  # unquoted, in any case; others: text


@dataclass(frozen=True)
class Setting:
    """An entry of the file: text, a boolean, None, or lists and mappings of these."""

    name: str
    value: Any
    line: int


def read_settings(path: Path, example: str) -> list[Setting]:
    """Read a file of settings; ``example``: a line of one, for the messages.

    Raises:
        UsageError: the file cannot be read, is no mapping, or has a duplicate key; with the line.
    """
    import yaml  # takes seconds on a cold disk, and most commands do not need it

    try:
        text = read_regular(path, MAX_BYTES).decode()
        depth = 0
        for event in yaml.parse(text, yaml.BaseLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST or isinstance(event, yaml.AliasEvent):
                raise UsageError(f"{path}: aliases (*name) and deep nesting are not supported")
        root = yaml.compose(text, yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        begin, end = error.context_mark, error.problem_mark
        context = f" ({error.context} of line {begin.line + 1})" if begin else ""
        line = end.line + 1 if end else 1
        raise UsageError(f"{path} line {line}: {error.problem}{context}") from error
    except (OSError, ValueError, OverflowError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UsageError(f"{path} cannot be read: {reason}") from error
    if root is None or _value(root) is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        line = root.start_mark.line + 1
        raise UsageError(f"{path} line {line}: expected lines such as `{example}`")
    settings: dict[str, Setting] = {}
    for key, value in root.value:
        setting = Setting(str(key.value), _value(value), key.start_mark.line + 1)
        first = settings.setdefault(setting.name.replace("_", "-"), setting)
        if first is not setting:
            message = f"{setting.name}: line {first.line} has the same key: omit one"
            raise UsageError(f"{path} line {setting.line}: {message}")
    return list(settings.values())


def _value(node: Any) -> Any:
    if node.id == "mapping":
        return {str(key.value): _value(value) for key, value in node.value}
    if node.id == "sequence":
        return [_value(entry) for entry in node.value]
    return node.value if node.style else PLAIN.get(node.value.lower(), node.value)
