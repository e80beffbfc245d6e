"""Checks of the ranks started by ``doctor -n``, and of the speed of their allreduce.

The reports are those of ``doctor.rank_report`` and of ``hvdtrain.collectives``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hvdtrain.commands.doctor.checks.files import SKEW
from hvdtrain.commands.doctor.checks.hosts import is_this_host
from hvdtrain.commands.doctor.checks.machine import resource_findings
from hvdtrain.commands.doctor.findings import ERROR, OK, WARNING, Finding
from hvdtrain.commands.launch.rank_output import split_endings
from hvdtrain.errors import UsageError
from hvdtrain.steps.integrity import (
    Device,
    RankFacts,
    check_devices,
    check_software,
    rank_names,
)
from hvdtrain.system.machine.limits import Resources
from hvdtrain.system.machine.threads import threads_per_rank
from hvdtrain.system.output.tables import message, table
from hvdtrain.system.output.text import plural, size
from hvdtrain.system.runtime.command import TIMED_OUT, Result

Rank = Mapping[str, Any]  # see ``rank_report``
SHOWN_LINES = 3  # number of last lines of a failed start in the evidence

NAMES = {
    "mpi4py": "mpi4py",
    "horovod": "Horovod, PyTorch",
    "gloo": "torch.distributed, Gloo",
    "nccl": "torch.distributed, NCCL",
}
SAME_BANDWIDTHS = 2  # number of ranks p for which the bus bandwidth's factor 2 (p - 1) / p is 1
MESSAGE = 8  # width of a size, in columns
SHORT = {"mpi4py": "mpi4py", "horovod": "Horovod", "gloo": "Gloo", "nccl": "NCCL"}
NEEDED = ("mpi4py", "horovod")  # used by the trainers
REMEDIES = {
    "mpi4py": "see the MPI findings above",
    "horovod": "see the Horovod and MPI findings above",
    "gloo": "set GLOO_SOCKET_IFNAME to the interface that connects the hosts",
    "nccl": "set NCCL_SOCKET_IFNAME to the interface; NCCL_DEBUG=INFO prints details",
}


def read_reports(output: str) -> list[dict[str, Any]]:
    """Return the JSON objects in the output of ranks: one, if they formed one world."""
    reports = []
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                reports.append(json.loads(line))
            except ValueError:
                continue
    return reports


def failed_start(result: Result) -> Finding:
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
    started: int, reports: Sequence[Mapping[str, Any]], local_names: Collection[str]
) -> Iterator[Finding]:
    """Judge the reports of the ranks.

    Args:
        started: number of ranks that were started.
        reports: one object if the ranks formed one world.
        local_names: names of this host, whose limits were already checked.
    """
    if len(reports) > 1 or reports[0]["size"] != started:
        sizes = ", ".join(str(report["size"]) for report in reports)
        mpi = "; ".join(reports[0]["ranks"][0]["mpi"])
        yield Finding(
            "ranks",
            ERROR,
            f"{started} were started and formed worlds of {sizes}: mpi4py's MPI ({mpi}) is not "
            "mpirun's",
            "put the mpirun of that MPI first on the PATH",
        )
        return
    ranks: list[Rank] = sorted(reports[0]["ranks"], key=lambda rank: rank["rank"])
    hosts = [rank["host"] for rank in ranks]
    yield Finding("ranks", OK, f"{len(ranks)}: {rank_names(range(len(ranks)), hosts)}")
    yield _software(ranks)
    yield from _gpus(ranks)
    yield _cores(ranks)
    if len(set(hosts)) > 1:
        yield _directory(ranks)
        yield _clocks(ranks)
        yield from _limits(ranks, local_names)


def _facts(rank: Rank) -> RankFacts:
    return RankFacts(rank["host"], rank["machine"], rank["software"])


def _software(ranks: Sequence[Rank]) -> Finding:
    check = "versions on the ranks"
    try:
        check_software([_facts(rank) for rank in ranks])
    except UsageError as error:
        evidence, _, remedy = str(error).partition(". ")
        return Finding(check, ERROR, evidence, remedy)
    common = ", ".join(f"{name} {version}" for name, version in ranks[0]["software"].items())
    return Finding(check, OK, f"the same on all: {common}")


def _gpus(ranks: Sequence[Rank]) -> Iterator[Finding]:
    """Judge the assignment of GPUs: as in the adapters, by local rank."""
    if not any(rank["gpus"] for rank in ranks):
        return
    devices, count = [], dict.fromkeys((_facts(rank).host_id for rank in ranks), 0)
    for rank in ranks:
        host, visible = _facts(rank).host_id, rank["gpus"]
        identity = visible[count[host] % len(visible)] if visible else ""
        devices.append(Device("a GPU", identity, len(visible)))
        count[host] += 1
    try:
        check_devices(devices, [_facts(rank) for rank in ranks])
    except UsageError as error:
        evidence, _, remedy = str(error).partition(": ")
        yield Finding("GPUs of the ranks", ERROR, evidence, remedy)
    else:
        yield Finding("GPUs of the ranks", OK, "one each")


def _cores(ranks: Sequence[Rank]) -> Finding:
    """Judge the threads per rank, and hosts with more ranks than cores."""
    threads, oversubscribed = [], []
    for host in dict.fromkeys(rank["host"] for rank in ranks):
        local = [frozenset(rank["affinity"]) for rank in ranks if rank["host"] == host]
        threads += [threads_per_rank(local, index) for index in range(len(local))]
        cores = len(frozenset.union(*local))
        if cores < len(local):
            oversubscribed.append(f"{host}: {len(local)} ranks on {cores} cores")
    if oversubscribed:
        remedy = "start fewer ranks, or request more cores: ranks that share a core slow all down"
        return Finding("cores of the ranks", WARNING, "; ".join(oversubscribed), remedy)
    count = " to ".join(dict.fromkeys(str(number) for number in (min(threads), max(threads))))
    return Finding("cores of the ranks", OK, f"{count} each")


def _directory(ranks: Sequence[Rank]) -> Finding:
    check = "directory on the ranks"
    blind = [rank["rank"] for rank in ranks if not rank["sees_directory"]]
    if blind:
        affected = rank_names(blind, [rank["host"] for rank in ranks])
        return Finding(
            check,
            WARNING,
            f"{affected} see another directory than rank 0 at this path",
            "use a shared file system, also for --checkpoint-dir",
        )
    return Finding(check, OK, "the same on all hosts")


def _clocks(ranks: Sequence[Rank]) -> Finding:
    ahead = {rank["host"]: rank["clock_ahead"] for rank in ranks}
    host, worst = max(ahead.items(), key=lambda pair: abs(pair[1]))
    if abs(worst) > SKEW:
        evidence = f"{host} is {worst:+.3f} s off rank 0's host"
        remedy = "synchronize the clocks (chrony, NTP): logs and timelines cannot be compared"
        return Finding("clocks of the hosts", WARNING, evidence, remedy)
    return Finding("clocks of the hosts", OK, f"within {abs(worst) * 1000:.1f} ms")


def _limits(ranks: Sequence[Rank], local_names: Collection[str]) -> Iterator[Finding]:
    """Check the limits of the other hosts, which may differ from the login node's."""
    for host in dict.fromkeys(rank["host"] for rank in ranks):
        local = [rank for rank in ranks if rank["host"] == host]
        if is_this_host(host, local_names):
            continue
        first = local[0]
        # The affinity of one rank is only a part of its host's cores.
        cores = len({core for rank in local for core in rank["affinity"]})
        resources = Resources(**{**first["resources"], "cores": cores})
        environ = {"OMP_NUM_THREADS": first["threads"]}
        for finding in resource_findings(resources, len(local), environ, first["fabric"]):
            if finding.state != OK:
                check = f"{finding.check} on {host}"
                yield Finding(check, finding.state, finding.evidence, finding.remedy)


