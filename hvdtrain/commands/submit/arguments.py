"""The options of ``hvdtrain submit``, and the job built from them and the site's defaults."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
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

SHORT_NAME = 15  # characters of a generated name: the length that every batch system shows
CHAIN_LIMIT = 10
LOGS = Path("hvdtrain-jobs")
SHORT = 120  # seconds of walltime that leave less than half for training; see note_walltime


RESOURCES, SCRIPT, SUBMISSION = "resources", "job", "submission"


def _option(group: str, text: str, metavar: str = "", **arguments: Any) -> Any:
    """Return a field with the group, the help text and the other arguments of its option."""
    arguments |= {"help": text} | ({"metavar": metavar} if metavar else {})
    return field(metadata={"group": group, "arguments": arguments})


_resource = partial(_option, RESOURCES)


def _switch(group: str, text: str) -> Any:
    return _option(group, text, action="store_true")


def _repeated(text: str, metavar: str) -> Any:
    return _option(SCRIPT, f"{text}; may be repeated", metavar, action="append", default=[])


@dataclass(frozen=True)
class Request:
    """The specified options; None: the default of the site."""

    command: tuple[str, ...]

    nodes: int = _resource("number of nodes (1)", "M", type=int, default=1)
    ppn: int | None = _resource("number of ranks per node (its GPUs, or 1)", "K", type=int)
    walltime: str | None = _resource("time limit of the job", "H:MM:SS")
    threads: int | None = _resource("number of cores per rank (1)", "T", type=int)
    gpus_per_node: int | None = _resource("number of GPUs per node (the site's)", "G", type=int)
    memory: str | None = _resource("memory per node, e.g. 64gb", "SIZE")
    queue: str | None = _resource("queue or partition (the site's)", "NAME")
    account: str | None = _resource("account or project (the site's)", "NAME")
    filesystems: str | None = _resource("file systems, e.g. home:eagle (the site's)", "NAMES")
    name: str | None = _resource("name of the job (derived from the command)", "NAME")
    array: str | None = _resource("range of array tasks; $TASK is the number of the task", "A-B")
    after: str | None = _resource("job that must complete successfully first", "ID")
    requeue: bool = _switch(RESOURCES, "rerun the job if a node fails (default: end it)")
    tolerate_node_failures: bool = _switch(
        RESOURCES, "continue if a node fails, unless it is the first"
    )

    module: tuple[str, ...] = _repeated("environment module to load", "NAME")
    env: str | None = _option(SCRIPT, "Python environment (this one), or none", "DIR")
    setup: tuple[str, ...] = _repeated("line of shell to run before the command", "LINE")
    var: tuple[str, ...] = _repeated(
        "default of $NAME in the command, which qsub -v can change", "NAME=VALUE"
    )
    once: bool = _switch(SCRIPT, "run the command once, on the first node: it starts its own ranks")
    ladder: bool = _switch(SCRIPT, "run on 1, 2, 4, ... ranks in one job; $RANKS is their number")
    chain: bool = _switch(SCRIPT, "chain of jobs that resume the command until it is finished")
    chain_limit: int = _option(
        SCRIPT, f"maximum number of jobs ({CHAIN_LIMIT})", "N", type=int, default=CHAIN_LIMIT
    )
    progress: str | None = _option(
        SCRIPT, "directory that each job must change (its --checkpoint-dir)", "DIR"
    )
    comment: str = _option(SCRIPT, "comment in the script", "TEXT", default="")

    scheduler: str | None = _option(
        SUBMISSION, "batch system (detected); none: a script for bash", choices=SCHEDULERS
    )
    site: str | None = _option(SUBMISSION, "site file, or polaris, aurora, perlmutter, pbs", "FILE")
    logs: Path = _option(
        SUBMISSION, "directory of scripts and logs (hvdtrain-jobs)", "DIR", type=Path, default=LOGS
    )
    follow: bool = _switch(SUBMISSION, "show state and log until the job ends; its exit code")
    dry_run: bool = _switch(SUBMISSION, "print the script without submitting it")
    json: bool = _switch(SUBMISSION, "print the result as one JSON object")

    @classmethod
    def of(cls, parsed: argparse.Namespace) -> Request:
        """Return the request of the ``parsed`` options."""
        values: dict[str, Any] = {field.name: getattr(parsed, field.name) for field in fields(cls)}
        values["command"] = parsed.command[parsed.command[:1] == ["--"] :]
        for name in ("command", "module", "setup", "var"):
            values[name] = tuple(values[name])
        return cls(**values)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb: the fields of ``Request``."""
    parser.usage = "hvdtrain submit --walltime H:MM:SS [options] -- COMMAND"
    parser.epilog = EPILOG
    groups = {title: parser.add_argument_group(title) for title in (RESOURCES, SCRIPT, SUBMISSION)}
    for option in fields(Request):
        if option.metadata:
            name = "--" + option.name.replace("_", "-")
            groups[option.metadata["group"]].add_argument(name, **option.metadata["arguments"])
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def make_job(request: Request, site: Site, dialect: Dialect) -> Job:
    """Return the requested job, with all defaults filled in, and checked.

    Raises:
        UsageError: an option is invalid.
    """
    command = request.command
    _refuse_job_script(command)
    gpus = site.gpus_per_node if request.gpus_per_node is None else request.gpus_per_node
    job = Job(
        command=command,
        walltime=_walltime(request.walltime, command, dialect),
        nodes=request.nodes,
        ppn=(gpus or 1) if request.ppn is None else request.ppn,
        threads=request.threads,
        name=request.name or default_name(command),
        queue=request.queue or site.queue,
        account=request.account or site.account,
        gpus_per_node=gpus,
        memory=request.memory,
        filesystems=request.filesystems or site.filesystems,
        array=request.array,
        after=request.after,
        requeue=request.requeue,
        tolerate_node_failures=request.tolerate_node_failures,
        modules=request.module,
        setup=request.setup,
        environment=None if request.env == "none" else request.env or sys.prefix,
        variables=tuple(_variable(text) for text in request.var),
        once=request.once,
        sweep=request.ladder,
        chain=request.chain_limit if request.chain else 0,
        progress=request.progress or str(checkpoint_dir(command) or ""),
        comment=request.comment,
    )
    _check(job, request, site, dialect)
    return replace(job, name=job.name[: site.name_limit])


