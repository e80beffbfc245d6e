"""Checks of the ranks started by ``doctor -n``, and of the speed of their allreduce.

The reports are those of ``doctor.rank_report`` and of ``hvdtrain.collectives --time --json``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from hvdtrain.commands.doctor.checks.files import SKEW
from hvdtrain.commands.doctor.checks.machine import resource_findings
from hvdtrain.commands.doctor.findings import ERROR, OK, WARNING, Finding, warning_if
from hvdtrain.commands.doctor.rank_report import RankReport, WorldReport
from hvdtrain.commands.launch.outcome import split_endings
from hvdtrain.errors import UsageError
from hvdtrain.steps.integrity import Device, RankFacts, check_devices, check_software, rank_names
from hvdtrain.system.machine.network import is_this_host
from hvdtrain.system.machine.threads import THREADS, threads_per_rank
from hvdtrain.system.output.tables import Table
from hvdtrain.system.output.text import bandwidth, duration, plural, size
from hvdtrain.system.runtime.command import TIMED_OUT, CommandResult

T = TypeVar("T")
SHOWN_LINES = 3  # number of last lines of a failed start in the evidence

SAME_BANDWIDTHS = 2  # number of ranks p for which the bus bandwidth's factor 2 (p - 1) / p is 1
MESSAGE = 8  # width of a size, in columns
NEEDED = ("mpi4py", "horovod")  # used by the trainers
# Name, short name and remedy of each back end.
BACKENDS = {
    "mpi4py": ("mpi4py", "mpi4py", "see the MPI findings above"),
    "horovod": ("Horovod, PyTorch", "Horovod", "see the Horovod and MPI findings above"),
    "gloo": (
        "torch.distributed, Gloo",
        "Gloo",
        "set GLOO_SOCKET_IFNAME to the interface that connects the hosts",
    ),
    "nccl": (
        "torch.distributed, NCCL",
        "NCCL",
        "set NCCL_SOCKET_IFNAME to the interface; NCCL_DEBUG=INFO prints details",
    ),
}


@dataclass(frozen=True)
class AllreduceTimes:
    """The report of ``hvdtrain.collectives --time``."""

    ranks: int
    hosts: int
    backends: dict[str, Mapping[str, Any]]  # by name: state, and reason or rows


def read_reports(output: str, kind: type[T]) -> list[T]:
    """Return the JSON objects of a kind in the output of ranks: one, if they formed one world."""
    reports = []
    for line in output.splitlines():
        if line.startswith("{"):
            with suppress(msgspec.DecodeError):  # also of another kind
                reports.append(msgspec.json.decode(line, type=kind))
    return reports


def failed_start(result: CommandResult) -> Finding:
    """Return the finding on ranks that were started and did not report."""
    text, _ = split_endings(result.output.encode())  # mpirun's messages, which name no cause
    shown = ("".join(filter(str.isprintable, line)) for line in text.decode().splitlines())
    lines = [line.strip() for line in shown if line.strip("- ")]
    messages = [line for line in lines if line.startswith("hvdtrain: ")]
    last = " / ".join((messages or lines)[-SHOWN_LINES:]) or "none"
    late = result.exit_code == TIMED_OUT
    end = "timed out" if late else f"exit code {result.exit_code}"
    return Finding("ranks", ERROR, f"{end}; last output: {last}", f"run {result.command.show()}")


def rank_findings(
    started: int, reports: Sequence[WorldReport], local_names: Collection[str]
) -> Iterator[Finding]:
    """Judge the reports of the ``started`` ranks: one report if they formed one world.

    The limits of this host, known by ``local_names``, were already checked.
    """
    if len(reports) > 1 or reports[0].size != started:
        sizes = ", ".join(str(report.size) for report in reports)
        mpi = "; ".join(reports[0].ranks[0].mpi)
        evidence = (
            f"{started} were started and formed worlds of {sizes}: mpi4py's MPI ({mpi}) is not "
            "mpirun's"
        )
        yield Finding("ranks", ERROR, evidence, "put the mpirun of that MPI first on the PATH")
        return
    ranks = sorted(reports[0].ranks, key=lambda rank: rank.rank)
    hosts = [rank.host for rank in ranks]
    yield Finding("ranks", OK, f"{len(ranks)}: {rank_names(range(len(ranks)), hosts)}")
    facts = [RankFacts(rank.host, rank.machine, rank.software) for rank in ranks]
    yield _software(facts)
    if any(rank.gpus for rank in ranks):
        yield _gpus(ranks, facts)
    yield _cores(ranks)
    if len(set(hosts)) > 1:
        yield _directory(ranks, hosts)
        yield _clocks(ranks)
        yield from _limits(ranks, local_names)


def _software(facts: Sequence[RankFacts]) -> Finding:
    check = "versions on the ranks"
    try:
        check_software(facts)
    except UsageError as error:
        evidence, _, remedy = str(error).partition(". ")
        return Finding(check, ERROR, evidence, remedy)
    common = ", ".join(f"{name} {version}" for name, version in facts[0].software.items())
    return Finding(check, OK, f"the same on all: {common}")


def _gpus(ranks: Sequence[RankReport], facts: Sequence[RankFacts]) -> Finding:
    """Judge the assignment of GPUs: as in the adapters, by local rank."""
    devices, count = [], Counter[tuple[str, str]]()
    for rank, host in zip(ranks, (fact.host_id for fact in facts), strict=True):
        identity = rank.gpus[count[host] % len(rank.gpus)] if rank.gpus else ""
        devices.append(Device("a GPU", identity, len(rank.gpus)))
        count[host] += 1
    try:
        check_devices(devices, facts)
    except UsageError as error:
        evidence, _, remedy = str(error).partition(": ")
        return Finding("GPUs of the ranks", ERROR, evidence, remedy)
    return Finding("GPUs of the ranks", OK, "one each")


def _by_host(ranks: Sequence[RankReport]) -> dict[str, list[RankReport]]:
    hosts: dict[str, list[RankReport]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank)
    return hosts


def _cores(ranks: Sequence[RankReport]) -> Finding:
    """Judge the threads per rank, and hosts with more ranks than cores."""
    threads, oversubscribed = [], []
    for host, local in _by_host(ranks).items():
        sets = [frozenset(rank.affinity) for rank in local]
        threads += [threads_per_rank(sets, index) for index in range(len(local))]
        cores = len(frozenset.union(*sets))
        if cores < len(local):
            oversubscribed.append(f"{host}: {len(local)} ranks on {cores} cores")
    if oversubscribed:
        remedy = "start fewer ranks, or request more cores: ranks that share a core slow all down"
        return Finding("cores of the ranks", WARNING, "; ".join(oversubscribed), remedy)
    count = " to ".join(dict.fromkeys(str(number) for number in (min(threads), max(threads))))
    return Finding("cores of the ranks", OK, f"{count} each")


def _directory(ranks: Sequence[RankReport], hosts: Sequence[str]) -> Finding:
    evidence, remedy = "the same on all hosts", ""
    if blind := [rank.rank for rank in ranks if not rank.sees_directory]:
        evidence = f"{rank_names(blind, hosts)} see another directory than rank 0 at this path"
        remedy = "use a shared file system, also for --checkpoint-dir"
    return warning_if(remedy, "directory on the ranks", evidence)


def _clocks(ranks: Sequence[RankReport]) -> Finding:
    worst = max(ranks, key=lambda rank: abs(rank.clock_ahead))
    evidence, remedy = f"within {abs(worst.clock_ahead) * 1000:.1f} ms", ""
    if abs(worst.clock_ahead) > SKEW:
        evidence = f"{worst.host} is {worst.clock_ahead:+.3f} s off rank 0's host"
        remedy = "synchronize the clocks (chrony, NTP): logs and timelines cannot be compared"
    return warning_if(remedy, "clocks of the hosts", evidence)


def _limits(ranks: Sequence[RankReport], local_names: Collection[str]) -> Iterator[Finding]:
    """Check the limits of the other hosts, which may differ from the login node's."""
    for host, local in _by_host(ranks).items():
        if is_this_host(host, local_names):
            continue
        # The affinity of one rank is only a part of its host's cores.
        cores = len({core for rank in local for core in rank.affinity})
        resources, environ = replace(local[0].resources, cores=cores), {THREADS: local[0].threads}
        for finding in resource_findings(resources, len(local), environ, local[0].fabric):
            if finding.state != OK:
                yield replace(finding, check=f"{finding.check} on {host}")