def allreduce_findings(report: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding per back end that failed, and one on those that were measured."""
    measured = []
    for name, backend in report["backends"].items():
        if backend["state"] == "ok":
            measured.append(NAMES[name])
        elif backend["state"] == "error":
            state = ERROR if name in NEEDED else WARNING
            yield Finding(f"allreduce, {NAMES[name]}", state, backend["reason"], REMEDIES[name])
    if measured:
        yield Finding("allreduce", OK, f"correct sums by {'; '.join(measured)}: see the table")


def allreduce_text(report: Mapping[str, Any]) -> str:
    """Return a row per message size: time, algorithm and bus bandwidth per back end.

    On 2 ranks both bandwidths are the same.
    """
    world = f"{plural(report['ranks'], 'rank')} on {plural(report['hosts'], 'host')}"
    kinds = {"algorithm": "alg", "bus": "bus"}
    shown = "algorithm and bus bandwidth"
    if report["ranks"] == SAME_BANDWIDTHS:
        kinds, shown = {"bus": "bandwidth"}, "bandwidth"
    backends = {k: v["rows"] for k, v in report["backends"].items() if v["state"] == "ok"}
    header = [title for name in backends for title in (SHORT[name], *kinds.values())]
    cells = []
    for rows in zip(*backends.values(), strict=True):
        cells.append([size(rows[0]["bytes"]).rjust(MESSAGE)])
        for row in rows:
            rates = [show_rate(row[f"{kind}_gb_per_second"]) for kind in kinds]
            cells[-1] += [show_seconds(row["seconds"]), *rates]
    times = table(["message".rjust(MESSAGE), *header], cells, joined=kinds.values())
    return f"{message(f'allreduce over {world}: median time, {shown}')}\n{times}"


def show_rate(gigabytes: float) -> str:
    """Return a bandwidth in GB/s as text, e.g. 4 kB/s, 400 MB/s, 1.25 GB/s."""
    return _scaled(gigabytes, {1.0: "GB/s", 1e3: "MB/s", 1e6: "kB/s"})


def show_seconds(seconds: float) -> str:
    """Return a time as text, e.g. 5.7 µs, 1.08 ms, 2.1 s."""
    return _scaled(seconds, {1.0: "s", 1e3: "ms", 1e6: "µs"})


def _scaled(value: float, units: Mapping[float, str]) -> str:
    """Return three significant digits, in the largest unit with a value of at least 1."""
    factor = next((factor for factor in units if value * factor >= 0.9995), max(units))
    return f"{value * factor:.3g} {units[factor]}"
