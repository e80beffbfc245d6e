"""Read a Dockerfile: its stages, and the instructions of each with their variables filled in.

Of the language it knows what containers/Dockerfile uses (docs.docker.com/reference/dockerfile); of
what it does not know it says so.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

KNOWN = ("ARG", "CMD", "COPY", "ENV", "RUN", "USER", "WORKDIR")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_STAGE = re.compile(r"(\S+)(?:\s+AS\s+(\S+))?", re.IGNORECASE)


@dataclass(frozen=True)
class Instruction:
    """One instruction as it stands in the file."""

    line: int  # its first line
    word: str  # RUN, COPY, ...
    flags: Mapping[str, str]  # of `--from=build`
    text: str  # what follows, its lines joined as the shell joins them
    shown: str  # all of it, line for line


@dataclass
class Stage:
    """What stands between one FROM and the next."""

    name: str
    base: str  # another stage, or an image
    instructions: list[Instruction] = field(default_factory=list)

    def of(self, word: str) -> list[Instruction]:
        """Return the instructions of one kind."""
        return [one for one in self.instructions if one.word == word]


def parse(text: str, arguments: Mapping[str, str] | None = None) -> dict[str, Stage]:
    """Return the stages of a Dockerfile by name, in their order.

    Args:
        text: of the file.
        arguments: what `--build-arg` gives, for the ARG that stand before the first FROM.

    Raises:
        ValueError: an instruction is none of those that are known here; the line is named.
    """
    stages: dict[str, Stage] = {}
    arguments, given = dict(arguments or {}), {}
    for one in _instructions(text):
        if one.word == "FROM":
            match = _STAGE.fullmatch(fill_in(one.text, given))
            if not match:
                raise ValueError(f"line {one.line}: not understood: {one.shown}")
            base, name = match.groups()
            stages[name or str(len(stages))] = Stage(name or str(len(stages)), base)
        elif not stages:
            name, _, default = one.text.partition("=")
            given[name] = arguments.get(name, default)
        elif one.word in KNOWN and "<<" not in one.text:
            list(stages.values())[-1].instructions.append(one)
        else:
            raise ValueError(f"line {one.line}: {one.word} is not known here: {one.shown}")
    return stages


def fill_in(text: str, variables: Mapping[str, str]) -> str:
    """Return ``text`` with its `$NAME` and `${NAME}` replaced; one that is not set is empty."""
    return _VARIABLE.sub(lambda match: variables.get(match[1] or match[2], ""), text)


def pairs(one: Instruction, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an ENV or an ARG; an ARG without a value is none."""
    words = [fill_in(word, variables) for word in shlex.split(one.text)]
    return dict(word.split("=", 1) for word in words if "=" in word)


def needed(stages: Mapping[str, Stage], target: str) -> list[str]:
    """Return the stages that ``target`` is built from, in the order in which they are built."""
    found: list[str] = []
    stage = stages[target]
    for name in [stage.base, *(one.flags.get("from", "") for one in stage.of("COPY"))]:
        if name in stages:
            found += [one for one in needed(stages, name) if one not in found]
    return [*found, target]


def _instructions(text: str) -> Iterator[Instruction]:
    shown: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue  # between the lines of an instruction, too
        first = first if shown else number
        shown.append(line)
        if not line.endswith("\\"):
            yield _instruction(first, shown)
            shown = []
    if shown:
        raise ValueError(f"line {first}: the last line ends with a backslash")


def _instruction(line: int, shown: list[str]) -> Instruction:
    joined = "".join(one.removesuffix("\\") for one in shown)
    word, _, rest = joined.strip().partition(" ")
    flags = {}
    while match := re.match(r"\s*--(\w[\w-]*)=(\S+)\s+", rest):
        flags[match[1]] = match[2]
        rest = rest[match.end() :]
    return Instruction(line, word.upper(), flags, rest.strip(), "\n".join(shown))
