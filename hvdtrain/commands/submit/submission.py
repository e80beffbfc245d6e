"""A job handed to the batch system: checked, written, submitted, and followed where asked to."""

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
from hvdtrain.commands.submit.follow import Submitted, ask, follow
from hvdtrain.commands.submit.job import Job
from hvdtrain.commands.submit.pbs import Pbs
from hvdtrain.commands.submit.script import script_text
from hvdtrain.commands.submit.site import load_site
from hvdtrain.commands.submit.slurm import Slurm
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.output.result import Report
from hvdtrain.system.runtime.command import NOT_FOUND, run

log = logging.getLogger(__name__)

ANSWER = 60.0  # seconds that qsub or sbatch may take


def submit(given: Request, previous: str | None = None) -> Report:
    """Write the job script of ``given``, and submit it unless it is a dry run.

    Args:
        given: what is asked for.
        previous: job whose end, whatever it is, this one waits for.

    Raises:
        UsageError: an option is wrong.
        HvdtrainError: the batch system refused the job, or no longer answers about it.
    """
    site = load_site(given.site, os.environ)
    dialect = choose(given.scheduler or site.scheduler, os.environ)
    job = make_job(given, site, dialect)
    if not dialect.in_job and (given.follow or given.chain or given.array):
        raise UsageError("--follow, --chain and --array need a batch system")
    if note := note_walltime(job):
        log.warning("%s", note)
    if job.after and not given.dry_run:
        _check_after(dialect, job.after)
    files = _free_files(given.logs, job.name, dialect.suffix, reserve=not given.dry_run)
    exit_file = str(files.exit) if given.follow else ""
    text = script_text(job, dialect, site, str(files.chain), exit_file)
    try:
        command = dialect.submit(str(files.script), str(files.log()), array=job.array, after=None)
    except UsageError:
        if not given.dry_run:
            files.script.unlink()  # nothing but the reserved name
        raise
    if given.dry_run:
        log.info("# %s", command.show())
        return Report(text[:-1], {"ok": True, "script": text, "submit": list(command.argv)})
    files.script.write_bytes(os.fsencode(text))
    if not dialect.in_job:
        return Report(command.show(), {"ok": True, "script": str(files.script)})
    return _report(given, dialect, files, _submit(job, dialect, files, previous))


def _report(given: Request, dialect: Dialect, files: Files, jobs: list[Submitted]) -> Report:
    """Report what was submitted, and follow it where asked to."""
    ids = [one.id for one in jobs]
    logs = [str(path) for one in jobs for path in one.logs.values()]
    log.info("script: %s\nlog:    %s", files.script, " ... ".join(logs[:: len(logs) - 1 or 1]))
    # The last first: with a waiting job PBS deletes those that wait for it.
    log.info("cancel: %s", dialect.delete(ids[::-1]).show())
    data = {"ok": True, "jobs": ids, "script": str(files.script), "logs": logs}
    if not given.follow:
        return Report("\n".join(ids), data)
    out = sys.stderr if given.json else sys.stdout
    ended = follow(dialect, jobs, files.exit, files.chain if given.chain else None, out)
    answer = {"ok": ended.code == 0, "state": ended.state, "exit_code": ended.code}
    if ended.tasks:
        answer["tasks"] = {number: _shown(task) for number, task in ended.tasks.items()}
    return Report("", {**data, **answer}, 1 if ended.code is None else ended.code)


def _shown(task: State) -> dict[str, Any]:
    logs = [str(path) for path in task.logs]
    return {"state": task.detail, "exit_code": task.exit_code, "log": logs[0] if logs else None}


