"""What the files of containers/ say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from tests.conftest import ROOT

FOLDER = ROOT / "containers"
INSTRUCTION = re.compile(
    r"^(?P<word>[A-Z]+)(?P<flags>(\s+--[\w-]+=\S+)*)[\s\\]+(?P<text>(.*\\\n)*.*)", re.MULTILINE
)


@dataclass(frozen=True)
class Instruction:
    """An instruction of the Dockerfile."""

    word: str  # RUN, COPY, ...
    flags: Mapping[str, str]  # of `--from=build`
    text: str  # what follows, its lines joined as the shell joins them


@dataclass
class Stage:
    """The instructions between a FROM and the next."""

    base: str  # another stage, or an image
    instructions: list[Instruction] = field(default_factory=list)

    def of(self, word: str) -> list[Instruction]:
        """Return the instructions of one kind."""
        return [instruction for instruction in self.instructions if instruction.word == word]


def stages() -> dict[str, Stage]:
    """The stages of the Dockerfile by name, in their order; each has a name."""
    text = re.sub(r"^ *#.*\n|^ *\n", "", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE)
    found: dict[str, Stage] = {}
    image = ""
    for match in INSTRUCTION.finditer(text):
        text = match["text"].replace("\\\n", "")
        if match["word"] == "FROM":
            base, name = text.split(" AS ")
            stage = found[name] = Stage(base.replace("${BASE}", image))
        elif not found:
            image = text.removeprefix("BASE=")
        else:
            flags = dict(flag[2:].split("=", 1) for flag in match["flags"].split())
            stage.instructions.append(Instruction(match["word"], flags, text))
    return found


def needed(stages: Mapping[str, Stage], target: str) -> list[str]:
    """The stages that ``target`` is built from, in the order in which they are built."""
    stage = stages[target]
    names = [stage.base, *(copy.flags.get("from", "") for copy in stage.of("COPY"))]
    below = [each for name in names if name in stages for each in needed(stages, name)]
    return list(dict.fromkeys([*below, target]))


def manifests(name: str) -> list[dict[str, Any]]:
    """The documents of a manifest."""
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def services() -> dict[str, Any]:
    """The services of compose.yaml."""
    found: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    return found


def variables(container: Mapping[str, Any]) -> dict[str, str]:
    """What a container's manifest sets."""
    return {one["name"]: one["value"] for one in container.get("env", [])}


def job(container: Mapping[str, Any], more: Mapping[str, str] | None = None) -> list[str]:
    """The command of a container, its `$(NAME)` filled in as Kubernetes does."""
    known = {**variables(container), **(more or {})}
    words = [*container["command"], *container.get("args", [])]
    for name, value in known.items():
        words = [word.replace(f"$({name})", value) for word in words]
    return words
