"""Judge what ``doctor -n`` found on the ranks that it started, and how fast they allreduce.

The reports are those of ``doctor.rank_report`` and of ``collectives/bench.py``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hvdtrain.commands.doctor.checks.files import SKEW
from hvdtrain.commands.doctor.checks.hosts import is_this_host
from hvdtrain.commands.doctor.checks.machine import resource_findings
from hvdtrain.commands.doctor.findings import ERROR, OK, WARNING, Finding
from hvdtrain.commands.launch.rank_output import take_out_endings
from hvdtrain.errors import UsageError
from hvdtrain.steps.integrity import Device, RankFacts, check_devices, check_software, places
from hvdtrain.system.machine.limits import Resources
from hvdtrain.system.machine.threads import threads_per_rank
from hvdtrain.system.output.tables import message, table
from hvdtrain.system.output.text import plural, size
from hvdtrain.system.runtime.command import TIMED_OUT, Result

Rank = Mapping[str, Any]  # see ``rank_report``
TOLD = 3  # of the last lines of a failed start, so many are shown

NAMES = {
    "mpi4py": "mpi4py",
    "horovod": "Horovod, PyTorch",
    "gloo": "torch.distributed, Gloo",
    "nccl": "torch.distributed, NCCL",
}
SAME_BANDWIDTHS = 2  # ranks, on which that of the bus, times 2 (p - 1) / p, is no other
MESSAGE = 8  # columns of a size
SHORT = {"mpi4py": "mpi4py", "horovod": "Horovod", "gloo": "Gloo", "nccl": "NCCL"}
NEEDED = ("mpi4py", "horovod")  # what the trainers use
REMEDIES = {
    "mpi4py": "look at the MPI findings above",
    "horovod": "look at the Horovod and MPI findings above",
    "gloo": "name the interface that connects the hosts: GLOO_SOCKET_IFNAME",
    "nccl": "NCCL_DEBUG=INFO tells more; name the interface by NCCL_SOCKET_IFNAME",
}


def read_reports(output: str) -> list[dict[str, Any]]:
    """Return the JSON objects in the output of ranks: one, if they make one world."""
    found = []
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def failed_start(result: Result) -> Finding:
    """Tell of ranks that were started and did not report."""
    text, _ = take_out_endings(result.output.encode())  # mpirun's own, which name no cause
    shown = ("".join(filter(str.isprintable, line)) for line in text.decode().splitlines())
    lines = [line.strip() for line in shown if line.strip("- ")]
    own = [line for line in lines if line.startswith("hvdtrain: ")]
    said = " / ".join((own or lines)[-TOLD:]) or "nothing"
    late = result.exit_code == TIMED_OUT
    end = "did not end in time" if late else f"exit code {result.exit_code}"
    return Finding(
        "ranks", ERROR, f"{end}; said last: {said}", f"try it by hand: {result.command.show()}"
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
    """Judge which GPU each rank takes: as with the adapters, that of its local rank."""
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
    """Judge how many threads each rank can keep busy, and where ranks outnumber cores."""
    threads, oversubscribed = [], []
    for host in dict.fromkeys(rank["host"] for rank in ranks):
        local = [frozenset(rank["affinity"]) for rank in ranks if rank["host"] == host]
        threads += [threads_per_rank(local, place) for place in range(len(local))]
        cores = len(frozenset.union(*local))
        if cores < len(local):
            oversubscribed.append(f"{host}: {len(local)} ranks on {cores} cores")
    told = " to ".join(dict.fromkeys(str(number) for number in (min(threads), max(threads))))
    if oversubscribed:
        remedy = "start fewer ranks, or ask for more cores: they take turns and wait for each other"
        return Finding("cores of the ranks", WARNING, "; ".join(oversubscribed), remedy)
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
    """Tell what is short on the other hosts: their limits may differ from the login node's."""
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


def allreduce_findings(report: Mapping[str, Any]) -> Iterator[Finding]:
    """Tell what could not be measured though it is there, and that the rest was."""
    measured = []
    for name, backend in report["backends"].items():
        if backend["state"] == "ok":
            measured.append(NAMES[name])
        elif backend["state"] == "error":
            state = ERROR if name in NEEDED else WARNING
            yield Finding(f"allreduce, {NAMES[name]}", state, backend["reason"], REMEDIES[name])
    if measured:
        yield Finding("allreduce", OK, f"right sums by {'; '.join(measured)}: see the table")


def allreduce_text(report: Mapping[str, Any]) -> str:
    """Return a row per message size: time, algorithm and bus bandwidth per back end.

    On 2 ranks both bandwidths are the same.
    """
    where = f"{plural(report['ranks'], 'rank')} on {plural(report['hosts'], 'host')}"
    kinds = {"algorithm": "alg", "bus": "bus"}
    shown = "algorithm and bus bandwidth"
    if report["ranks"] == SAME_BANDWIDTHS:
        kinds, shown = {"bus": "bandwidth"}, "bandwidth"
    backends = {k: v["rows"] for k, v in report["backends"].items() if v["state"] == "ok"}
    header = [word for name in backends for word in (SHORT[name], *kinds.values())]
    cells = []
    for rows in zip(*backends.values(), strict=True):
        cells.append([size(rows[0]["bytes"]).rjust(MESSAGE)])
        for row in rows:
            rates = [show_rate(row[f"{kind}_gb_per_second"]) for kind in kinds]
            cells[-1] += [show_seconds(row["seconds"]), *rates]
    times = table(["message".rjust(MESSAGE), *header], cells, joined=kinds.values())
    return f"{message(f'allreduce over {where}: median time, {shown}')}\n{times}"


def show_rate(gigabytes: float) -> str:
    """Show a bandwidth, given in GB/s, as 4 kB/s, 400 MB/s, 1.25 GB/s."""
    return _scaled(gigabytes, {1.0: "GB/s", 1e3: "MB/s", 1e6: "kB/s"})


def show_seconds(seconds: float) -> str:
    """Show a time as 5.7 µs, 1.08 ms, 2.1 s."""
    return _scaled(seconds, {1.0: "s", 1e3: "ms", 1e6: "µs"})


def _scaled(value: float, units: Mapping[float, str]) -> str:
    """Return three significant digits, in the largest unit of which there is at least one."""
    factor = next((factor for factor in units if value * factor >= 0.9995), max(units))
    return f"{value * factor:.3g} {units[factor]}"
