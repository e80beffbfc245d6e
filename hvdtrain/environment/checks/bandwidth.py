"""The measured allreduces, judged and as a table. See ``hvdtrain.measure.allreduce``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from hvdtrain.environment.findings import ERROR, OK, WARNING, Finding

NAMES = {
    "mpi4py": "mpi4py",
    "horovod": "Horovod, PyTorch",
    "gloo": "torch.distributed, Gloo",
    "nccl": "torch.distributed, NCCL",
}
SHORT = {"mpi4py": "mpi4py", "horovod": "Horovod", "gloo": "Gloo", "nccl": "NCCL"}
NEEDED = ("mpi4py", "horovod")  # what the trainers use


def allreduce_findings(report: Mapping[str, Any]) -> Iterator[Finding]:
    """What could not be measured though it is there; and that the rest was."""
    measured = []
    for name, backend in report["backends"].items():
        if backend["state"] == "ok":
            measured.append(NAMES[name])
        elif backend["state"] == "error":
            state = ERROR if name in NEEDED else WARNING
            yield Finding(f"allreduce, {NAMES[name]}", state, backend["reason"], REMEDIES[name])
    if measured:
        yield Finding("allreduce", OK, f"right sums by {'; '.join(measured)}: see the table")


REMEDIES = {
    "mpi4py": "look at the MPI findings above",
    "horovod": "look at the Horovod and MPI findings above",
    "gloo": "name the interface that connects the hosts: GLOO_SOCKET_IFNAME",
    "nccl": "NCCL_DEBUG=INFO tells more; name the interface by NCCL_SOCKET_IFNAME",
}


def allreduce_title(report: Mapping[str, Any]) -> str:
    """What the table shows."""
    hosts = report["hosts"]
    where = f"{report['ranks']} ranks on {hosts} host{'s' if hosts > 1 else ''}"
    return f"allreduce over {where}: median time, algorithm and bus bandwidth"


def allreduce_table(report: Mapping[str, Any]) -> Table:
    """A row a message size; time, algorithm and bus bandwidth a backend."""
    backends = {k: v["rows"] for k, v in report["backends"].items() if v["state"] == "ok"}
    table = Table(box=None, pad_edge=False)
    table.add_column("message", justify="right", no_wrap=True)
    for name in backends:
        table.add_column(SHORT[name], justify="right", no_wrap=True)
        table.add_column("alg", justify="right", no_wrap=True)
        table.add_column("bus", justify="right", no_wrap=True)
    for rows in zip(*backends.values(), strict=True):
        cells = [show_bytes(rows[0]["bytes"])]
        for row in rows:
            cells.append(show_seconds(row["seconds"]))
            cells += [show_rate(row[f"{kind}_gb_per_second"]) for kind in ("algorithm", "bus")]
        table.add_row(*cells)
    return table


def show_bytes(number: float) -> str:
    """Show bytes as 4 B, 64 KiB, 9.54 MiB."""
    units = ["B", "KiB", "MiB", "GiB"]
    while number >= 1024 and len(units) > 1:
        number /= 1024
        units.pop(0)
    return f"{number:.3g} {units[0]}"


def show_rate(gigabytes: float) -> str:
    """Show a bandwidth, given in GB/s, as 4 kB/s, 400 MB/s, 1.25 GB/s."""
    return _scaled(gigabytes, {1.0: "GB/s", 1e3: "MB/s", 1e6: "kB/s"})


def show_seconds(seconds: float) -> str:
    """Show a time as 5.7 µs, 1.08 ms, 2.1 s."""
    return _scaled(seconds, {1.0: "s", 1e3: "ms", 1e6: "µs"})


def _scaled(value: float, units: Mapping[float, str]) -> str:
    """Three digits that count, in the largest unit of which there is at least one."""
    factor = next((factor for factor in units if value * factor >= 0.9995), max(units))
    return f"{value * factor:.3g} {units[factor]}"
