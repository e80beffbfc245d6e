"""Mutations of a valid input: of its bytes, its numbers, and its JSON values."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

TOKENS = [
    *(b"\0", b"\r", b"\n", b"\r\n", b"\xff\xfe", b"\xed\xa0\x80", b"\x1b[2J", "\u2028".encode()),
    *(b"NaN", b"Infinity", b"-1", b"0", b"1e999", b"9" * 20, b"9" * 5000, b"true", b"null"),
    *(
        b"[" * 2000,
        b'{"a":' * 2000,
        b"\n" * 20000,
        b" " * 20000,
        b"\\ud800",
        b'"\\UFFFFFFFF"',
        b"/dev/zero",
        b"../../../etc",
    ),
]
NUMBERS = [-1, 0, 1, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400, 1e308, 0.5]
VALUES: list[Any] = [
    *(None, True, "", "\ud800", "\0", "a\rb", "\x1b[2J", "../x", "-x", "x" * 300, [], {}, [[]]),
    *([None], {"": None}, float("nan"), float("inf"), -0.0, *NUMBERS),
]


def mutate(data: bytes, random: Random) -> bytes:
    """Return ``data`` with one to four random changes."""
    for _ in range(random.randint(1, 4)):
        data = random.choice((_json, _json, _number, _splice, _bits))(data, random)
    return data


def _bits(data: bytes, random: Random) -> bytes:
    if not data:
        return data
    at = random.randrange(len(data))
    return data[:at] + bytes([random.randrange(256)]) + data[at + 1 :]


def _splice(data: bytes, random: Random) -> bytes:
    """Cut the end, or remove, repeat or replace a part."""
    low, high = sorted(random.randrange(len(data) + 1) for _ in range(2))
    piece = random.choice((b"", 2 * data[low:high], random.choice(TOKENS)))
    return data[:low] + piece + random.choice((b"", data[high:], data[high:]))


def _number(data: bytes, random: Random) -> bytes:
    if not (matches := list(re.finditer(rb"\d+", data))):
        return data
    match = random.choice(matches)
    return data[: match.start()] + str(random.choice(NUMBERS)).encode() + data[match.end() :]


def _json(data: bytes, random: Random) -> bytes:
    """Replace, remove or repeat a value of a JSON document, or of one of its lines."""
    lines = data.split(b"\n")
    number = random.randrange(len(lines))
    for whole, text in ((True, data), (False, lines[number])):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        lines[number] = text = json.dumps(_changed(value, random)).encode()
        return text if whole else b"\n".join(lines)
    return _splice(data, random)


def _changed(value: Any, random: Random) -> Any:
    """Return a JSON value in which one value, at any depth, differs."""
    inner = isinstance(value, dict | list) and value and random.random() < 0.85
    if not inner:
        return random.choice(VALUES)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, copy = random.choice(keys), value.copy()
    if random.random() < 0.1:
        del copy[key]
    elif random.random() < 0.1 and isinstance(copy, dict):
        copy[str(random.choice(VALUES))] = copy[key]
    else:
        copy[key] = _changed(value[key], random)
    return copy
