"""The options of ``hvdtrain submit``, and the job that they and the site's defaults make."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hvdtrain.commands.launch.prepare import checkpoint_dir
from hvdtrain.commands.submit.dialect import Dialect
from hvdtrain.commands.submit.job import DIRECTIVE, Job, Variable, check_job, check_setup
from hvdtrain.commands.submit.site import SCHEDULERS, Site, check_limits
from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.walltime import parse_clock, show_clock

EPILOG = """example:
  hvdtrain submit --nodes 2 --ppn 4 --walltime 1:00:00 -- python -m hvdtrain.resnet --synthetic
  hvdtrain submit --walltime 0:30:00 --follow -- python train.py
  hvdtrain submit --ppn 4 --walltime 2:00:00 --chain -- \\
      python -m hvdtrain.mnist --checkpoint-dir checkpoints
  hvdtrain submit --site polaris --account me --walltime 1:00:00 --dry-run -- python train.py
"""

SHORT_NAME = 15  # characters of a name of our own making: what every batch system shows
CHAIN_LIMIT = 10
LOGS = Path("hvdtrain-jobs")
SHORT = 120  # seconds of walltime that may leave less than half for training; see note_walltime


JOB, SCRIPT, HOW = "what is asked for", "what the job does", "how it is submitted"


def _option(group: str, text: str, metavar: str = "", **how: Any) -> Any:
    """Return a field with the group, the help text and the further arguments of its option."""
    shown = {"metavar": metavar} if metavar else {}
    return field(metadata={"group": group, "how": {"help": text, **shown, **how}})


def _switch(group: str, text: str) -> Any:
    return _option(group, text, action="store_true")


def _repeated(text: str, metavar: str) -> Any:
    return _option(SCRIPT, f"{text}; may be repeated", metavar, action="append", default=[])


@dataclass(frozen=True)
class Request:
    """The options as given; None leaves a value to the site."""

    command: tuple[str, ...]

    nodes: int = _option(JOB, "(1)", "M", type=int, default=1)
    ppn: int | None = _option(JOB, "ranks per node (its GPUs, or 1)", "K", type=int)
    walltime: str | None = _option(JOB, "how long the job may run", "H:MM:SS")
    threads: int | None = _option(JOB, "cores per rank", "T", type=int)
    gpus_per_node: int | None = _option(JOB, "(the site's)", "G", type=int)
    memory: str | None = _option(JOB, "per node, such as 64gb", "SIZE")
    queue: str | None = _option(JOB, "or partition (the site's)", "NAME")
    account: str | None = _option(JOB, "or project (the site's)", "NAME")
    filesystems: str | None = _option(JOB, "such as home:eagle (the site's)", "NAMES")
    name: str | None = _option(JOB, "of the job (made from the command)", "NAME")
    array: str | None = _option(JOB, "a task for each number; $TASK tells which", "A-B")
    after: str | None = _option(JOB, "start when this job has ended well", "ID")
    requeue: bool = _switch(JOB, "start again if a node dies (else the job ends)")
    tolerate_node_failures: bool = _switch(JOB, "go on if a node dies that is not the first")

    module: tuple[str, ...] = _repeated("to load", "NAME")
    env: str | None = _option(SCRIPT, "Python environment (this one), or none", "DIR")
    setup: tuple[str, ...] = _repeated("of shell, before the command", "LINE")
    var: tuple[str, ...] = _repeated(
        "what $NAME in the command is, unless qsub -v says otherwise", "NAME=VALUE"
    )
    once: bool = _switch(SCRIPT, "run it on the first node only: it starts its own ranks")
    ladder: bool = _switch(SCRIPT, "run it on 1, 2, 4, ... ranks in one job; $RANKS tells how many")
    chain: bool = _switch(SCRIPT, "more jobs that go on with it, until it is finished")
    chain_limit: int = _option(SCRIPT, f"jobs ({CHAIN_LIMIT})", "N", type=int, default=CHAIN_LIMIT)
    progress: str | None = _option(SCRIPT, "what a chain must change (its --checkpoint-dir)", "DIR")
    comment: str = _option(SCRIPT, "for readers of the script", "TEXT", default="")

    scheduler: str | None = _option(
        HOW, "(what is found here) none: a script for bash", choices=SCHEDULERS
    )
    site: str | None = _option(HOW, "defaults, or polaris, aurora, perlmutter, pbs", "FILE")
    logs: Path = _option(
        HOW, "where script and log are kept (hvdtrain-jobs)", "DIR", type=Path, default=LOGS
    )
    follow: bool = _switch(HOW, "show state and log until it ends; its exit code")
    dry_run: bool = _switch(HOW, "print the script, submit nothing")
    json: bool = _switch(HOW, "print the result as one JSON object")

    @classmethod
    def of(cls, parsed: argparse.Namespace) -> Request:
        """Return the request in options that were ``parsed``."""
        values: dict[str, Any] = {field.name: getattr(parsed, field.name) for field in fields(cls)}
        values["command"] = parsed.command[parsed.command[:1] == ["--"] :]
        for name in ("command", "module", "setup", "var"):
            values[name] = tuple(values[name])
        return cls(**values)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb: the fields of ``Request``."""
    parser.usage = "hvdtrain submit --walltime H:MM:SS [options] -- COMMAND"
    parser.epilog = EPILOG
    groups = {title: parser.add_argument_group(title) for title in (JOB, SCRIPT, HOW)}
    for one in fields(Request):
        if one.metadata:
            name = "--" + one.name.replace("_", "-")
            groups[one.metadata["group"]].add_argument(name, **one.metadata["how"])
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def make_job(given: Request, site: Site, dialect: Dialect) -> Job:
    """Return the job that is asked for, with every default filled in, and checked.

    Raises:
        UsageError: naming the option.
    """
    command = given.command
    _refuse_job_script(command)
    gpus = site.gpus_per_node if given.gpus_per_node is None else given.gpus_per_node
    job = Job(
        command=command,
        walltime=_walltime(given.walltime, command, dialect),
        nodes=given.nodes,
        ppn=(gpus or 1) if given.ppn is None else given.ppn,
        threads=given.threads,
        name=given.name or default_name(command),
        queue=given.queue or site.queue,
        account=given.account or site.account,
        gpus_per_node=gpus,
        memory=given.memory,
        filesystems=given.filesystems or site.filesystems,
        array=given.array,
        after=given.after,
        requeue=given.requeue,
        tolerate_node_failures=given.tolerate_node_failures,
        modules=given.module,
        setup=given.setup,
        environment=None if given.env == "none" else given.env or sys.prefix,
        variables=tuple(_variable(text) for text in given.var),
        once=given.once,
        ladder=given.ladder,
        chain=given.chain_limit if given.chain else 0,
        progress=given.progress or str(checkpoint_dir(command) or ""),
        comment=given.comment,
    )
    _check(job, given, site, dialect)
    return replace(job, name=job.name[: site.name_limit])


