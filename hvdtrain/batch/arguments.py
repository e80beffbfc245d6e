"""The options of ``hvdtrain submit``, and the job that they and the site's defaults make."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvdtrain.batch.check import DIRECTIVE
from hvdtrain.batch.dialect import Dialect
from hvdtrain.batch.job import Job, Variable, check_job
from hvdtrain.batch.site import SCHEDULERS, Site, check_limits
from hvdtrain.batch.walltime import parse_clock, show_clock
from hvdtrain.errors import UsageError
from hvdtrain.launch.launch import checkpoint_dir

EPILOG = """example:
  hvdtrain submit --nodes 2 --ppn 4 --walltime 1:00:00 -- python -m hvdtrain.resnet --synthetic
  hvdtrain submit --walltime 0:30:00 --follow -- python train.py
  hvdtrain submit --ppn 4 --walltime 2:00:00 --chain -- \\
      python -m hvdtrain.mnist --checkpoint-dir checkpoints
  hvdtrain submit --site polaris --account me --walltime 1:00:00 --dry-run -- python train.py
"""

SHORT_NAME = 15  # characters of a name of our own making: what every batch system shows
CHAIN_LIMIT = 10
SHORT = 120  # seconds of walltime that may leave less than half for training; see note_walltime


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.usage = "hvdtrain submit --walltime H:MM:SS [options] -- COMMAND"
    parser.epilog = EPILOG
    _job_arguments(parser.add_argument_group("what is asked for"))
    _script_arguments(parser.add_argument_group("what the job does"))
    how = parser.add_argument_group("how it is submitted")
    how.add_argument(
        "--scheduler", choices=SCHEDULERS, help="(what is found here) none: a script for bash"
    )
    how.add_argument("--site", metavar="FILE", help="defaults, or polaris, aurora, perlmutter, pbs")
    how.add_argument(
        "--logs",
        type=Path,
        default=Path("hvdtrain-jobs"),
        metavar="DIR",
        help="where script and log are kept (hvdtrain-jobs)",
    )
    how.add_argument(
        "--follow", action="store_true", help="show state and log until it ends; its exit code"
    )
    how.add_argument("--dry-run", action="store_true", help="print the script, submit nothing")
    how.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _job_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--nodes", type=int, default=1, metavar="M", help="(1)")
    group.add_argument("--ppn", type=int, metavar="K", help="ranks a node (its GPUs, or 1)")
    group.add_argument("--walltime", metavar="H:MM:SS", help="how long the job may run")
    group.add_argument("--threads", type=int, metavar="T", help="cores a rank")
    group.add_argument("--gpus-per-node", type=int, metavar="G", help="(the site's)")
    group.add_argument("--memory", metavar="SIZE", help="a node, such as 64gb")
    group.add_argument("--queue", metavar="NAME", help="or partition (the site's)")
    group.add_argument("--account", metavar="NAME", help="or project (the site's)")
    group.add_argument("--filesystems", metavar="NAMES", help="such as home:eagle (the site's)")
    group.add_argument("--name", metavar="NAME", help="of the job (made from the command)")
    group.add_argument("--array", metavar="A-B", help="a task for each number; $TASK tells which")
    group.add_argument("--after", metavar="ID", help="start when this job has ended well")
    group.add_argument("--requeue", action="store_true", help="start again if a node dies")


def _script_arguments(group: argparse._ArgumentGroup) -> None:
    more: dict[str, Any] = {"action": "append", "default": []}
    group.add_argument("--module", metavar="NAME", **more, help="to load; may be repeated")
    group.add_argument("--env", metavar="DIR", help="Python environment (this one), or none")
    group.add_argument(
        "--setup", metavar="LINE", **more, help="of shell, before the command; may be repeated"
    )
    group.add_argument(
        "--var",
        metavar="NAME=VALUE",
        **more,
        help="what $NAME in the command is, unless qsub -v says otherwise; may be repeated",
    )
    group.add_argument(
        "--once", action="store_true", help="run it on the first node only: it starts its own ranks"
    )
    group.add_argument(
        "--ladder",
        action="store_true",
        help="run it on 1, 2, 4, ... ranks in one job; $RANKS tells how many",
    )
    group.add_argument(
        "--chain", action="store_true", help="more jobs that go on with it, until it is finished"
    )
    group.add_argument(
        "--chain-limit", type=int, default=CHAIN_LIMIT, metavar="N", help=f"jobs ({CHAIN_LIMIT})"
    )
    group.add_argument(
        "--progress", metavar="DIR", help="what a chain must change (its --checkpoint-dir)"
    )
    group.add_argument("--comment", default="", metavar="TEXT", help="for readers of the script")


def make_job(given: argparse.Namespace, site: Site, dialect: Dialect) -> Job:
    """The job that is asked for, with every default filled in, and checked.

    Raises:
        UsageError: naming the option.
    """
    command = tuple(given.command[1:] if given.command[:1] == ["--"] else given.command)
    if given.chain_limit < 2:
        raise UsageError(f"--chain-limit {given.chain_limit}: a chain has 2 jobs or more")
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
        modules=tuple(given.module),
        setup=tuple(given.setup),
        environment=None if given.env == "none" else given.env or sys.prefix,
        variables=tuple(_variable(text) for text in given.var),
        once=given.once,
        ladder=given.ladder,
        chain=given.chain_limit if given.chain else 0,
        progress=given.progress or checkpoint_dir(command) or "",
        comment=given.comment,
    )
    check_job(job)
    check_limits(job, site)
    _check_gpus(given, site, dialect)
    return replace(job, name=job.name[: site.name_limit])


def _check_gpus(given: argparse.Namespace, site: Site, dialect: Dialect) -> None:
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
    """What there is to say of a walltime that leaves little time for training; else nothing.

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
    """A name for the job: the module or script that the command runs."""
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
