"""What a look at the environment found: one line per thing, its state, its evidence, the remedy."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvdtrain.errors import EXIT_FAILURE, EXIT_OK
from hvdtrain.system.output.text import plural

OK = "ok"
WARNING = "warning"
ERROR = "error"
ABSENT = "absent"
"""Not there, and not needed by everyone; or nothing that can be seen from here."""

STYLES = {OK: "green", WARNING: "yellow", ERROR: "bold red", ABSENT: "dim"}
FILE_WIDTH = 10_000  # columns where nobody's terminal limits them: no word is cut or wrapped


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    check: str  # what was looked at
    state: str  # ``ok``, ``warning``, ``error`` or ``absent``
    evidence: str  # what was seen
    remedy: str = ""  # what to do about it; empty where nothing need be done

    def as_dict(self) -> dict[str, str]:
        """Return the finding for ``--json``."""
        return asdict(self)


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 where there is an error, else 0."""
    return EXIT_FAILURE if any(finding.state == ERROR for finding in findings) else EXIT_OK


def summary(findings: Sequence[Finding]) -> str:
    """Say how many are bad."""
    counts = {
        state: sum(1 for finding in findings if finding.state == state)
        for state in (ERROR, WARNING)
    }
    words = [plural(n, state) for state, n in counts.items() if n]
    return ", ".join(words) or "all well"


def findings_table(findings: Sequence[Finding], styles: Mapping[str, str] = STYLES) -> Table:
    """Return a row per finding, the remedy under its evidence."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        style = styles[finding.state]
        text = Text(finding.evidence)
        if finding.remedy:
            text.append(f"\n-> {finding.remedy}", style)
        table.add_row(Text(finding.state, style), finding.check, text)
    return table


def rendered(*parts: Any, columns: int | None) -> str:
    """Return ``parts`` as text, coloured for a terminal of ``columns``; None: plain, never cut."""
    stream = io.StringIO()
    console = Console(
        file=stream,
        force_terminal=columns is not None,
        width=columns or FILE_WIDTH,
        highlight=False,
        no_color=True if columns is None else None,
    )
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str), markup=False)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())