def _check(job: Job, given: Request, site: Site, dialect: Dialect) -> None:
    if given.chain_limit < 2:
        raise UsageError(f"--chain-limit {given.chain_limit}: a chain has 2 jobs or more")
    check_job(job)
    check_setup((*site.setup, *job.setup))
    check_limits(job, site)
    counted = site.gpu_resource or site.whole_nodes
    if dialect.name == "pbs" and given.gpus_per_node and not counted:
        raise UsageError(
            "--gpus-per-node: PBS refuses a resource that its site has not defined; give --site a "
            "file with the one that counts GPUs there, such as `gpu_resource: ngpus`"
        )


def _walltime(text: str | None, command: Sequence[str], dialect: Dialect) -> int:
    if text is None:
        if not dialect.in_job:
            return 0
        if any(word.partition("=")[0] == "--walltime" for word in command):
            raise UsageError(
                "--walltime: it stands behind the command, and so is the command's; put it before: "
                "`hvdtrain submit --walltime H:MM:SS -- COMMAND`"
            )
        raise UsageError("--walltime: how long may the job run? Such as --walltime 1:00:00")
    seconds = parse_clock(text)
    if not seconds:
        raise UsageError(
            f"--walltime {text!r}: write H:MM:SS, such as 1:00:00 for an hour; a number alone is "
            "seconds to PBS and minutes to Slurm"
        )
    return seconds


def note_walltime(job: Job) -> str:
    """Return a note on a walltime that leaves little time for training; else nothing.

    The trainers take seconds to start, and stop half a minute and two steps before the end
    (``training.preemption``). A job of a chain that has saved anything is followed by another.
    """
    if not (job.walltime and job.walltime < SHORT and checkpoint_dir(job.command)):
        return ""
    each = "each job of the chain" if job.chain else "the job"
    return (
        f"--walltime {show_clock(job.walltime)}: the trainers need up to a minute to start, and "
        f"stop 30 s and two steps before the end to save, so that {each} may train for seconds only"
    )


def _variable(text: str) -> Variable:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--var {text!r}: write NAME=VALUE; NAME= for one that may stay empty")
    return Variable(name, value)


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
                f"{word} is a job script itself, and its #PBS or #SBATCH lines would count for "
                f"nothing inside another: `qsub {word}` or `sbatch {word}`"
            )
