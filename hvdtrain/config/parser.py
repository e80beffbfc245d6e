"""argparse with one-line errors: the option, what is wrong, and the closest valid name."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from typing_extensions import override

from hvdtrain.errors import UsageError

SHOWN = 200  # characters of an invalid value in a message
PLAIN_TYPES = {int: "a whole number", float: "a number"}
MISSING = "the following arguments are required: "  # argparse's message


class CommandParser(argparse.ArgumentParser):
    """Parser that raises ``UsageError`` and accepts no abbreviated options."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(exit_on_error=False, allow_abbrev=False, **settings)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse a command line.

        Raises:
            UsageError: naming the option, the wrong value and the valid ones.
        """
        try:
            namespace, unknown = self.parse_known_args(words)
        except argparse.ArgumentError as error:
            if error.argument_name is None and error.message.startswith(MISSING):
                missing = error.message.removeprefix(MISSING)
                raise UsageError(f"{missing}: missing; see {self.prog} --help") from error
            option = f"{error.argument_name}: " if error.argument_name else ""
            raise UsageError(f"{option}{error.message}") from error
        if unknown:
            raise UsageError(self._unknown(unknown[0]))
        return namespace

    def action_of(self, option: str) -> argparse.Action | None:
        """Return the action of ``option``, or None if there is no such option."""
        return next((action for action in self._actions if option in action.option_strings), None)

    def _unknown(self, word: str) -> str:
        name = word.partition("=")[0]
        if not name.startswith("-"):
            return f"{word[:SHOWN]!r} is not expected here; see {self.prog} --help"
        known = [name for action in self._actions for name in action.option_strings]
        near = nearest(name, known)
        hint = f"did you mean {near}?" if near else f"see {self.prog} --help"
        return f"{name}: no such option; {hint}"

    @override
    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)

    # argparse has no public hook for these two messages.

    @override
    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        kind = self._registry_get("type", action.type, action.type)
        try:
            return kind(arg_string)
        except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
            message = str(error)
            if kind in PLAIN_TYPES:
                message = f"{arg_string!r} is not {PLAIN_TYPES[kind]}"
            raise argparse.ArgumentError(
                action, message.replace(arg_string, arg_string[:SHOWN])
            ) from error

    @override
    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, not_among(str(value), map(str, action.choices)))


def not_among(word: str, names: Iterable[str]) -> str:
    """Return the message for a ``word`` that is not in ``names``."""
    names = list(names)
    near = nearest(word, names)
    guess = f" (did you mean {near}?)" if near else ""
    return f"{word[:SHOWN]!r}: choose one of {', '.join(names)}{guess}"


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name in ``names`` closest to ``word``, or None."""
    return next(iter(difflib.get_close_matches(word, list(names), 1)), None)
