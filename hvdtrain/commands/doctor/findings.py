"""Findings about the environment: check, state, evidence and remedy of each, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from hvdtrain.errors import EXIT_FAILURE, EXIT_OK
from hvdtrain.system.output.tables import coloured, entry
from hvdtrain.system.output.text import plural

OK = "ok"
WARNING = "warning"
ERROR = "error"
ABSENT = "absent"
"""Not present, and optional; or not visible from here."""

STYLES = {OK: "green", WARNING: "yellow", ERROR: "bold red", ABSENT: "dim"}


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str  # name of the check
    state: str  # ``ok``, ``warning``, ``error`` or ``absent``
    evidence: str  # facts on which the state is based
    remedy: str = ""  # what to do; empty if nothing

    def as_dict(self) -> dict[str, str]:
        """Return the finding for ``--json``."""
        return asdict(self)


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 if there is an error, otherwise 0."""
    return EXIT_FAILURE if any(finding.state == ERROR for finding in findings) else EXIT_OK


def summary(findings: Sequence[Finding]) -> str:
    """Return the numbers of errors and warnings, in words."""
    counts = {
        state: sum(1 for finding in findings if finding.state == state)
        for state in (ERROR, WARNING)
    }
    parts = [plural(n, state) for state, n in counts.items() if n]
    return ", ".join(parts) or "no problems found"


def findings_text(findings: Sequence[Finding], styles: Mapping[str, str] = STYLES) -> str:
    """Return an entry per finding, the remedy below its evidence; coloured on a terminal."""
    states = max((len(finding.state) for finding in findings), default=0)
    checks = max((len(finding.check) for finding in findings), default=0)
    lines: list[tuple[str, str]] = []
    for finding in findings:
        style = styles[finding.state]
        head = f"{finding.state:<{states}}  {finding.check:<{checks}}  "
        text = entry(head, finding.evidence)
        lines += [(text[: len(finding.state)], style), (f"{text[len(finding.state) :]}\n", "")]
        if finding.remedy:
            lines.append((entry(" " * len(head), f"-> {finding.remedy}") + "\n", style))
    return coloured(lines)
