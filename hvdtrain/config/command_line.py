"""The command line of a trainer, and the YAML file of ``--config``, read as ``Options``."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.config.options import (
    Options,
    check,
    declared,
    numbers,
    steps,
    strategy_name,
)
from hvdtrain.config.strategies import STRATEGIES
from hvdtrain.errors import UsageError
from hvdtrain.system.files import read_settings

SHOWN = 200  # characters of a wrong value
METAVARS: dict[Any, str] = {
    Path: "PATH",
    str: "NAME",
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
    parser.add_argument("--config", metavar="FILE", help="YAML file of options; the line wins")
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
        parser.add_argument(dashed, type=reader(read, choices), metavar=metavar, help=text)
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
    line = [_dashed(argument) for argument in arguments]
    given = _values(parser, line)
    if path := given.pop("config", None):
        from_file = _values(parser, _read_config(Path(path)))
        for one, other in (*kind.EITHER, *(pair[::-1] for pair in kind.EITHER)):
            if one in given:  # the line wins over what it contradicts, too
                from_file.pop(other, None)
        given = {**from_file, **given}
    return check(kind(**given))


def _dashed(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def _values(parser: Parser, arguments: list[str]) -> dict[str, Any]:
    return {
        name: value for name, value in vars(parser.read(arguments)).items() if value is not None
    }


def _read_config(path: Path) -> list[str]:
    # The file becomes arguments, so that its values are read and checked in the same one way.
    content = read_settings(path, f"--config {path}", "batch-size: 64")
    arguments = []
    if "config" in content:
        raise UsageError(f"--config {path}: a file of options cannot name another one")
    for name, value in content.items():
        option_name = "--" + str(name).replace("_", "-")
        if isinstance(value, list):
            value = ",".join(map(str, value))
        if value is True:
            arguments.append(option_name)
        elif value is not False and value is not None:
            arguments.append(f"{option_name}={value}")
    return arguments