def allreduce_findings(report: AllreduceTimes) -> Iterator[Finding]:
    """Yield a finding per back end that failed, and one on those that were measured."""
    measured = []
    for key, backend in report.backends.items():
        name, _, remedy = BACKENDS[key]
        if backend["state"] == "ok":
            measured.append(name)
        elif backend["state"] == "error":
            state = ERROR if key in NEEDED else WARNING
            yield Finding(f"allreduce, {name}", state, backend["reason"], remedy)
    if measured:
        yield Finding("allreduce", OK, f"correct sums by {'; '.join(measured)}: see the table")


def allreduce_text(report: AllreduceTimes) -> str:
    """Return a row per message size: time, algorithm and bus bandwidth per back end.

    On 2 ranks both bandwidths are the same.
    """
    world = f"{plural(report.ranks, 'rank')} on {plural(report.hosts, 'host')}"
    kinds = {"algorithm": "alg", "bus": "bus"}
    shown = "algorithm and bus bandwidth"
    if report.ranks == SAME_BANDWIDTHS:
        kinds, shown = {"bus": "bandwidth"}, "bandwidth"
    backends = {k: v["rows"] for k, v in report.backends.items() if v["state"] == "ok"}
    header = [title for name in backends for title in (BACKENDS[name][1], *kinds.values())]
    cells = []
    for rows in zip(*backends.values(), strict=True):
        cells.append([size(rows[0]["bytes"]).rjust(MESSAGE)])
        for row in rows:
            rates = [bandwidth(1e9 * row[f"{kind}_gb_per_second"]) for kind in kinds]
            cells[-1] += [duration(row["seconds"]), *rates]
    title = f"allreduce over {world}: median time, {shown}"
    return Table(title, ["message".rjust(MESSAGE), *header], cells, joined=kinds.values()).text
