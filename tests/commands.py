"""Commands shown in README and the pages, as printed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.conftest import ROOT

PAGES = ("docs/timeline.md", "README.md", "docs/*.md", "homework/README.md", "jobs/README.md")
PROGRAMS = (
    *("bash", "hvdtrain", "make", "mpirun", "pip", "python", "qsub"),
    "./run_all.sh",
)
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
START = re.compile(rf"(\$ )?([A-Z_]+=\S+ +)*({'|'.join(map(re.escape, PROGRAMS))})( (?!\S+:)|$)")


@dataclass(frozen=True)
class Shown:
    """A command and its page."""

    page: str
    text: str


def shown() -> list[Shown]:
    """Return each distinct command of the pages without comments; a loop is one command."""
    commands: dict[str, Shown] = {}
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            page = str(path.relative_to(ROOT))
            text = path.read_text()
            # Inline code is a command to type only on these pages.
            typed = page.startswith(("homework", "jobs"))
            inline = re.findall(r"`([^`\n]+)`", BLOCK.sub("", text)) if typed else []
            for command in [*_blocks(text), *(code for code in inline if _is_command(code))]:
                commands.setdefault(command, Shown(page, command))
    return list(commands.values())


def _is_command(text: str) -> bool:
    """Return whether inline code is a complete command."""
    return bool(START.match(text) and re.search(r"\.(py|sh|pbs)\b", text)) and "..." not in text


def _blocks(text: str) -> list[str]:
    commands: list[str] = []
    for language, block in BLOCK.findall(text):
        if language not in ("", "sh"):
            continue
        if re.search(r"^ *for .*; do$", block, re.MULTILINE):
            commands.append(block)
            continue
        for line in re.sub(r" *\\\n *", " ", block).splitlines():
            if START.match(line):
                commands.append(re.sub(r"\s+#.*", "", line.removeprefix("$ ")).strip())
    return commands