def _check(job: Job, request: Request, site: Site, dialect: Dialect) -> None:
    if request.chain_limit < 2:
        raise UsageError(f"--chain-limit {request.chain_limit}: must be at least 2")
    check_job(job)
    check_setup((*site.setup, *job.setup))
    check_limits(job, site)
    supported = site.gpu_resource or site.whole_nodes
    if dialect.name == "pbs" and request.gpus_per_node and not supported:
        raise UsageError(
            "--gpus-per-node: PBS refuses resources that the site has not defined; set the one for "
            "GPUs in the --site file, e.g. `gpu_resource: ngpus`"
        )


def _walltime(text: str | None, command: Sequence[str], dialect: Dialect) -> int:
    if text is None:
        if not dialect.in_job:
            return 0
        if any(word.partition("=")[0] == "--walltime" for word in command):
            raise UsageError(
                "--walltime after the command is an option of the command: put it before, e.g. "
                "`hvdtrain submit --walltime H:MM:SS -- COMMAND`"
            )
        raise UsageError("--walltime is required, e.g. --walltime 1:00:00")
    seconds = parse_clock(text)
    if not seconds:
        raise UsageError(
            f"--walltime {text!r}: must be H:MM:SS, e.g. 1:00:00 for an hour; a bare number is "
            "seconds for PBS and minutes for Slurm"
        )
    return seconds


def note_walltime(job: Job) -> str:
    """Return a warning about a walltime that leaves little time for training; empty: none.

    The trainers take seconds to start, and stop half a minute and two steps before the end
    (``adapters.preemption``). A job of a chain that has saved is followed by another.
    """
    if not (job.walltime and job.walltime < SHORT and checkpoint_dir(job.command)):
        return ""
    each = "each job of the chain" if job.chain else "the job"
    return (
        f"--walltime {show_clock(job.walltime)}: trainers need up to a minute to start, and stop "
        f"30 s and two steps before the end to save, so that {each} may train only for seconds"
    )


def _variable(text: str) -> Variable:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--var {text!r}: must be NAME=VALUE, or NAME= for an optional one")
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
                f"{word} is a job script: its #PBS or #SBATCH lines would be ignored; submit it by "
                f"`qsub {word}` or `sbatch {word}`"
            )
