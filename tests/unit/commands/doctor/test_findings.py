"""Findings: states, exit code, and display."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from hvdtrain.collectives.cost import bandwidths
from hvdtrain.commands.doctor.checks.ranks import (
    AllreduceTimes,
    allreduce_findings,
    allreduce_text,
)
from hvdtrain.commands.doctor.diagnosis import report
from hvdtrain.commands.doctor.findings import (
    ABSENT,
    ERROR,
    OK,
    WARNING,
    Finding,
    findings_text,
    summary,
)

LONG = "/a/very/long/path" * 12


def test_the_summary_counts() -> None:
    bad = [Finding("a", ERROR, ""), Finding("b", WARNING, ""), Finding("c", WARNING, "")]
    assert summary(bad) == "1 error, 2 warnings"
    assert summary(bad[1:]) == "2 warnings"
    assert summary([Finding("a", OK, "")]) == "no problems found (absent parts are optional)"


def test_only_an_error_fails() -> None:
    fine = [Finding("a", OK, ""), Finding("b", WARNING, ""), Finding("c", ABSENT, "")]
    codes = [report(found, None, None).exit_code for found in ([], fine)]
    assert codes == [0, 0]
    assert report([*fine, Finding("d", ERROR, "")], None, None).exit_code == 1


def test_a_path_is_not_wrapped_in_a_file() -> None:
    directory = Finding("current directory", ERROR, "full [x]", "free some")
    assert findings_text([Finding("MPI", OK, LONG), directory]).splitlines() == [
        f"ok     MPI                {LONG}",
        "error  current directory  full [x]",
        "                          -> free some",
    ]


def test_findings_are_coloured_and_wrapped_on_a_terminal(
    terminal_of: Callable[[int], None],
) -> None:
    terminal_of(60)
    text = findings_text([Finding("MPI", WARNING, LONG, "remedy")])
    assert "\x1b[" in text
    lines = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
    assert max(map(len, lines)) <= 60
    assert "".join(line.removeprefix("warning  MPI").strip() for line in lines[:-1]) == LONG


def measured(seconds: float, size: int) -> dict[str, float]:
    algorithm, bus = bandwidths(size, seconds, 4)
    return {
        "bytes": size,
        "seconds": seconds,
        "algorithm_gb_per_second": algorithm,
        "bus_gb_per_second": bus,
    }


REPORT = AllreduceTimes(
    ranks=4,
    hosts=2,
    backends={
        "mpi4py": {"state": "ok", "rows": [measured(1e-5, 4), measured(0.01, 10**7)]},
        "horovod": {"state": "ok", "rows": [measured(1e-3, 4), measured(0.02, 10**7)]},
        "gloo": {"state": "error", "reason": "no route"},
        "nccl": {"state": "absent", "reason": "no GPU"},
    },
)


def test_the_allreduce_table() -> None:
    assert allreduce_text(REPORT).splitlines() == [
        "allreduce over 4 ranks on 2 hosts: median time, algorithm and bus bandwidth",
        "   message    mpi4py        alg        bus   Horovod        alg        bus",
        "       4 B     10 µs   400 kB/s   600 kB/s   1.00 ms     4 kB/s     6 kB/s",
        "   9.5 MiB   10.0 ms     1 GB/s   1.5 GB/s   20.0 ms   500 MB/s   750 MB/s",
    ]


def test_two_ranks_have_one_bandwidth_column() -> None:
    assert allreduce_text(replace(REPORT, ranks=2, hosts=1)).splitlines()[:2] == [
        "allreduce over 2 ranks on 1 host: median time, bandwidth",
        "   message    mpi4py   bandwidth   Horovod   bandwidth",
    ]


def test_failed_back_ends_are_reported() -> None:
    states = {finding.check: finding.state for finding in allreduce_findings(REPORT)}
    assert states == {"allreduce, torch.distributed, Gloo": WARNING, "allreduce": OK}
    broken = replace(REPORT, backends={"horovod": {"state": "error", "reason": "its world is 1"}})
    (finding,) = allreduce_findings(broken)
    assert (finding.state, finding.evidence) == (ERROR, "its world is 1")
