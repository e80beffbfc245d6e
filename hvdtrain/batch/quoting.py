"""Words of a command as bash reads them back, whatever is in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection

_REFERENCE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SPECIAL = re.compile(r'[\\"$`]')  # inside double quotes


def quote(word: str) -> str:
    """``word`` as bash reads it back, on one line.

    A newline inside quotes would be right for bash, but a batch system reads the lines of a script
    too: one that begins with ``#PBS`` could be taken for a directive, and sbatch refuses a CR.
    """
    if not _CONTROL.search(word):
        return shlex.quote(word)
    plain = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _CONTROL.sub(lambda match: f"\\{ord(match[0]):03o}", plain) + "'"


def render(word: str, variables: Collection[str], optional: Collection[str] = ()) -> str:
    """``word`` with ``$NAME`` and ``${NAME}`` left to bash, for the names in ``variables`` only.

    Any other ``$`` stands for itself. A word with a variable in ``optional`` is left out where the
    variable is empty.
    """
    text, end, names = "", 0, []
    for match in _REFERENCE.finditer(word):
        name = match[1] or match[2]
        if name in variables:
            text += _inner(word[end : match.start()]) + f"${{{name}}}"
            end = match.end()
            names.append(name)
    if not names:
        return quote(word)
    text += _inner(word[end:])
    # "$A/b" reads better than "${A}/b", where it means the same.
    text = re.sub(r"(?<!\\)\$\{(\w+)\}(?!\w)", r"$\1", text)
    guard = next((name for name in names if name in optional), None)
    return f'${{{guard}:+"{text}"}}' if guard else f'"{text}"'


def _inner(literal: str) -> str:
    """``literal`` inside double quotes."""
    escaped = _SPECIAL.sub(r"\\\g<0>", literal)
    if not _CONTROL.search(escaped):
        return escaped
    # Double quotes have no escape for a newline: they are closed for it, and opened again.
    return _CONTROL.sub(lambda match: f'"{quote(match[0])}"', escaped)
