"""What ``hvdtrain doctor`` does: all checks, one after the other, and ranks where ``-n`` asks.

It reads files and asks programs for their versions. MPI is started only on the ranks of ``-n``,
and other hosts are asked only inside a job whose hosts they are.
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
from hvdtrain.system.output.result import Report
from hvdtrain.system.output.text import plural
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import Command, run
from hvdtrain.workloads.data.image_folder import ImageFolder

log = logging.getLogger(__name__)

PROGRAMS = (
    ("hvdtrain.commands.doctor.rank_report",),
    ("hvdtrain.collectives", "--time", "--collectives=allreduce", "--seconds=0.3", "--json"),
)
TIMEOUTS = (120.0, 300.0)  # seconds that the ranks of each have


def commands(wanted: Request, environ: Mapping[str, str]) -> list[Command]:
    """Return what is run on the ranks of ``wanted``, one after the other: ``PROGRAMS``.

    Raises:
        UsageError: no MPI, or they do not fit on the hosts.
    """
    words = [[sys.executable, "-m", *program] for program in PROGRAMS]
    return [prepare(replace(wanted, words=one), environ).command for one in words]


def report(
    findings: Sequence[Finding],
    found: dict[str, Any] | None,
    times: dict[str, Any] | None,
    read: data.Measured | None,
) -> Report:
    """Return the table of findings, those of allreduce and of the data, and all as data."""
    parts = [findings_text(findings)]
    if times:
        parts.append(ranks.allreduce_text(times))
    if read and read.seconds:
        parts.append(data.data_text(read))
    parts.append(summary(findings))
    code = exit_code(findings)
    result = {
        "ok": code == 0,
        "errors": sum(1 for finding in findings if finding.state == ERROR),
        "warnings": sum(1 for finding in findings if finding.state == WARNING),
        "findings": [finding.as_dict() for finding in findings],
        "ranks": found,
        "allreduce": times,
        "data": read.as_dict() if read else None,
    }
    return Report("\n\n".join(parts), result, code)


def look(environ: Mapping[str, str], wanted: Request | None = None) -> Iterator[Finding]:
    """Yield all that can be seen without starting a rank.

    Args:
        environ: the environment.
        wanted: ranks that are meant to run; None: as many as the job has room for here.

    Raises:
        UsageError: the hosts that are wanted are not written as they should be.
    """
    batch, here = hosts.find_batch(environ), hosts.own_names()
    if wanted and (wanted.hosts or wanted.hostfile):
        batch = replace(batch, allocation=choose_hosts(wanted.hosts, wanted.hostfile, environ))
    libraries = software.present_extensions()
    tried = (loading.MPI4PY, loading.TORCHVISION, *libraries)
    with ThreadPoolExecutor() as pool:
        answers = pool.map(loading.try_loading, tried)
        found = toolchain.find(environ)
    mpi4py, torchvision, *extensions = answers
    loaded = dict(zip(libraries, extensions, strict=True))
    yield software.python_finding()
    yield from software.framework_findings(found)
    if version := software.torchvision_version(found):
        mended = mend_file(found.site_packages).is_file()
        yield software.torchvision_finding(version, torchvision, mended=mended)
    wheels = cache_root(environ) / "wheels"
    horovod, driver = software.find_horovod(found, wheels, loaded), gpus.find_driver()
    yield from software.horovod_findings(horovod)
    yield from software.gpu_tensor_findings(
        horovod, found, has_nccl=loading.has_nccl(), gpus=len(driver.gpus) if driver else 0
    )
    yield from mpi.mpi_findings(_mpi_facts(environ, mpi4py, loaded))
    yield from machine.tool_findings(found)
    yield machine.gpu_finding(driver, found)
    alone = wanted.ranks if wanted else 1
    local = hosts.slots_here(batch.allocation, here) if batch.allocation.hosts else alone
    yield from machine.resource_findings(find_resources(), local, environ, machine.has_fabric())
    known = machine.known_variables(found.site_packages / "horovod")
    yield machine.horovod_variables(environ, known)
    yield from hosts.batch_findings(batch, here)
    yield _other_hosts(batch, here)
    places = list(files.find_places(environ, Path.cwd()))
    yield from files.place_findings(places, len(batch.allocation.hosts))


def _mpi_facts(
    environ: Mapping[str, str], mpi4py: loading.Loaded, horovod: Mapping[str, loading.Loaded]
) -> mpi.MpiFacts:
    beside = Path(sys.executable).parent / "mpirun"
    launcher, trouble = None, ""
    try:
        launcher = find_mpi(environ)
    except HvdtrainError as error:
        trouble = str(error)
    return mpi.MpiFacts(launcher, trouble, str(beside) if beside.is_file() else "", mpi4py, horovod)


def _other_hosts(batch: hosts.BatchSystem, here: Collection[str]) -> Finding:
    """Ask the other hosts of the job; where this host is not of the job, they are none of ours."""
    names = [host.name for host in batch.allocation.hosts]
    inside = any(hosts.is_this_host(name, here) for name in names)
    others = [name for name in names if not hosts.is_this_host(name, here)] if inside else []
    return hosts.answer_finding(hosts.ask_hosts(others), batch.allocation.source)


def look_at_data(
    directory: Path, found: ImageFolder | Finding, ranks: int | None
) -> tuple[list[Finding], data.Measured | None]:
    """Measure how fast the data is read here.

    Args:
        directory: where it is.
        found: what ``data.find`` found there.
        ranks: that are meant to run; None: one. On a host with GPUs each has one of them.

    Returns:
        What was found, and what was measured; None where nothing could be.
    """
    read = found if isinstance(found, Finding) else data.measure(directory, found)
    if isinstance(read, Finding):
        return [read], None
    driver = gpus.find_driver()
    here = len(driver.gpus) if driver else 0
    cores = max(1, int(find_resources().usable_cores / (here or ranks or 1)))
    return list(data.data_findings(read, cores=cores, gpu=here > 0)), read


def try_ranks(
    wanted: Request, environ: Mapping[str, str]
) -> tuple[list[Finding], dict[str, Any] | None, dict[str, Any] | None]:
    """Start the ranks that were asked for, twice: to look around, and to time allreduce.

    Returns:
        What was found, the report of the ranks, and that of allreduce; None where there is none.
    """
    try:
        looking, timing = commands(wanted, environ)
    except HvdtrainError as error:
        return [Finding("ranks", ERROR, str(error))], None, None
    log.info("starting: %s", looking.show())
    started = plural(wanted.ranks, "rank")
    with terminal.working(f"{started} look around; then they time allreduce"):
        result = run(looking, timeout=TIMEOUTS[0])
    reports = [report for report in ranks.read_reports(result.output) if "announced" in report]
    if not result.ok or not reports:
        return [ranks.failed_start(result)], None, None
    findings = list(ranks.rank_findings(wanted.ranks, reports, hosts.own_names()))
    if any(finding.state == ERROR for finding in findings):
        return findings, reports[0], None
    log.info("timing allreduce: %s", timing.show())
    with terminal.working(f"{started} time allreduce, by each back end"):
        result = run(timing, timeout=TIMEOUTS[1])
    times = [report for report in ranks.read_reports(result.output) if "backends" in report]
    if not result.ok or not times:
        return [*findings, ranks.failed_start(result)], reports[0], None
    return [*findings, *ranks.allreduce_findings(times[0])], reports[0], times[0]
