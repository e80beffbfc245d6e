"""All checks of ``hvdtrain doctor``, including those on the ranks of ``-n``.

They read files and run programs for their versions. MPI is started only on the ranks of ``-n``,
and other hosts are contacted only inside a job that includes them.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path

from hvdtrain.commands.doctor.checks import files, hosts, loading, machine, ranks, software
from hvdtrain.commands.doctor.findings import ERROR, WARNING, Finding, count, findings_text, summary
from hvdtrain.commands.doctor.rank_report import WorldReport
from hvdtrain.commands.install_horovod import toolchain
from hvdtrain.commands.install_horovod.build import mend_file
from hvdtrain.commands.launch.prepare import Request, choose_hosts, prepare
from hvdtrain.config.strategies import HOROVOD
from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, HvdtrainError
from hvdtrain.system.files import cache_root
from hvdtrain.system.machine import gpus, network
from hvdtrain.system.machine.frameworks import versions
from hvdtrain.system.machine.limits import find_resources
from hvdtrain.system.machine.network import has_fabric
from hvdtrain.system.output import Report
from hvdtrain.system.output.text import plural
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import Command, CommandResult, run

log = logging.getLogger(__name__)

PROGRAMS = (
    ("hvdtrain.commands.doctor.rank_report",),
    ("hvdtrain.collectives", "--time", "--collectives=allreduce", "--seconds=0.3", "--json"),
)
TIMEOUTS = (120.0, 300.0)  # seconds, of each program


def commands(
    request: Request, environ: Mapping[str, str], files: Sequence[Path] = ()
) -> list[Command]:
    """Return the commands that run each of ``PROGRAMS`` on the requested ranks.

    The output of rank 0 is written to ``files`` (``to_file``); without them it is forwarded.

    Raises:
        UsageError: no MPI, or more ranks than slots.
    """
    prefixes = [("hvdtrain.commands.doctor.to_file", str(file)) for file in files]
    programs = [
        [sys.executable, "-m", *prefix, *program]
        for prefix, program in zip_longest(prefixes, PROGRAMS, fillvalue=())
    ]
    return [prepare(replace(request, words=program), environ).command for program in programs]


def report(
    findings: Sequence[Finding],
    world: WorldReport | None,
    times: ranks.AllreduceTimes | None,
) -> Report:
    """Return the tables of findings and allreduce times, and the same as JSON data."""
    parts = [findings_text(findings)]
    if times:
        parts.append(ranks.allreduce_text(times))
    parts.append(summary(findings))
    errors = count(findings, ERROR)
    result = {
        "ok": not errors,
        "errors": errors,
        "warnings": count(findings, WARNING),
        "findings": [asdict(finding) for finding in findings],
        "ranks": asdict(world) if world else None,
        "allreduce": asdict(times) if times else None,
    }
    return Report("\n\n".join(parts), result, EXIT_FAILURE if errors else EXIT_OK)


def check_host(environ: Mapping[str, str], request: Request | None = None) -> Iterator[Finding]:
    """Yield the findings of all checks that start no ranks.

    Without planned ranks, one per slot of the job on this host is assumed.

    Raises:
        UsageError: the requested hosts are malformed.
    """
    batch, local_names = _batch(environ, request), network.local_names()
    libraries = [framework for framework in HOROVOD.requires if loading.extension(framework)]
    with ThreadPoolExecutor() as pool:
        loads = pool.map(loading.try_loading, (loading.MPI4PY, loading.TORCHVISION, *libraries))
        tools = toolchain.find(environ)
    mpi4py, torchvision, *extensions = loads
    loaded = dict(zip(libraries, extensions, strict=True))
    yield software.python_finding()
    yield from software.framework_findings(tools)
    if tools.torch and (version := versions("torchvision").get("torchvision")):
        mended = mend_file(tools.site_packages).is_file()
        yield software.torchvision_finding(version, torchvision, mended=mended)
    wheels = cache_root(environ) / "wheels"
    horovod, driver = software.find_horovod(tools, wheels, loaded), gpus.find_driver()
    yield from software.horovod_findings(horovod)
    yield from software.gpu_tensor_findings(
        horovod, tools, has_nccl=loading.has_nccl(), gpus=len(driver.gpus) if driver else 0
    )
    yield from software.mpi_findings(software.find_mpis(environ, mpi4py, loaded))
    yield from machine.tool_findings(tools)
    yield machine.gpu_finding(driver, tools)
    local_ranks = hosts.ranks_here(request, batch.allocation, local_names)
    yield from machine.resource_findings(find_resources(), local_ranks, environ, has_fabric())
    known = machine.known_variables(tools.site_packages / "horovod")
    yield machine.horovod_variables(environ, known)
    yield from hosts.batch_findings(batch, local_names)
    yield hosts.other_hosts(batch.allocation, local_names)
    directories = list(files.find_directories(environ, Path.cwd()))
    yield from files.directory_findings(directories, len(batch.allocation.hosts))


def _batch(environ: Mapping[str, str], request: Request | None) -> hosts.BatchSystem:
    """Return the batch system, with the hosts that ``request`` names instead of those of the job.

    Raises:
        UsageError: the requested hosts are malformed.
    """
    batch = hosts.find_batch(environ)
    if request is None or not (request.hosts or request.hostfile):
        return batch
    return replace(batch, allocation=choose_hosts(request.hosts, request.hostfile, environ))


def check_ranks(
    request: Request, environ: Mapping[str, str]
) -> tuple[list[Finding], WorldReport | None, ranks.AllreduceTimes | None]:
    """Start the requested ranks twice, to check them and to time allreduce; return both reports."""
    with tempfile.TemporaryDirectory(prefix="hvdtrain-doctor-") as folder:
        files = [Path(folder, name) for name in ("ranks", "allreduce")]
        try:
            reporting, timing = commands(request, environ, files)
        except HvdtrainError as error:
            return [Finding("ranks", ERROR, str(error))], None, None
        log.info("starting: %s", reporting.show())
        started = plural(request.ranks, "rank")
        with terminal.working(f"checking {started}; timing allreduce follows"):
            result = _run(reporting, TIMEOUTS[0], files[0])
        reports = ranks.read_reports(result.output, WorldReport)
        if not result.ok or not reports:
            return [ranks.failed_start(result)], None, None
        findings = list(ranks.rank_findings(request.ranks, reports, network.local_names()))
        if any(finding.state == ERROR for finding in findings):
            return findings, reports[0], None
        log.info("timing allreduce: %s", timing.show())
        with terminal.working(f"timing allreduce on {started}, with each back end"):
            result = _run(timing, TIMEOUTS[1], files[1])
    times = ranks.read_reports(result.output, ranks.AllreduceTimes)
    if not result.ok or not times:
        return [*findings, ranks.failed_start(result)], reports[0], None
    return [*findings, *ranks.allreduce_findings(times[0])], reports[0], times[0]


def _run(command: Command, timeout: float, file: Path) -> CommandResult:
    """Return the result of ``command``, including the output of rank 0 in ``file``."""
    result = run(command, timeout=timeout)
    text = file.read_text(errors="replace") if file.is_file() else ""
    return replace(result, output=text + result.output)
