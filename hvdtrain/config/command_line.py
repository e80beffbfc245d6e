"""Command lines and ``--config`` files: of a trainer, parsed; of any program, looked at.

The verbs that start a program look at its options, and leave the parsing to itself.
"""

from __future__ import annotations

import argparse
import collections
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import override

from hvdtrain.config.checks import check, of_options
from hvdtrain.config.declare import (
    CommandParser,
    OptionValues,
    add_options,
    exclusive,
    not_among,
    values_of,
)
from hvdtrain.config.options import Options
from hvdtrain.config.values import local_folder
from hvdtrain.errors import UsageError
from hvdtrain.system.files import check_working_directory
from hvdtrain.system.runtime.detect import detect
from hvdtrain.system.settings import Setting, read_settings


class Parser(CommandParser):
    """Parser of a program that every rank runs; rank 0 prints the help."""

    @override
    def print_help(self, file: Any = None) -> None:
        if detect(os.environ).is_root:
            super().print_help(file)


def build_parser(
    workload: str,
    description: str,
    epilog: str,
    kind: type[Options] = Options,
    *,
    add_help: bool = True,
) -> Parser:
    """Return the parser of a trainer, with an option per field of ``kind``, in its groups."""
    parser = Parser(
        prog=f"python -m hvdtrain.{workload}",
        usage="%(prog)s [options]",
        description=description,
        epilog=epilog,
        add_help=add_help,
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        action="append",
        help="YAML file of options; later files and the command line take precedence",
    )
    add_options(parser, kind, has_files=True)
    return parser


def parse(
    workload: str,
    arguments: Sequence[str],
    *,
    description: str,
    epilog: str,
    kind: type[Options] = Options,
) -> Options:
    """Parse a trainer's command line, and the YAML files of ``--config``, into a ``kind``.

    Raises:
        UsageError: naming the option, the wrong value and the valid ones; or the working directory
            was removed.
    """
    check_working_directory()
    parser = build_parser(workload, description, epilog, kind)
    line = parser.read(spelled(arguments, kind.ALIASES))
    # `help: true` in a file would end the program as if it had finished.
    file_parser = build_parser(workload, description, epilog, kind, add_help=False)
    files = (_read_config(file_parser, kind, file) for file in line.config or ())
    merged: OptionValues = {}
    pairs = exclusive(kind)
    for values in (*files, values_of(kind, line)):
        for name, excluded in (*pairs, *(pair[::-1] for pair in pairs)):
            if name in values:  # a later source also replaces the excluded option
                merged.pop(excluded, None)
        merged |= values
    options = kind(**merged)
    check(of_options(options))
    return options


def spelled(arguments: Sequence[str], aliases: Mapping[str, str]) -> list[str]:
    """Return a command line with dashes instead of underscores in names, and aliases replaced.

    Args:
        arguments: as typed by the user.
        aliases: as ``Options.ALIASES``.

    Raises:
        UsageError: an alias requires a value and has none, or one that it does not accept.
    """
    words, result = collections.deque(arguments), []
    while words:
        name, equals, value = words.popleft().partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        values = {key.split()[1]: new for key, new in aliases.items() if key.startswith(f"{name} ")}
        prefix = aliases.get(name, "")
        if values or prefix.endswith("="):
            if not equals and words and not words[0].startswith("-"):
                value = words.popleft()
            if not value:
                raise UsageError(f"{name}: expected one argument")
        if values and value not in values:
            raise UsageError(f"{name}: {not_among(value, values)}")
        if values:
            result += values[value].split()
        elif prefix.endswith("="):
            result += f"{prefix}{value}".split(maxsplit=prefix.count(" "))
        elif name in aliases:
            result += [*prefix.split(), value] if equals else prefix.split()
        else:
            result.append(name + equals + value)
    return result


def _read_config(parser: Parser, kind: type[Options], path: Path) -> OptionValues:
    """Read a file of options as command-line words, so that both are checked in the same way."""
    values: OptionValues = {}
    lines: dict[str, int] = {}
    for setting in read_settings(path, "batch-size: 64"):
        try:
            parsed = parser.read(spelled(_words(parser, setting, kind.ALIASES), kind.ALIASES))
        except UsageError as error:
            message = str(error).removeprefix("--").replace("did you mean --", "did you mean ")
            raise UsageError(f"{path} line {setting.line}: {message}") from error
        where = f"{path} line {setting.line}: {setting.name}"
        if parsed.config:
            raise UsageError(f"{where}: must not be nested: name each file on the command line")
        line_values = values_of(kind, parsed)
        for name in line_values:
            if name in lines:
                raise UsageError(f"{where}: line {lines[name]} sets the same option: omit one")
            lines[name] = setting.line
        values |= line_values
    return values


def _words(parser: Parser, setting: Setting, aliases: Mapping[str, str]) -> list[str]:
    """Return a setting of a file as command-line words."""
    option, value = "--" + setting.name.replace("_", "-"), setting.value
    action = parser.action_of(option)
    switch = option in aliases or (action is not None and action.nargs == 0)
    if action is None and not switch and not isinstance(value, str):
        return [option]  # there is no such option
    if value is None or (switch and value is False):
        return []
    if switch and value is True:
        return [option]
    if switch and option not in aliases:
        raise UsageError(f"{option}: {value!r} is not true or false")
    repeated = isinstance(action, argparse._AppendAction)
    text = action is not None and action.type in (str, Path, local_folder) and not repeated
    items = value if isinstance(value, list) and not text else [value]
    if not all(isinstance(item, str) for item in items):
        raise UsageError(f"{option}: must be text or a number")
    return [f"{option}={item}" for item in (items if repeated else [",".join(items)])]


def value_of(words: Sequence[str], option: str) -> str | None:
    """Return the value of ``option``, spelled with dashes or underscores; None if not set.

    The last one counts, as in the trainers.
    """
    return next(reversed(_values(words, option)), None)


def _values(words: Sequence[str], option: str) -> list[str]:
    """Return the values of ``option``, which may be repeated."""
    values = []
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == option:
            values.append(value if equals else next(iter(words[index + 1 : index + 2]), ""))
    return values


def without_option(words: Sequence[str], option: str) -> list[str]:
    """Return ``words`` without ``option`` and its value."""
    kept, remaining = [], iter(words)
    for word in remaining:
        name, equals, _ = word.partition("=")
        if name.replace("_", "-") != option:
            kept.append(word)
        elif not equals:
            next(remaining, None)
    return kept


def config_options(words: Sequence[str]) -> dict[str, str]:
    """Return the options in the --config files, as the trainers read them, by ``--name``.

    Empty if there is no file, or --config has another meaning in the program.
    """
    settings: list[Setting] = []
    for path in filter(None, _values(words, "--config")):
        with suppress(UsageError):  # reported by the program itself
            settings += read_settings(Path(path), "")
    return {
        f"--{setting.name.replace('_', '-')}": str(setting.value)
        for setting in settings
        if setting.value is not None and setting.value is not False
    }


def effective_value(words: Sequence[str], option: str) -> str | None:
    """Return the value of ``option`` on the command line or in the file; None if not set."""
    value = value_of(words, option)
    return config_options(words).get(option) if value is None else value
