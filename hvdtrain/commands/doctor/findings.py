"""What a look at the environment found: one line per thing, its state, its evidence, the remedy."""

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
"""Not there, and not needed by everyone; or nothing that can be seen from here."""

STYLES = {OK: "green", WARNING: "yellow", ERROR: "bold red", ABSENT: "dim"}


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


def findings_text(findings: Sequence[Finding], styles: Mapping[str, str] = STYLES) -> str:
    """Return an entry per finding, the remedy under its evidence; in colours on a terminal."""
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
