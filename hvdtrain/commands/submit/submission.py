"""Submission of a job: check it, write its script, submit it, and follow it if requested."""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain.commands.launch.prepare import checkpoint_dir
from hvdtrain.commands.submit import chain
from hvdtrain.commands.submit.dialect import ENDED, GONE, Dialect, Local
from hvdtrain.commands.submit.follow import SubmittedJob, follow, query_state
from hvdtrain.commands.submit.job import DIRECTIVE, Job, check_job
from hvdtrain.commands.submit.pbs import Pbs
from hvdtrain.commands.submit.script import script_text
from hvdtrain.commands.submit.site import Site, check_limits, load_site
from hvdtrain.commands.submit.slurm import Slurm
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.output import Report
from hvdtrain.system.runtime.command import NOT_FOUND, TIMED_OUT, Command, run
from hvdtrain.system.runtime.walltime import show_clock

log = logging.getLogger(__name__)

TIMEOUT = 60.0  # seconds for qsub or sbatch
SHORT_NAME = 15  # characters of a generated name: the length that every batch system shows
SHORT_WALLTIME = (
    120  # seconds of walltime that leave less than half for training; see note_walltime
)


def submit(job: Job, previous: str | None = None) -> Report:
    """Write the script of ``job``, and submit it unless it is a dry run.

    Args:
        job: the options, as typed.
        previous: job whose end, with any exit code, to wait for.

    Raises:
        UsageError: an option is wrong.
        HvdtrainError: the batch system refused the job, or no longer answers.
    """
    site = load_site(job.site, os.environ)
    dialect = choose_dialect(job.scheduler or site.scheduler, os.environ)
    job = complete(job, site, dialect)
    if not dialect.in_job and (job.follow or job.chain or job.array):
        raise UsageError("--follow, --chain and --array require a batch system")
    if note := note_walltime(job):
        log.warning("%s", note)
    if dialect.inherits:
        _warn_of_environment(job, os.environ)
    if job.after and not job.dry_run:
        _check_after(dialect, job.after)
    files = _free_files(job.logs, job.name or "job", dialect.suffix, reserve=not job.dry_run)
    exit_file = str(files.exit) if job.follow else ""
    # Absolute, as a line of --setup or of the site may change the directory.
    text = script_text(job, dialect, site, str(files.chain.absolute()), exit_file)
    try:
        command = dialect.submit(str(files.script), str(files.log()), array=job.array, waits=None)
    except UsageError:
        if not job.dry_run:
            files.script.unlink()  # created empty, to reserve the name
        raise
    if job.dry_run:
        log.info("# %s", command.show())
        return Report(text[:-1], {"ok": True, "script": text, "submit": list(command.argv)})
    files.write(text)
    if not dialect.in_job:
        return Report(command.show(), {"ok": True, "script": str(files.script)})
    return _report(job, dialect, files, _submit(job, dialect, files, previous))


def _report(job: Job, dialect: Dialect, files: JobFiles, jobs: list[SubmittedJob]) -> Report:
    """Report the submitted jobs, and follow them if requested."""
    ids = [link.id for link in jobs]
    logs = [str(path) for link in jobs for path in link.logs.values()]
    log.info("script: %s\nlog:    %s", files.script, " ... ".join(logs[:: len(logs) - 1 or 1]))
    # The last first: PBS also deletes jobs that wait for a deleted one.
    log.info("cancel: %s", dialect.delete(ids[::-1]).show())
    running = "JOB" if job.chain else ids[0]
    log.info("stop:   %s  (a training saves first)", Command((*dialect.stop, running)).show())
    data = {"ok": True, "jobs": ids, "script": str(files.script), "logs": logs}
    if not job.follow:
        return Report("\n".join(ids), data)
    out = sys.stderr if job.json else sys.stdout
    end = follow(dialect, jobs, files.exit, files.chain if job.chain else None, out)
    data |= {"ok": end.exit_code == 0, "state": end.detail, "exit_code": end.exit_code}
    if end.tasks:
        data["tasks"] = {
            number: {
                "state": task.detail,
                "exit_code": task.exit_code,
                "log": str(task.logs[0]) if task.logs else None,
            }
            for number, task in end.tasks.items()
        }
    return Report("", data, 1 if end.exit_code is None else end.exit_code)


class JobFiles:
    """The files of a job in one directory: ``DIR/NAME-3.pbs``, ``NAME-3.log`` and so on."""

    def __init__(self, directory: Path, stem: str, suffix: str) -> None:
        self.directory, self.stem = directory, stem
        self.script = directory / (stem + suffix)  # the submitted script
        self.chain = directory / f"{stem}.chain"  # for the communication of the jobs of a chain
        # For the exit code of a job, without the suffix of its number:
        self.exit = directory / f"{stem}.exit"

    def write(self, text: str) -> None:
        """Write the script; raise ``UsageError`` if that fails."""
        try:
            self.script.write_bytes(os.fsencode(text))
        except OSError as error:
            self.script.unlink()
            raise UsageError(f"--logs {self.directory}: {error.strerror}") from error

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


def _warn_of_environment(job: Job, environ: Mapping[str, str]) -> None:
    """Warn of variables that replace a default of the script, as qsub -v or --export do."""
    for name, default in (*job.var, ("HVDTRAIN_ENV", job.env)):
        if environ.get(name, default or "") not in ("", default):
            option = "--env" if name == "HVDTRAIN_ENV" else f"--var {name}"
            log.warning(
                "%s=%s of the environment replaces %s in the job: unset it if you do not want that",
                name,
                environ[name],
                option,
            )


