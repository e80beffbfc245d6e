"""The command line of a trainer, and the YAML file of ``--config``, read as ``Options``."""

from __future__ import annotations

import argparse
import collections
import difflib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from hvdtrain.config.options import (
    Options,
    check,
    counts,
    declared,
    local_folder,
    numbers,
    steps,
    strategy_name,
)
from hvdtrain.config.strategies import STRATEGIES
from hvdtrain.errors import UsageError
from hvdtrain.system.files import read_settings
from hvdtrain.system.runtime.detect import detect

LISTS = (counts, numbers)  # kinds of options that take several words
SHOWN = 200  # characters of a wrong value
METAVARS: dict[Any, str] = {
    Path: "PATH",
    local_folder: "PATH",
    str: "NAME",
    counts: "N,N",
    numbers: "N,N",
    steps: "A:B",
    strategy_name: "|".join(STRATEGIES),
}


class Parser(argparse.ArgumentParser):
    """The parser of a program that ranks run: what is wrong is an error, and nothing is guessed."""

    def __init__(self, program: str, description: str, epilog: str, usage: str | None) -> None:
        super().__init__(
            prog=f"python -m hvdtrain.{program}",
            usage=usage,
            description=description,
            epilog=epilog,
            exit_on_error=False,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    @override
    def print_help(self, file: Any = None) -> None:
        if detect(os.environ).is_root:
            super().print_help(file)

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse a command line.

        Raises:
            UsageError: naming the option, the wrong value and the valid ones.
        """
        try:
            namespace, unknown = self.parse_known_args(arguments)
        except argparse.ArgumentError as error:
            raise UsageError(f"{error.argument_name}: {error.message}") from error
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            name = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
            raise UsageError(f"{name}: no such option; {hint}")
        return namespace


def build_parser(
    workload: str, description: str, epilog: str, kind: type[Options] = Options
) -> Parser:
    """Make the command line of a trainer from the fields of ``kind``."""
    parser = Parser(workload, description, epilog, usage="%(prog)s [options]")
    parser.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        help="YAML file of options; the line wins, of several files the last one",
    )
    for field in declared(kind):
        dashed = "--" + field.name.replace("_", "-")
        text, read = field.metadata["help"], field.metadata["kind"]
        if read is bool:
            parser.add_argument(dashed, action="store_true", default=None, help=text)
            continue
        if field.default not in (None, ""):
            text += f" ({field.default})"
        choices = field.metadata["choices"]
        metavar = "|".join(choices) or METAVARS.get(read, "N")
        several: dict[str, Any] = {"nargs": "+"} if read in LISTS else {}
        taken = reader(read, choices)
        parser.add_argument(dashed, type=taken, metavar=metavar, help=text, **several)
    return parser


def reader(kind: Callable[[Any], Any], choices: Sequence[str] = ()) -> Callable[[str], Any]:
    """Return a type for argparse whose errors tell what is wrong."""

    def read(value: str) -> Any:
        if choices and value not in choices:
            raise argparse.ArgumentTypeError(
                f"{value[:SHOWN]!r}: choose one of {', '.join(choices)}"
            )
        try:
            return kind(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error).replace(value, value[:SHOWN])) from error

    return read


def parse(
    workload: str,
    arguments: Sequence[str],
    *,
    description: str,
    epilog: str,
    kind: type[Options] = Options,
) -> Options:
    """Read the command line of a trainer, and the YAML file that ``--config`` names, as a ``kind``.

    Raises:
        UsageError: naming the option, the wrong value and the valid ones.
    """
    parser = build_parser(workload, description, epilog, kind)
    line = _values(parser, spelled(arguments, kind.ALIASES))
    files = [Path(name) for name in line.pop("config", [])]
    given: dict[str, Any] = {}
    for one in (*(_values(parser, _read_config(f, kind.ALIASES)) for f in files), line):
        for name, other in (*kind.EITHER, *(pair[::-1] for pair in kind.EITHER)):
            if name in one:  # who comes later wins over what it contradicts, too
                given.pop(other, None)
        given |= one
    return check(kind(**given))


def spelled(arguments: Sequence[str], aliases: Mapping[str, str]) -> list[str]:
    """Return a command line with dashes for underscores in names, and without aliases.

    Args:
        arguments: as the user gave them.
        aliases: as ``Options.ALIASES``.

    Raises:
        UsageError: an option that is an alias with each of its values has another one.
    """
    words, result = collections.deque(arguments), []
    while words:
        word = words.popleft()
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
            word = name + equals + value
        if name in aliases:
            new = aliases[name].split()
            result += [*new[:-1], *(one + equals + value for one in new[-1:])]
            continue
        values = {key.split()[1]: new for key, new in aliases.items() if key.startswith(f"{name} ")}
        if not values:
            result.append(word)
            continue
        value = value if equals or not words else words.popleft()
        if value not in values:
            raise UsageError(f"{name}: {value[:SHOWN]!r}: choose one of {', '.join(values)}")
        result += values[value].split()
    return result


def _values(parser: Parser, arguments: list[str]) -> dict[str, Any]:
    given = {
        name: value for name, value in vars(parser.read(arguments)).items() if value is not None
    }
    return {name: _joined(value) for name, value in given.items()}


def _joined(value: Any) -> Any:
    """Return as one what came in several words: ``30 60`` is ``30,60``."""
    if isinstance(value, list) and isinstance(value[0], tuple):
        return tuple(itertools.chain(*value))
    return value


def _read_config(path: Path, aliases: Mapping[str, str]) -> list[str]:
    # The file becomes arguments, so that its values are read and checked in the same one way.
    content = read_settings(path, f"--config {path}", "batch-size: 64")
    arguments = []
    for name, value in content.items():
        option_name = "--" + str(name).replace("_", "-")
        if isinstance(value, list):
            value = ",".join(map(str, value))
        if value is True:
            arguments.append(option_name)
        elif value is not False and value is not None:
            arguments.append(f"{option_name}={value}")
    arguments = spelled(arguments, aliases)
    if any(word.partition("=")[0] == "--config" for word in arguments):
        raise UsageError(f"--config {path}: a file of options cannot name another one")
    return arguments
