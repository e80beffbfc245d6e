"""Readers of the values of options, one per rule; each raises ``ValueError`` with the reason."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path


def number(value: str | float) -> float:
    """Read a number."""
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a number") from None


MAX_DIGITS = 30  # of a count
MAX_IN_BATCH = 2**31 - 1


def count(value: str | int | float) -> int:
    """Read a whole number of 0 or more; ``5e9`` is accepted."""
    return _whole(value, 0)


def positive(value: str | int | float) -> int:
    """Read a whole number of 1 or more."""
    return _whole(value, 1)


def _whole(value: str | int | float, least: int) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) <= MAX_DIGITS:
        whole = int(value)  # exact, unlike a float
    else:
        real = number(value)
        if real >= 10**MAX_DIGITS:
            raise ValueError(f"{value} is larger than any count")
        whole = int(real) if real.is_integer() else -1
    if whole < least:
        raise ValueError(f"{value} is not a whole number of {least} or more")
    return whole


def batch(value: str | int | float) -> int:
    """Read the number of samples or passes in a batch."""
    if positive(value) > MAX_IN_BATCH:
        raise ValueError(f"{value} is more than {MAX_IN_BATCH:,}")
    return positive(value)


def random_seed(value: str | int | float) -> int:
    """Read a 64-bit random seed."""
    if count(value) >= 2**64:
        raise ValueError(f"{value} is not a seed: must be a whole number below 2^64")
    return count(value)


def fraction(value: str | float) -> float:
    """Read a number from 0 up to, not including, 1."""
    if not 0 <= number(value) < 1:
        raise ValueError(f"{value} is not a fraction from 0 up to 1")
    return float(value)


def non_negative(value: str | float) -> float:
    """Read a finite number of 0 or more."""
    if not 0 <= number(value) < float("inf"):
        raise ValueError(f"{value} is not a number of 0 or more")
    return float(value)


def numbers(value: str | Sequence[float]) -> tuple[float, ...]:
    """Read numbers separated by commas."""
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(non_negative(part) for part in parts)


def counts(value: str | Sequence[int]) -> tuple[int, ...]:
    """Read whole numbers separated by commas."""
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(positive(part) for part in parts)


def ranks(value: str | Sequence[int]) -> tuple[int, ...]:
    """Read ranks separated by commas."""
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(dict.fromkeys(count(part) for part in parts))


def span(value: str) -> tuple[int, int | None]:
    """Read ``A:B``: two whole numbers, A < B; either may be omitted."""
    first, colon, end = value.partition(":")
    try:
        span = count(first or 0), count(end) if end else None
    except ValueError:
        colon, span = "", (0, 0)
    if not colon or (span[1] is not None and span[1] <= span[0]):
        raise ValueError(f"{value} is not A:B, such as 10:20")
    return span


TRACKERS = ("wandb", "mlflow", "tensorboard")  # names of packages and of extras, too


def tracker(value: str) -> str:
    """Read ``NAME`` or ``NAME=WHERE``; a password is refused, since others see the command line."""
    name, equals, where = value.partition("=")
    if re.search(r"//[^/]*:[^/]*@", where):
        raise ValueError("a URI with a password belongs in the variable MLFLOW_TRACKING_URI")
    if name not in TRACKERS or bool(equals) != bool(where):
        raise ValueError(f"{value!r} is not NAME or NAME=WHERE, with {', '.join(TRACKERS)} as NAME")
    return name + equals + os.path.expanduser(where)  # noqa: PTH111 (it may be a URI)


def path(value: str | Path) -> Path:
    """Read a path, ``~`` for the home directory included: shells leave ``--option=~/x`` as it is.

    An empty one, e.g. of an unset variable, would be the current directory. One that cannot be
    looked up is refused here: ``Path.is_file`` and others would raise an error.
    """
    if value == "":
        raise ValueError("the path is empty")
    value = os.path.expanduser(value)  # noqa: PTH111 (which raises if there is no such user)
    try:
        Path(value).stat()
    except (FileNotFoundError, NotADirectoryError):  # e.g. an output
        pass
    except OSError as error:  # e.g. below a directory that this user may not enter, or too long
        raise ValueError(f"{value}: {error.strerror}") from error
    return Path(value)


def local_folder(value: str | Path) -> Path:
    """Read a directory of this host, and expand ``$NAME`` from the environment."""
    folder = os.path.expandvars(os.fspath(value))
    if unset := re.search(r"\$\{?\w+", folder):
        raise ValueError(f"{value}: {unset[0]} is not set on this host")
    return path(folder)


def above_zero(value: str | float) -> float:
    """Read a finite number above 0."""
    if not 0 < number(value) < float("inf"):
        raise ValueError(f"{value} is not a number above 0")
    return float(value)


def names(value: str) -> tuple[str, ...]:
    """Read names separated by commas, without duplicates."""
    parts = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
    if "" in parts:
        raise ValueError(f"{value!r} has an empty name")
    return parts
