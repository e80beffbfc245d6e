"""Read a Dockerfile: its stages, and the instructions of each.

It knows the part of the language that containers/Dockerfile uses (docs.docker.com/reference/
dockerfile), and refuses the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

KNOWN = ("ARG", "CMD", "COPY", "ENV", "RUN", "USER", "WORKDIR")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_STAGE = re.compile(r"(\S+)(?:\s+AS\s+(\S+))?", re.IGNORECASE)
_FLAG = re.compile(r"\s*--(\w[\w-]*)=(\S+)\s+")


@dataclass(frozen=True)
class Instruction:
    """An instruction of the file."""

    line: int  # its first line
    word: str  # RUN, COPY, ...
    flags: Mapping[str, str]  # of `--from=build`
    text: str  # what follows, its lines joined as the shell joins them
    shown: str  # all of it, line for line


@dataclass
class Stage:
    """The instructions between a FROM and the next."""

    name: str
    base: str  # another stage, or an image
    instructions: list[Instruction] = field(default_factory=list)

    def of(self, word: str) -> list[Instruction]:
        """Return the instructions of one kind."""
        return [instruction for instruction in self.instructions if instruction.word == word]


def parse(text: str) -> dict[str, Stage]:
    """Return the stages of a Dockerfile by name, in their order.

    Raises:
        ValueError: an instruction is unknown here; the message has its line.
    """
    stages: dict[str, Stage] = {}
    values: dict[str, str] = {}
    for instruction in _instructions(text):
        location = f"line {instruction.line}: {instruction.shown}"
        if instruction.word == "FROM":
            base = _VARIABLE.sub(lambda match: values[match[1] or match[2]], instruction.text)
            match = _STAGE.fullmatch(base)
            if not match:
                raise ValueError(f"{location}: must be FROM IMAGE AS NAME")
            name = match[2] or str(len(stages))
            stages[name] = Stage(name, match[1])
        elif not stages:
            name, _, default = instruction.text.partition("=")
            values[name] = default
        elif instruction.word in KNOWN and "<<" not in instruction.text:
            list(stages.values())[-1].instructions.append(instruction)
        else:
            raise ValueError(f"{location}: {instruction.word} is unknown here")
    return stages


def needed(stages: Mapping[str, Stage], target: str) -> list[str]:
    """Return the stages that ``target`` is built from, in the order in which they are built."""
    stage = stages[target]
    names = [stage.base, *(copy.flags.get("from", "") for copy in stage.of("COPY"))]
    below = [each for name in names if name in stages for each in needed(stages, name)]
    return list(dict.fromkeys([*below, target]))


def _instructions(text: str) -> Iterator[Instruction]:
    shown: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue  # between the lines of an instruction, too
        first = first if shown else number
        shown.append(line)
        if line.endswith("\\"):
            continue
        word, _, rest = "".join(part.removesuffix("\\") for part in shown).strip().partition(" ")
        flags = {}
        while match := _FLAG.match(rest):
            flags[match[1]] = match[2]
            rest = rest[match.end() :]
        yield Instruction(first, word.upper(), flags, rest.strip(), "\n".join(shown))
        shown = []
    if shown:
        raise ValueError(f"line {first}: the last line ends with a backslash")
