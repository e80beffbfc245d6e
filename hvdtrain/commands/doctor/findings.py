"""Findings about the environment: check, state, evidence and remedy of each, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


def warning_if(remedy: str, check: str, evidence: str) -> Finding:
    """Return a warning with its remedy; without a remedy the check is passed."""
    return Finding(check, WARNING if remedy else OK, evidence, remedy)


def count(findings: Sequence[Finding], state: str) -> int:
    """Return the number of findings with this state."""
    return sum(1 for finding in findings if finding.state == state)


def summary(findings: Sequence[Finding]) -> str:
    """Return the numbers of errors and warnings, in words."""
    counts = ((count(findings, state), state) for state in (ERROR, WARNING))
    return (
        ", ".join(plural(n, state) for n, state in counts if n)
        or "no problems found (absent parts are optional)"
    )


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