class Files:
    """What is kept of a job, side by side: ``DIR/NAME-3.pbs``, ``NAME-3.log`` and so on."""

    def __init__(self, directory: Path, stem: str, suffix: str) -> None:
        self.directory, self.stem = directory, stem
        self.script = directory / (stem + suffix)  # what is submitted
        self.chain = directory / f"{stem}.chain"  # through which the jobs of a chain communicate
        self.exit = directory / f"{stem}.exit"  # of a job's exit code, but for its number

    def log(self, link: int = 0) -> Path:
        """Return the path of the output of the job, or of job number ``link`` of a chain."""
        return self.directory / (f"{self.stem}.{link + 1}.log" if link else f"{self.stem}.log")


def _free_files(directory: Path, name: str, suffix: str, *, reserve: bool) -> Files:
    """Find the first names that are free; ``reserve`` takes the script's at once."""
    for number in itertools.count(1):
        stem = f"{name}-{number}"
        if any(directory.glob(f"{stem}.*")):
            continue
        files = Files(directory, stem, suffix)
        if not reserve:
            break
        try:
            directory.mkdir(parents=True, exist_ok=True)
            files.script.touch(exist_ok=False)
            break
        except FileExistsError:  # another submit was faster
            if not directory.is_dir():
                raise UsageError(f"--logs {directory}: it is no directory") from None
        except OSError as error:
            raise UsageError(f"--logs {directory}: {error.strerror}") from error
    return files


def choose(name: str | None, environ: Mapping[str, str]) -> Dialect:
    """Return the batch system called ``name``, or the one whose commands are on the PATH.

    Raises:
        UsageError: there is none.
    """
    path = environ.get("PATH")
    qsub = shutil.which("qsub", path=path)
    if name is None:
        name = "slurm" if shutil.which("sbatch", path=path) else "pbs" if qsub else None
    if name is None:
        raise UsageError(
            "neither sbatch nor qsub is on the PATH: run this on a login node, or say --scheduler "
            "pbs, slurm, or none for a script that bash runs"
        )
    if name == "pbs":
        return Pbs(wraps_slurm=qsub is not None and b"Slurm" in Path(qsub).read_bytes()[:4096])
    return Slurm() if name == "slurm" else Local()


def _submit(job: Job, dialect: Dialect, files: Files, previous: str | None) -> list[Submitted]:
    """Submit the script, for a chain several times.

    Raises:
        HvdtrainError: the first was refused.
    """
    jobs: list[Submitted] = []
    for _ in range(max(1, job.chain)):
        path = str(files.log(len(jobs)))
        command = dialect.submit(str(files.script), path, array=job.array, after=previous)
        result = run(command, timeout=ANSWER)
        found = dialect.read_id(result.output) if result.ok else None
        if found is None:
            said = " ".join(result.output.split())[-600:] or f"exit code {result.exit_code}"
            if jobs:  # many sites let a user have so many jobs and no more
                log.warning("only %d of %d jobs were taken: %s", len(jobs), job.chain, said)
                break
            hint = "; is this a login node?" if result.exit_code == NOT_FOUND else ""
            raise HvdtrainError(f"{command.argv[0]} did not take {files.script}: {said}{hint}")
        numbers = job.tasks or [chain.number(found)]
        paths = [dialect.log_path(path, job, found, task) for task in job.tasks or [""]]
        previous = found
        jobs.append(Submitted(found, dict(zip(numbers, paths, strict=True))))
        if job.chain:
            chain.write(files.chain, event="link", job=found)
    return jobs


def _check_after(dialect: Dialect, job: str) -> None:
    """Refuse to wait for a job that will not end well: PBS takes such a job and drops it silently.

    Raises:
        UsageError: there is no such job, or it has ended, and not well.
    """
    state, _ = ask(dialect, job)
    if state and state.phase == GONE:
        raise UsageError(
            f"--after {job}: {dialect.name} knows no such job (any more); where it ended well, "
            "leave the option out"
        )
    if state and state.phase == ENDED and state.exit_code != 0:
        code = "unknown" if state.exit_code is None else state.exit_code
        how = f"ended with exit code {code}" if state.ran else f"was {state.detail}"
        raise UsageError(f"--after {job}: it {how}, and this job would wait for its good end")