def _submit(
    job: Job, dialect: Dialect, files: JobFiles, previous: str | None
) -> list[SubmittedJob]:
    """Submit the script, for a chain several times; raise an error if the first is refused."""
    jobs: list[SubmittedJob] = []
    limit = job.chain_limit if job.chain else 1
    try:
        while len(jobs) < limit:
            jobs.append(_submit_one(job, dialect, files, len(jobs), previous))
            previous = jobs[-1].id
            if job.chain:
                chain.write(files.chain, event="link", job=previous)
    except (HvdtrainError, OSError) as error:
        if not jobs:
            raise
        # Many sites limit the jobs of a user; or the disk is full.
        log.warning("only %d of %d jobs were accepted: %s", len(jobs), limit, error)
    except KeyboardInterrupt:
        ids = [link.id for link in jobs]
        cancel = f"; cancel: {dialect.delete(ids[::-1]).show()}" if ids else ""
        counts = f"{len(ids)} of {limit} jobs were accepted"
        log.warning("%s, and one more may have been: see `%s`%s", counts, dialect.listing, cancel)
        raise
    return jobs


def _submit_one(
    job: Job, dialect: Dialect, files: JobFiles, link: int, previous: str | None
) -> SubmittedJob:
    """Submit the script once, as job ``link`` (from 0) of a chain.

    Raises:
        HvdtrainError: it was refused, or the batch system did not answer.
    """
    path = str(files.log(link))
    waits = f"afterany:{previous}" if previous else None
    if waits and job.after:  # in the script, too, where it does not count then
        waits += f",afterok:{job.after}"
    command = dialect.submit(str(files.script), path, array=job.array, waits=waits)
    result = run(command, timeout=TIMEOUT)
    job_id = dialect.read_id(result.output) if result.ok else None
    if result.exit_code == TIMED_OUT:
        raise HvdtrainError(
            f"{command.argv[0]} did not answer within {TIMEOUT:.0f} s: {files.script} may have "
            f"been submitted; see `{dialect.listing}` before you submit it again"
        )
    if job_id is None:
        message = " ".join(result.output.split())[-600:] or f"exit code {result.exit_code}"
        hint = "; is this a login node?" if result.exit_code == NOT_FOUND else ""
        raise HvdtrainError(f"{command.argv[0]} refused {files.script}: {message}{hint}")
    numbers = job.tasks or [chain.number(job_id)]
    paths = [dialect.log_path(path, job, job_id, task) for task in job.tasks or [""]]
    return SubmittedJob(job_id, dict(zip(numbers, paths, strict=True)))


def _check_after(dialect: Dialect, job: str) -> None:
    """Raise ``UsageError`` if ``job`` has failed or is unknown: PBS drops jobs that need it."""
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


def complete(job: Job, site: Site, dialect: Dialect) -> Job:
    """Return ``job`` with the defaults of the site and of the command, checked.

    Raises:
        UsageError: an option is invalid.
    """
    _refuse_job_script(job.command)
    _check_walltime(job, dialect)
    gpus = site.gpus_per_node if job.gpus_per_node is None else job.gpus_per_node
    name = job.name or default_name(job.command)
    completed = replace(
        job,
        ppn=job.ppn or gpus or 1,
        gpus_per_node=gpus,
        queue=job.queue or site.queue,
        account=job.account or site.account,
        filesystems=job.filesystems or site.filesystems,
        name=name[: site.name_limit],
        env=job.env or sys.prefix,
        progress=job.progress or str(checkpoint_dir(job.command) or ""),
    )
    check_job(completed)
    check_limits(completed, site)
    supported = site.gpu_resource or site.whole_nodes
    if dialect.name == "pbs" and job.gpus_per_node and not supported:
        raise UsageError(
            "--gpus-per-node: PBS refuses resources that the site has not defined; set the one for "
            "GPUs in the --site file, e.g. `gpu_resource: ngpus`"
        )
    return completed


def _check_walltime(job: Job, dialect: Dialect) -> None:
    if job.walltime is not None or not dialect.in_job:
        return
    if any(word.partition("=")[0] == "--walltime" for word in job.command):
        raise UsageError(
            "--walltime after the command is an option of the command: put it before, e.g. "
            "`hvdtrain submit --walltime H:MM:SS -- COMMAND`"
        )
    raise UsageError("--walltime is required, e.g. --walltime 1:00:00")


def note_walltime(job: Job) -> str:
    """Return a warning about a walltime that leaves little time for training; empty: none.

    The trainers take seconds to start, and stop half a minute and two steps before the end
    (``adapters.preemption``). A job of a chain that has saved is followed by another.
    """
    if not (0 < job.seconds < SHORT_WALLTIME and checkpoint_dir(job.command)):
        return ""
    each = "each job of the chain" if job.chain else "the job"
    return (
        f"--walltime {show_clock(job.seconds)}: trainers need up to a minute to start, and stop "
        f"30 s and two steps before the end to save, so that {each} may train only for seconds"
    )


def default_name(command: Sequence[str]) -> str:
    """Return a name for the job: the module or script that the command runs."""
    words = [word for word in command if word]
    module = words[words.index("-m") + 1 :] if "-m" in words else []
    script = [word for word in words if word.endswith((".py", ".sh"))]
    program = Path(next(iter(module + script + words), "job"))
    name = program.name.rpartition(".")[2] if module else program.stem
    return re.sub(r"^[^A-Za-z]+|[^\w+-]", "", name, flags=re.ASCII)[:SHORT_NAME] or "job"


def _refuse_job_script(command: Sequence[str]) -> None:
    for word in command[:2]:
        try:
            lines = Path(word).read_text().splitlines()[:100]
        except (OSError, ValueError):
            continue
        if any(DIRECTIVE.match(line) for line in lines):
            raise UsageError(
                f"{word} is a job script: its #PBS or #SBATCH lines would be ignored; submit it by "
                f"`qsub {word}` or `sbatch {word}`"
            )
