"""Submission of a job: check it, write its script, submit it, and follow it if requested."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.commands.submit import chain
from hvdtrain.commands.submit.arguments import Request, make_job, note_walltime
from hvdtrain.commands.submit.dialect import ENDED, GONE, Dialect, Local, State
from hvdtrain.commands.submit.follow import SubmittedJob, follow, query_state
from hvdtrain.commands.submit.job import Job
from hvdtrain.commands.submit.pbs import Pbs
from hvdtrain.commands.submit.script import script_text
from hvdtrain.commands.submit.site import load_site
from hvdtrain.commands.submit.slurm import Slurm
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.output import Report
from hvdtrain.system.runtime.command import NOT_FOUND, run

log = logging.getLogger(__name__)

TIMEOUT = 60.0  # seconds for qsub or sbatch


def submit(request: Request, previous: str | None = None) -> Report:
    """Write the job script of ``request``, and submit it unless it is a dry run.

    Args:
        request: the options.
        previous: job whose end, with any exit code, to wait for.

    Raises:
        UsageError: an option is wrong.
        HvdtrainError: the batch system refused the job, or no longer answers.
    """
    site = load_site(request.site, os.environ)
    dialect = choose_dialect(request.scheduler or site.scheduler, os.environ)
    job = make_job(request, site, dialect)
    if not dialect.in_job and (request.follow or request.chain or request.array):
        raise UsageError("--follow, --chain and --array require a batch system")
    if note := note_walltime(job):
        log.warning("%s", note)
    if job.after and not request.dry_run:
        _check_after(dialect, job.after)
    files = _free_files(request.logs, job.name, dialect.suffix, reserve=not request.dry_run)
    exit_file = str(files.exit) if request.follow else ""
    text = script_text(job, dialect, site, str(files.chain), exit_file)
    try:
        command = dialect.submit(str(files.script), str(files.log()), array=job.array, after=None)
    except UsageError:
        if not request.dry_run:
            files.script.unlink()  # created empty, to reserve the name
        raise
    if request.dry_run:
        log.info("# %s", command.show())
        return Report(text[:-1], {"ok": True, "script": text, "submit": list(command.argv)})
    files.script.write_bytes(os.fsencode(text))
    if not dialect.in_job:
        return Report(command.show(), {"ok": True, "script": str(files.script)})
    return _report(request, dialect, files, _submit(job, dialect, files, previous))


def _report(
    request: Request, dialect: Dialect, files: JobFiles, jobs: list[SubmittedJob]
) -> Report:
    """Report the submitted jobs, and follow them if requested."""
    ids = [job.id for job in jobs]
    logs = [str(path) for job in jobs for path in job.logs.values()]
    log.info("script: %s\nlog:    %s", files.script, " ... ".join(logs[:: len(logs) - 1 or 1]))
    # The last first: PBS also deletes jobs that wait for a deleted one.
    log.info("cancel: %s", dialect.delete(ids[::-1]).show())
    data = {"ok": True, "jobs": ids, "script": str(files.script), "logs": logs}
    if not request.follow:
        return Report("\n".join(ids), data)
    out = sys.stderr if request.json else sys.stdout
    end = follow(dialect, jobs, files.exit, files.chain if request.chain else None, out)
    data |= {"ok": end.code == 0, "state": end.state, "exit_code": end.code}
    if end.tasks:
        data["tasks"] = {number: _as_json(task) for number, task in end.tasks.items()}
    return Report("", data, 1 if end.code is None else end.code)


def _as_json(task: State) -> dict[str, Any]:
    logs = [str(path) for path in task.logs]
    return {"state": task.detail, "exit_code": task.exit_code, "log": logs[0] if logs else None}


class JobFiles:
    """The files of a job in one directory: ``DIR/NAME-3.pbs``, ``NAME-3.log`` and so on."""

    def __init__(self, directory: Path, stem: str, suffix: str) -> None:
        self.directory, self.stem = directory, stem
        self.script = directory / (stem + suffix)  # the submitted script
        self.chain = directory / f"{stem}.chain"  # for the communication of the jobs of a chain
        self.exit = (
            directory / f"{stem}.exit"
        )  # exit code of a job, without the suffix of its number

    def log(self, link: int = 0) -> Path:
        """Return the path of the log of the job, or of job ``link`` (from 0) of a chain."""
        return self.directory / (f"{self.stem}.{link + 1}.log" if link else f"{self.stem}.log")


def _free_files(directory: Path, name: str, suffix: str, *, reserve: bool) -> JobFiles:
    """Return the first free names; ``reserve`` creates the script."""
    for number in itertools.count(1):
        stem = f"{name}-{number}"
        if any(directory.glob(f"{stem}.*")):
            continue
        files = JobFiles(directory, stem, suffix)
        if not reserve:
            break
        try:
            directory.mkdir(parents=True, exist_ok=True)
            files.script.touch(exist_ok=False)
            break
        except FileExistsError:  # another submit was faster
            if not directory.is_dir():
                raise UsageError(f"--logs {directory}: not a directory") from None
        except OSError as error:
            raise UsageError(f"--logs {directory}: {error.strerror}") from error
    return files


def choose_dialect(name: str | None, environ: Mapping[str, str]) -> Dialect:
    """Return the batch system ``name``; None: the one whose commands are on the PATH.

    Raises:
        UsageError: there is none.
    """
    path = environ.get("PATH")
    qsub = shutil.which("qsub", path=path)
    if name is None:
        name = "slurm" if shutil.which("sbatch", path=path) else "pbs" if qsub else None
    if name is None:
        raise UsageError(
            "neither sbatch nor qsub is on the PATH: run this on a login node, or use --scheduler "
            "pbs, slurm, or none for a script for bash"
        )
    if name == "pbs":
        return Pbs(wraps_slurm=qsub is not None and b"Slurm" in Path(qsub).read_bytes()[:4096])
    return Slurm() if name == "slurm" else Local()


def _submit(
    job: Job, dialect: Dialect, files: JobFiles, previous: str | None
) -> list[SubmittedJob]:
    """Submit the script, for a chain several times.

    Raises:
        HvdtrainError: the first job was refused.
    """
    jobs: list[SubmittedJob] = []
    for _ in range(max(1, job.chain)):
        path = str(files.log(len(jobs)))
        command = dialect.submit(str(files.script), path, array=job.array, after=previous)
        result = run(command, timeout=TIMEOUT)
        job_id = dialect.read_id(result.output) if result.ok else None
        if job_id is None:
            message = " ".join(result.output.split())[-600:] or f"exit code {result.exit_code}"
            if jobs:  # many sites limit the jobs of a user
                log.warning("only %d of %d jobs were accepted: %s", len(jobs), job.chain, message)
                break
            hint = "; is this a login node?" if result.exit_code == NOT_FOUND else ""
            raise HvdtrainError(f"{command.argv[0]} refused {files.script}: {message}{hint}")
        numbers = job.tasks or [chain.number(job_id)]
        paths = [dialect.log_path(path, job, job_id, task) for task in job.tasks or [""]]
        previous = job_id
        jobs.append(SubmittedJob(job_id, dict(zip(numbers, paths, strict=True))))
        if job.chain:
            chain.write(files.chain, event="link", job=job_id)
    return jobs


def _check_after(dialect: Dialect, job: str) -> None:
    """Raise an error if ``job`` cannot complete: PBS silently drops jobs that depend on it.

    Raises:
        UsageError: there is no such job, or it has failed.
    """
    state, _ = query_state(dialect, job)
    if state and state.phase == GONE:
        raise UsageError(
            f"--after {job}: {dialect.name} has no such job (any more); if it has completed, omit "
            "the option"
        )
    if state and state.phase == ENDED and state.exit_code != 0:
        code = "unknown" if state.exit_code is None else state.exit_code
        end = f"ended with exit code {code}" if state.ran else f"was {state.detail}"
        raise UsageError(f"--after {job}: it {end}, but must complete successfully")
