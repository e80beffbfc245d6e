"""Options of a program among the words of its command, and in the ``--config`` files that it names.

For the verbs that start any program: they look at its options, and leave the parsing to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.system.settings import Setting, read_settings


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
