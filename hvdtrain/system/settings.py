"""Small YAML files of settings, read with line numbers for error messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import UsageError
from hvdtrain.system.files import read_regular

if TYPE_CHECKING:
    import yaml

MOST_BYTES = 2**14  # of a file: far more than needed, and fast to read
MOST_VALUE = 3000  # characters of a value
DEEPEST = 8  # nested collections
LONGEST = 500  # characters of a message


@dataclass(frozen=True)
class Setting:
    """An entry of the file."""

    name: str
    value: Any
    line: int


class _BrokenError(Exception):
    """An error in a line of the file."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line}: {' '.join(problem.split())[:LONGEST]}")


def read_settings(path: Path, example: str) -> list[Setting]:
    """Read a file of settings.

    Any file is read in less than a second and with little memory; so aliases are refused, as a few
    lines of them can expand to gigabytes. ``example``: of a line, for the messages.

    Raises:
        UsageError: the file cannot be read, is no mapping, or has a duplicate key; with the line.
    """
    try:
        text = read_regular(path, MOST_BYTES).decode()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} cannot be read: not UTF-8 text") from error
    try:
        return list(_settings(text, example))
    except _BrokenError as error:
        raise UsageError(f"{path} {error}") from error


def _explained(error: yaml.MarkedYAMLError, text: str, opened: Sequence[Any]) -> _BrokenError:
    problem, context = str(error.problem or "no YAML"), str(error.context)
    if context.startswith("while scanning a quoted") and error.context_mark:
        opened = (error.context_mark,)
    elif "<stream end>" in problem or context.startswith("while parsing a flow"):
        opened = [mark for mark in opened if text[mark.index : mark.index + 1] in ("[", "{")]
    else:
        opened = ()
    if opened:
        return _BrokenError(opened[-1].line + 1, f"{text[opened[-1].index]!r} is not closed")
    mark = error.problem_mark or error.context_mark
    return _BrokenError(mark.line + 1 if mark else 1, problem)


def _settings(text: str, example: str) -> Iterator[Setting]:
    import yaml  # takes seconds on a cold disk, and most commands do not need it

    opened: list[Any] = []  # start marks of the open collections, and of a value in them

    class Loader(yaml.SafeLoader):
        def compose_node(self, *where: Any) -> Any:
            event = self.peek_event()
            line = event.start_mark.line + 1
            if isinstance(event, yaml.AliasEvent):
                problem = f"*{event.anchor}: aliases are not supported; write out the value"
                raise _BrokenError(line, problem)
            if isinstance(event, yaml.ScalarEvent) and len(event.value) > MOST_VALUE:
                raise _BrokenError(line, f"a value of {len(event.value):,} characters")
            opened.append(event.start_mark)
            if len(opened) > DEEPEST + 1:  # one for the value
                raise _BrokenError(line, "nested too deeply")
            node = super().compose_node(*where)
            opened.pop()
            return node

    try:
        loader = Loader(text)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _explained(error, text, opened) from error
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise _BrokenError(1, str(error)) from error
    except (ValueError, OverflowError) as error:  # a number of an escape or a version
        raise _BrokenError(loader.line + 1, str(error)) from error
    if root is None or root.tag == "tag:yaml.org,2002:null":
        return
    if not isinstance(root, yaml.MappingNode):
        raise _BrokenError(root.start_mark.line + 1, f"expected lines such as `{example}`")
    lines: dict[str, int] = {}
    for key, value in root.value:
        line = key.start_mark.line + 1
        try:
            name = str(loader.construct_object(key, deep=True))
            setting = Setting(name, loader.construct_object(value, deep=True), line)
        except Exception as error:  # a tag that does not fit its value raises any type
            problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
            raise _BrokenError(value.start_mark.line + 1, str(problem)) from error
        same = name.replace("_", "-")
        if same in lines:
            message = f"{name}: line {lines[same]} has the same key; leave one out"
            raise _BrokenError(line, message)
        lines[same] = line
        yield setting
