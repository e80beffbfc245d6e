"""All checks of ``hvdtrain doctor``, including those on the ranks of ``-n``.

They read files and run programs for their versions. MPI is started only on the ranks of ``-n``,
and other hosts are contacted only inside a job that includes them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvdtrain.commands.doctor.checks import (
    data,
    files,
    hosts,
    loading,
    machine,
    mpi,
    ranks,
    software,
)
from hvdtrain.commands.doctor.findings import (
    ERROR,
    WARNING,
    Finding,
    exit_code,
    findings_text,
    summary,
)
from hvdtrain.commands.install_horovod.installed import mend_file
from hvdtrain.commands.install_horovod.wheel_cache import cache_root
from hvdtrain.commands.launch.mpirun import find_mpi
from hvdtrain.commands.launch.prepare import Request, choose_hosts, prepare
from hvdtrain.errors import HvdtrainError
from hvdtrain.system.machine import gpus, toolchain
from hvdtrain.system.machine.limits import find_resources
from hvdtrain.system.output import Report
from hvdtrain.system.output.text import plural
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import Command, run
from hvdtrain.workloads.data.image_folder import ImageFolder

log = logging.getLogger(__name__)

PROGRAMS = (
    ("hvdtrain.commands.doctor.rank_report",),
    ("hvdtrain.collectives", "--time", "--collectives=allreduce", "--seconds=0.3", "--json"),
)
TIMEOUTS = (120.0, 300.0)  # seconds, of each program


def commands(request: Request, environ: Mapping[str, str]) -> list[Command]:
    """Return the commands that run each of ``PROGRAMS`` on the requested ranks.

    Raises:
        UsageError: no MPI, or more ranks than slots.
    """
    programs = [[sys.executable, "-m", *program] for program in PROGRAMS]
    return [prepare(replace(request, words=program), environ).command for program in programs]


def report(
    findings: Sequence[Finding],
    rank_report: dict[str, Any] | None,
    times: dict[str, Any] | None,
    measured: data.Measured | None,
) -> Report:
    """Return the tables of findings, allreduce times and data, and the same as JSON data."""
    parts = [findings_text(findings)]
    if times:
        parts.append(ranks.allreduce_text(times))
    if measured and measured.seconds:
        parts.append(data.data_text(measured))
    parts.append(summary(findings))
    code = exit_code(findings)
    result = {
        "ok": code == 0,
        "errors": sum(1 for finding in findings if finding.state == ERROR),
        "warnings": sum(1 for finding in findings if finding.state == WARNING),
        "findings": [finding.as_dict() for finding in findings],
        "ranks": rank_report,
        "allreduce": times,
        "data": measured.as_dict() if measured else None,
    }
    return Report("\n\n".join(parts), result, code)


def check_host(environ: Mapping[str, str], request: Request | None = None) -> Iterator[Finding]:
    """Yield the findings of all checks that start no ranks.

    Args:
        environ: the environment.
        request: planned ranks; None: one per slot of the job on this host.

    Raises:
        UsageError: the requested hosts are malformed.
    """
    batch, local_names = hosts.find_batch(environ), hosts.local_names()
    if request and (request.hosts or request.hostfile):
        batch = replace(batch, allocation=choose_hosts(request.hosts, request.hostfile, environ))
    libraries = software.present_extensions()
    with ThreadPoolExecutor() as pool:
        loads = pool.map(loading.try_loading, (loading.MPI4PY, loading.TORCHVISION, *libraries))
        tools = toolchain.find(environ)
    mpi4py, torchvision, *extensions = loads
    loaded = dict(zip(libraries, extensions, strict=True))
    yield software.python_finding()
    yield from software.framework_findings(tools)
    if version := software.torchvision_version(tools):
        mended = mend_file(tools.site_packages).is_file()
        yield software.torchvision_finding(version, torchvision, mended=mended)
    wheels = cache_root(environ) / "wheels"
    horovod, driver = software.find_horovod(tools, wheels, loaded), gpus.find_driver()
    yield from software.horovod_findings(horovod)
    yield from software.gpu_tensor_findings(
        horovod, tools, has_nccl=loading.has_nccl(), gpus=len(driver.gpus) if driver else 0
    )
    yield from mpi.mpi_findings(_mpi_facts(environ, mpi4py, loaded))
    yield from machine.tool_findings(tools)
    yield machine.gpu_finding(driver, tools)
    local_ranks = request.ranks if request else 1
    if batch.allocation.hosts:
        local_ranks = hosts.local_slots(batch.allocation, local_names)
    yield from machine.resource_findings(
        find_resources(), local_ranks, environ, machine.has_fabric()
    )
    known = machine.known_variables(tools.site_packages / "horovod")
    yield machine.horovod_variables(environ, known)
    yield from hosts.batch_findings(batch, local_names)
    yield _other_hosts(batch, local_names)
    directories = list(files.find_directories(environ, Path.cwd()))
    yield from files.directory_findings(directories, len(batch.allocation.hosts))


def _mpi_facts(
    environ: Mapping[str, str], mpi4py: loading.Loaded, horovod: Mapping[str, loading.Loaded]
) -> mpi.MpiFacts:
    mpirun = Path(sys.executable).parent / "mpirun"
    launcher, problem = None, ""
    try:
        launcher = find_mpi(environ)
    except HvdtrainError as error:
        problem = str(error)
    return mpi.MpiFacts(launcher, problem, str(mpirun) if mpirun.is_file() else "", mpi4py, horovod)


def _other_hosts(batch: hosts.BatchSystem, local_names: Collection[str]) -> Finding:
    """Probe the other hosts of the job, if this host belongs to it."""
    names = [host.name for host in batch.allocation.hosts]
    others = [name for name in names if not hosts.is_this_host(name, local_names)]
    if len(others) == len(names):
        others = []
    return hosts.answer_finding(hosts.probe_hosts(others), batch.allocation.source)


def check_data(
    directory: Path, images: ImageFolder | Finding, ranks: int | None
) -> tuple[list[Finding], data.Measured | None]:
    """Measure how fast the data is read on this host.

    Args:
        directory: the dataset.
        images: the result of ``data.find``.
        ranks: number of planned ranks; None: one. On a host with GPUs: one rank per GPU.

    Returns:
        The findings, and the measurements; None if there are none.
    """
    measured = images if isinstance(images, Finding) else data.measure(directory, images)
    if isinstance(measured, Finding):
        return [measured], None
    driver = gpus.find_driver()
    gpu_count = len(driver.gpus) if driver else 0
    cores = max(1, int(find_resources().usable_cores / (gpu_count or ranks or 1)))
    return list(data.data_findings(measured, cores=cores, gpu=gpu_count > 0)), measured


def check_ranks(
    request: Request, environ: Mapping[str, str]
) -> tuple[list[Finding], dict[str, Any] | None, dict[str, Any] | None]:
    """Start the requested ranks twice: to check them, and to time allreduce.

    Returns:
        The findings, the report of the ranks, and that of allreduce; None if there is none.
    """
    try:
        reporting, timing = commands(request, environ)
    except HvdtrainError as error:
        return [Finding("ranks", ERROR, str(error))], None, None
    log.info("starting: %s", reporting.show())
    started = plural(request.ranks, "rank")
    with terminal.working(f"checking {started}; timing allreduce follows"):
        result = run(reporting, timeout=TIMEOUTS[0])
    reports = [report for report in ranks.read_reports(result.output) if "announced" in report]
    if not result.ok or not reports:
        return [ranks.failed_start(result)], None, None
    findings = list(ranks.rank_findings(request.ranks, reports, hosts.local_names()))
    if any(finding.state == ERROR for finding in findings):
        return findings, reports[0], None
    log.info("timing allreduce: %s", timing.show())
    with terminal.working(f"timing allreduce on {started}, with each back end"):
        result = run(timing, timeout=TIMEOUTS[1])
    times = [report for report in ranks.read_reports(result.output) if "backends" in report]
    if not result.ok or not times:
        return [*findings, ranks.failed_start(result)], reports[0], None
    return [*findings, *ranks.allreduce_findings(times[0])], reports[0], times[0]
