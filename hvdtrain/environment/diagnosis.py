"""What ``hvdtrain doctor`` does: all checks, one after the other, and ranks where ``-n`` asks.

It reads files and asks programs for their versions. MPI is started only on the ranks of ``-n``,
and other hosts are asked only inside a job whose hosts they are.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.environment import gpus, toolchain
from hvdtrain.environment.checks import files, hosts, loading, machine, mpi, software
from hvdtrain.environment.checks.bandwidth import (
    allreduce_findings,
    allreduce_table,
    allreduce_title,
)
from hvdtrain.environment.checks.ranks import failed_start, rank_findings, read_reports
from hvdtrain.environment.findings import (
    ERROR,
    WARNING,
    Finding,
    exit_code,
    findings_table,
    rendered,
    summary,
)
from hvdtrain.environment.installed import mend_file
from hvdtrain.environment.resources import find_resources
from hvdtrain.environment.wheel_cache import cache_root
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch import terminal
from hvdtrain.launch.hosts import Allocation, parse_hosts
from hvdtrain.launch.launch import command
from hvdtrain.launch.mpirun import find_mpi
from hvdtrain.launch.run import Command, run
from hvdtrain.verb import Report

log = logging.getLogger(__name__)

PROGRAMS = ("hvdtrain.environment.rank_report", "hvdtrain.measure.allreduce")
TIMEOUTS = (120.0, 300.0)  # seconds that the ranks of each have


@dataclass(frozen=True)
class Ranks:
    """The ranks that ``-n`` asks for."""

    number: int
    """How many, over all hosts."""
    ppn: int | None = None
    """On each host."""
    hosts: str | None = None
    """Where, instead of on the job's."""

    def commands(self, environ: Mapping[str, str]) -> list[Command]:
        """What is run for them, one after the other: ``PROGRAMS``.

        Raises:
            UsageError: no MPI, or they do not fit on the hosts.
        """
        return [
            command(
                self.number,
                [sys.executable, "-m", program],
                ppn=self.ppn,
                hosts=self.hosts,
                environ=environ,
            )
            for program in PROGRAMS
        ]


def report(
    findings: Sequence[Finding], ranks: dict[str, Any] | None, times: dict[str, Any] | None
) -> Report:
    """What the verb hands back: the table of findings, that of allreduce, and both as data."""
    parts: list[Any] = [findings_table(findings)]
    if times:
        parts += ["", allreduce_title(times), allreduce_table(times)]
    parts += ["", summary(findings)]
    code = exit_code(findings)
    data = {
        "ok": code == 0,
        "errors": sum(1 for finding in findings if finding.state == ERROR),
        "warnings": sum(1 for finding in findings if finding.state == WARNING),
        "findings": [finding.as_dict() for finding in findings],
        "ranks": ranks,
        "allreduce": times,
    }
    return Report(rendered(*parts, columns=terminal.columns()), data, code)


def look(environ: Mapping[str, str], wanted: Ranks | None = None) -> Iterator[Finding]:
    """All that can be seen without starting a rank.

    Args:
        environ: the environment.
        wanted: ranks that are meant to run; None: as many as the job has room for here.

    Raises:
        UsageError: the hosts that are wanted are not written as they should be.
    """
    batch, here = hosts.find_batch(environ), hosts.own_names()
    if wanted and wanted.hosts:
        batch = replace(batch, allocation=Allocation("--hosts", parse_hosts(wanted.hosts)))
    libraries = software.present_extensions()
    with ThreadPoolExecutor() as pool:
        tried = [loading.MPI4PY, loading.TORCHVISION, *libraries]
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
    horovod = software.find_horovod(found, wheels, loaded)
    yield from software.horovod_findings(horovod)
    yield from mpi.mpi_findings(_mpi_facts(environ, mpi4py, loaded))
    yield from machine.tool_findings(found)
    yield machine.gpu_finding(gpus.find_driver(), found, loading.has_nccl())
    alone = wanted.number if wanted else 1
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
    trouble, dialect, program, version = "", "", "", ""
    try:
        launcher = find_mpi(environ)
        dialect, program, version = launcher.dialect, launcher.program, launcher.version
    except HvdtrainError as error:
        trouble = str(error)
    return mpi.MpiFacts(
        launcher=program,
        launcher_dialect=dialect,
        launcher_version=version,
        trouble=trouble,
        beside_python=str(beside) if beside.is_file() else "",
        mpi4py=mpi4py,
        horovod=horovod,
    )


def _other_hosts(batch: hosts.Batch, here: Collection[str]) -> Finding:
    """Ask the other hosts of the job; where this host is not of the job, they are none of ours."""
    names = [host.name for host in batch.allocation.hosts]
    inside = any(hosts.is_this_host(name, here) for name in names)
    others = [name for name in names if not hosts.is_this_host(name, here)] if inside else []
    return hosts.answer_finding(hosts.ask_hosts(others), batch.allocation.source)


def try_ranks(
    wanted: Ranks, environ: Mapping[str, str]
) -> tuple[list[Finding], dict[str, Any] | None, dict[str, Any] | None]:
    """Start the ranks that were asked for, twice: to look around, and to time allreduce.

    Returns:
        What was found, the report of the ranks, and that of allreduce; None where there is none.
    """
    try:
        looking, timing = wanted.commands(environ)
    except HvdtrainError as error:
        return [Finding("ranks", ERROR, str(error))], None, None
    log.info("starting: %s", looking.show())
    result = run(looking, timeout=TIMEOUTS[0])
    reports = [report for report in read_reports(result.output) if "announced" in report]
    if not result.ok or not reports:
        return [failed_start(result)], None, None
    findings = list(rank_findings(wanted.number, reports, hosts.own_names()))
    if any(finding.state == ERROR for finding in findings):
        return findings, reports[0], None
    log.info("timing allreduce: %s", timing.show())
    result = run(timing, timeout=TIMEOUTS[1])
    times = [report for report in read_reports(result.output) if "backends" in report]
    if not result.ok or not times:
        return [*findings, failed_start(result)], reports[0], None
    return [*findings, *allreduce_findings(times[0])], reports[0], times[0]
