"""Helpers for the tests of ``hvdtrain doctor``."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.commands.doctor.findings import ABSENT, ERROR, WARNING, Finding
from hvdtrain.system.machine.limits import GIB, Resources

PLENTY = Resources(
    cores=8,
    quota=None,
    memory=64 * GIB,
    memory_limited=False,
    locked_memory=None,
    open_files=4096,
    processes=None,
    shared_memory=32 * GIB,
    shared_memory_free=32 * GIB,
)


def by_check(findings: Iterator[Finding]) -> dict[str, Finding]:
    """Return the findings by name; check that each problem has a remedy."""
    table = {finding.check: finding for finding in findings}
    for finding in table.values():
        bad = finding.state in (WARNING, ERROR)
        assert bool(finding.remedy) == bad or finding.state == ABSENT
    return table


def assert_finding(finding: Finding, state: str, words: str) -> None:
    """Check state and evidence of a finding."""
    assert (finding.state, words in finding.evidence) == (state, True), finding
