"""Small YAML files of settings: what stands in which line, and what is wrong in which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import UsageError
from hvdtrain.system.files import read_regular

if TYPE_CHECKING:
    import yaml

MOST_BYTES = 2**14  # of a file: far more than any, and read in an instant
MOST_VALUE = 3000  # characters of one setting
DEEPEST = 8  # collections within one another
LONGEST = 500  # characters of what is wrong


@dataclass(frozen=True)
class Setting:
    """One entry of the file."""

    name: str
    value: Any
    line: int


class _BrokenError(Exception):
    """What is wrong, and in which line."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(f"line {line}: {' '.join(what.split())[:LONGEST]}")


def read_settings(path: Path, example: str) -> list[Setting]:
    """Read a file of settings; none where it is empty.

    Whatever the file holds, this takes less than a second and little memory: so it takes no
    aliases, with which a few lines can stand for gigabytes.

    Args:
        path: of the file.
        example: a line that it may hold.

    Raises:
        UsageError: it cannot be read, is no mapping, or names something twice; with the line.
    """
    try:
        text = read_regular(path, MOST_BYTES).decode()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} cannot be read: it is no text in UTF-8") from error
    try:
        _check_size(text)
        return list(_settings(text, example))
    except _BrokenError as error:
        raise UsageError(f"{path} {error}") from error


def _check_size(text: str) -> None:
    import yaml  # seconds on a cold disk, which most commands can spare

    opened: list[Any] = []  # where the collections begin that are not at their end
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            line = event.start_mark.line + 1 if event.start_mark else 1
            if isinstance(event, yaml.CollectionStartEvent):
                opened.append(event.start_mark)
            elif isinstance(event, yaml.CollectionEndEvent):
                opened.pop()
            if len(opened) > DEEPEST:
                raise _BrokenError(line, "nested too deeply")
            if isinstance(event, yaml.AliasEvent):
                raise _BrokenError(line, f"*{event.anchor}: write out what it stands for")
            if isinstance(event, yaml.ScalarEvent) and len(event.value) > MOST_VALUE:
                raise _BrokenError(line, f"a value of {len(event.value):,} characters")
    except yaml.MarkedYAMLError as error:
        raise _explained(error, text, opened) from error
    except yaml.YAMLError as error:  # a character that no YAML may have
        raise _BrokenError(1, str(error)) from error


def _explained(error: yaml.MarkedYAMLError, text: str, opened: Sequence[Any] = ()) -> _BrokenError:
    problem, context = str(error.problem or "no YAML"), str(error.context)
    if context.startswith("while scanning a quoted") and error.context_mark:
        opened = (error.context_mark,)
    elif "<stream end>" in problem or context.startswith("while parsing a flow"):
        opened = [mark for mark in opened if text[mark.index : mark.index + 1] in ("[", "{")]
    else:
        opened = ()
    if opened:
        return _BrokenError(opened[-1].line + 1, f"{text[opened[-1].index]!r} is not closed")
    found = error.problem_mark or error.context_mark
    return _BrokenError(found.line + 1 if found else 1, problem)


def _settings(text: str, example: str) -> Iterator[Setting]:
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _explained(error, text) from error
    if root is None or root.tag == "tag:yaml.org,2002:null":
        return
    if not isinstance(root, yaml.MappingNode):
        raise _BrokenError(root.start_mark.line + 1, f"it must hold lines such as `{example}`")
    lines: dict[str, int] = {}
    for key, value in root.value:
        line = key.start_mark.line + 1
        try:
            name = str(loader.construct_object(key, deep=True))
            setting = Setting(name, loader.construct_object(value, deep=True), line)
        except Exception as error:  # a tag that does not fit its value raises any
            what = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
            raise _BrokenError(value.start_mark.line + 1, str(what)) from error
        same = name.replace("_", "-")
        if same in lines:
            message = f"{name}: line {lines[same]} has it already; leave one out"
            raise _BrokenError(line, message)
        lines[same] = line
        yield setting
