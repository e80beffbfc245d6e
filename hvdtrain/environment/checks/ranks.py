"""What ``doctor -n`` found on the ranks that it started, judged."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hvdtrain.environment.checks.files import SKEW
from hvdtrain.environment.checks.hosts import is_this_host
from hvdtrain.environment.checks.machine import resource_findings
from hvdtrain.environment.findings import ERROR, OK, WARNING, Finding
from hvdtrain.environment.resources import Resources
from hvdtrain.errors import UsageError
from hvdtrain.launch.run import TIMED_OUT, Result
from hvdtrain.steps.integrity import Device, RankFacts, check_devices, check_software, places
from hvdtrain.steps.world import threads_per_rank

Rank = Mapping[str, Any]  # see ``rank_report``
TOLD = 3  # of the last lines of a failed start, so many are shown


def read_reports(output: str) -> list[dict[str, Any]]:
    """The JSON objects in the output of ranks; there is one, if they make one world."""
    found = []
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def failed_start(result: Result) -> Finding:
    """Ranks that were started and did not report."""
    lines = [line.strip() for line in result.output.splitlines() if line.strip("- \n")]
    said = " / ".join(lines[-TOLD:]) or "nothing"
    late = result.exit_code == TIMED_OUT
    end = "did not end in time" if late else f"exit code {result.exit_code}"
    return Finding(
        "ranks",
        ERROR,
        f"{end}; said last: {said}",
        f"try it by hand: {result.command.show()}",
    )


def rank_findings(
    asked: int, reports: Sequence[Mapping[str, Any]], here: Collection[str]
) -> Iterator[Finding]:
    """Judge what ``asked`` ranks reported.

    Args:
        asked: how many were started.
        reports: what came back: one object where they made one world.
        here: the names of this host, whose limits were judged already.
    """
    if len(reports) > 1 or reports[0]["size"] != asked:
        sizes = ", ".join(str(report["size"]) for report in reports)
        mpi = "; ".join(reports[0]["ranks"][0]["mpi"])
        yield Finding(
            "ranks",
            ERROR,
            f"{asked} were started and made worlds of {sizes}: mpi4py's MPI ({mpi}) is not "
            "mpirun's",
            "put the mpirun of that MPI first on the PATH",
        )
        return
    ranks: list[Rank] = sorted(reports[0]["ranks"], key=lambda rank: rank["rank"])
    hosts = [rank["host"] for rank in ranks]
    yield Finding("ranks", OK, f"{len(ranks)}: {places(range(len(ranks)), hosts)}")
    yield _software(ranks)
    yield from _gpus(ranks)
    yield _cores(ranks)
    if len(set(hosts)) > 1:
        yield _directory(ranks)
        yield _clocks(ranks)
        yield from _limits(ranks, here)


def _facts(rank: Rank) -> RankFacts:
    return RankFacts(rank["host"], rank["machine"], rank["software"])


def _software(ranks: Sequence[Rank]) -> Finding:
    check = "versions on the ranks"
    try:
        check_software([_facts(rank) for rank in ranks])
    except UsageError as error:
        what, _, remedy = str(error).partition(". ")
        return Finding(check, ERROR, what, remedy)
    told = ", ".join(f"{name} {version}" for name, version in ranks[0]["software"].items())
    return Finding(check, OK, f"the same on all: {told}")


def _gpus(ranks: Sequence[Rank]) -> Iterator[Finding]:
    """As the adapters do: a rank takes the GPU at its place on its host."""
    if not any(rank["gpus"] for rank in ranks):
        return
    devices, count = [], dict.fromkeys((_facts(rank).place for rank in ranks), 0)
    for rank in ranks:
        place, visible = _facts(rank).place, rank["gpus"]
        identity = visible[count[place] % len(visible)] if visible else ""
        devices.append(Device("a GPU", identity, len(visible)))
        count[place] += 1
    try:
        check_devices(devices, [_facts(rank) for rank in ranks])
    except UsageError as error:
        what, _, remedy = str(error).partition(": ")
        yield Finding("GPUs of the ranks", ERROR, what, remedy)
    else:
        yield Finding("GPUs of the ranks", OK, "one each")


def _cores(ranks: Sequence[Rank]) -> Finding:
    """Threads that each rank can keep busy, and hosts where ranks outnumber cores."""
    threads, crowded = [], []
    for host in dict.fromkeys(rank["host"] for rank in ranks):
        local = [frozenset(rank["affinity"]) for rank in ranks if rank["host"] == host]
        threads += [threads_per_rank(local, place) for place in range(len(local))]
        cores = len(frozenset.union(*local))
        if cores < len(local):
            crowded.append(f"{host}: {len(local)} ranks on {cores} cores")
    told = " to ".join(dict.fromkeys(str(number) for number in (min(threads), max(threads))))
    if crowded:
        remedy = "start fewer ranks, or ask for more cores: they take turns and wait for each other"
        return Finding("cores of the ranks", WARNING, "; ".join(crowded), remedy)
    return Finding("cores of the ranks", OK, f"{told} each")


def _directory(ranks: Sequence[Rank]) -> Finding:
    check = "directory on the ranks"
    blind = [rank["rank"] for rank in ranks if not rank["sees_directory"]]
    if blind:
        where = places(blind, [rank["host"] for rank in ranks])
        return Finding(
            check,
            WARNING,
            f"{where} see another directory than rank 0 under this name",
            "work on a shared file system, and keep --checkpoint-dir there",
        )
    return Finding(check, OK, "the same on all hosts")


def _clocks(ranks: Sequence[Rank]) -> Finding:
    ahead = {rank["host"]: rank["clock_ahead"] for rank in ranks}
    host, worst = max(ahead.items(), key=lambda pair: abs(pair[1]))
    told = f"{host} is {worst:+.3f} s off rank 0's host"
    if abs(worst) > SKEW:
        remedy = "have the clocks set (chrony, NTP): logs and timelines cannot be compared"
        return Finding("clocks of the hosts", WARNING, told, remedy)
    return Finding("clocks of the hosts", OK, f"within {abs(worst) * 1000:.1f} ms")


def _limits(ranks: Sequence[Rank], here: Collection[str]) -> Iterator[Finding]:
    """What is short on the other hosts: their limits may differ from the login node's."""
    for host in dict.fromkeys(rank["host"] for rank in ranks):
        local = [rank for rank in ranks if rank["host"] == host]
        if is_this_host(host, here):
            continue
        first = local[0]
        # A rank's own affinity is a part of its host.
        cores = len({core for rank in local for core in rank["affinity"]})
        found = Resources(**{**first["resources"], "cores": cores})
        environ = {"OMP_NUM_THREADS": first["threads"]}
        for finding in resource_findings(found, len(local), environ, first["fabric"]):
            if finding.state != OK:
                check = f"{finding.check} on {host}"
                yield Finding(check, finding.state, finding.evidence, finding.remedy)
