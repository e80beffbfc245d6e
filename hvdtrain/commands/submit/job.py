"""The job: the options of ``hvdtrain submit``, their values, and what excludes what."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hvdtrain.commands.launch.staging import refuse_value
from hvdtrain.config.declare import command, json_switch, option, optional, switch
from hvdtrain.config.values import count, positive
from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.walltime import parse_clock

RANKS = "RANKS"
"""The variable of a sweep: the current number of ranks."""
TASK = "TASK"
"""The variable of an array: the number of the task."""

SCHEDULERS = ("pbs", "slurm", "none")
MAX_NAME = 230  # characters, the limit of PBS; Torque's is 15 (``Site.name_limit``)
CHAIN_LIMIT = 10
LOGS = Path("hvdtrain-jobs")
DIRECTIVE = re.compile(r"^#(PBS|SBATCH)\b", re.MULTILINE)
_PLAIN = re.compile(r"[A-Za-z0-9][\w.@:/=+-]*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_ARRAY = re.compile(r"(\d+)-(\d+)(?::([1-9]\d*))?", re.ASCII)
_MEMORY = re.compile(r"([1-9]\d*)\s*([kmgt])i?b?", re.IGNORECASE)
# A job needs these variables unchanged, or bash sets them (its manual, "Bash Variables").
_RESERVED = re.compile(
    r"PATH|HOME|USER|SHELL|PWD|OMP_NUM_THREADS|PBS_.*|SLURM_.*|BASH(OPTS|PID|_.*)?|COMP_.*|"
    r"DIRSTACK|EPOCHREALTIME|EPOCHSECONDS|E?UID|FUNCNAME|GROUPS|HISTCMD|HOSTNAME|HOSTTYPE|IFS|"
    r"LINENO|MACHTYPE|OLDPWD|OPTERR|OPTIND|OSTYPE|PIPESTATUS|PPID|PS4|S?RANDOM|SECONDS|SHELLOPTS|"
    r"SHLVL|TERM|_"
)


# Readers of values; each raises ValueError if a batch system would refuse or misread the text.


def _matching(pattern: re.Pattern[str], problem: str) -> Callable[[str], str]:
    """Return the reader of texts of one form."""

    def read(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"{text!r}{problem}")
        return text

    return read


job_name = _matching(
    re.compile(rf"[A-Za-z][\w.+-]{{0,{MAX_NAME - 1}}}", re.ASCII),
    f": must be a letter, then letters, digits and . _ + -, at most {MAX_NAME} characters",
)
# These two are in the script unquoted.
plain_word = _matching(_PLAIN, ": must be one word of [A-Za-z0-9_.:@/=+-]")
module_name = _matching(_PLAIN, " is not one module; name each of several separately")
job_id = _matching(
    # The latter is an array of PBS.
    re.compile(rf"{_PLAIN.pattern}|\d+\[\d*\](\.[\w.-]+)?", re.ASCII),
    ": must be the ID of a job, e.g. 12, 12.server or 12[].server",
)


def memory_size(text: str) -> str:
    """Read an amount of memory, as PBS spells it: ``64gb``."""
    amount = _MEMORY.fullmatch(text)
    if amount is None:
        raise ValueError(f"{text!r}: must be a number with a unit, e.g. 64gb")
    return f"{amount[1]}{amount[2].lower()}b"


def task_range(text: str) -> str:
    """Read a range of tasks ``A-B`` or ``A-B:STEP``."""
    span = _ARRAY.fullmatch(text)
    if span is None or int(span[1]) >= int(span[2]):
        raise ValueError(f"{text!r}: must be a range such as 1-10 or 0-90:10")
    return text


def directive_line(text: str) -> str:
    """Read an option of qsub or sbatch for a line of the script."""
    if not (re.match(r"-\S", text) and text.isprintable()):
        raise ValueError(f"{text!r}: must be an option of qsub or sbatch, without #PBS or #SBATCH")
    if re.match(r"-l\s*(select|nodes|walltime)=", text):  # PBS refuses two of a kind
        raise ValueError(f"{text!r}: written by submit; use its options, or the key `select`")
    return text


def setup_line(text: str) -> str:
    """Read a line of shell."""
    if DIRECTIVE.search(text):
        raise ValueError(f"{text!r}: a directive after the first command is ignored: --directive")
    if "\r" in text:
        raise ValueError(f"{text!r}: remove the DOS line ends, which sbatch refuses")
    return text


def variable(text: str) -> tuple[str, str]:
    """Read ``NAME=VALUE``: a variable that can be changed at submission, and its default."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r}: must be NAME=VALUE, or NAME= for an optional one")
    if not _VARIABLE.fullmatch(name):
        raise ValueError(f"{name}: not a valid variable of a job")
    if _RESERVED.fullmatch(name):
        raise ValueError(f"{name}: bash or the batch system sets this variable; use another name")
    if name in (RANKS, TASK):
        raise ValueError(f"{name}: reserved for the script")
    return name, value


def clock(text: str) -> int:
    """Read ``H:MM:SS`` as seconds."""
    seconds = parse_clock(text)
    if not seconds:
        raise ValueError(
            f"{text!r}: must be H:MM:SS, e.g. 1:00:00 for an hour; a bare number is seconds for "
            "PBS and minutes for Slurm"
        )
    return seconds


_resource = partial(option, None, group="resources")
_repeated = partial(option, (), repeated=True)


@dataclass(frozen=True)
class Job:
    """A job: its command, and the options of ``hvdtrain submit``.

    As typed, None stands for the default of the site; ``submission.complete`` fills it in.
    """

    command: tuple[str, ...] = command()  # of every rank: the program and its arguments

    nodes: int = option(1, "number of nodes", positive, group="resources", metavar="M")
    ppn: int | None = _resource("number of ranks per node (its GPUs, or 1)", positive, metavar="K")
    walltime: int | None = _resource("time limit of the job", clock, metavar="H:MM:SS")
    threads: int | None = _resource(
        "number of cores per rank (default: 1; with whole nodes its share)", positive, metavar="T"
    )
    gpus_per_node: int | None = _resource(
        "number of GPUs per node (the site's)", count, metavar="G"
    )
    memory: str | None = _resource("memory per node, e.g. 64gb", memory_size, metavar="SIZE")
    queue: str | None = _resource("queue or partition (the site's)", plain_word, metavar="NAME")
    account: str | None = _resource("account or project (the site's)", plain_word, metavar="NAME")
    filesystems: str | None = _resource(
        "file systems, e.g. home:eagle (the site's)", plain_word, metavar="NAMES"
    )
    name: str | None = _resource(
        "name of the job (derived from the command)", job_name, metavar="NAME"
    )
    email: str | None = _resource("address for mail when the job ends", plain_word, metavar="WHO")
    directive: tuple[str, ...] = _repeated(
        "option of qsub or sbatch: --directive='-W umask=027'; may be repeated",
        directive_line,
        metavar="LINE",
    )
    array: str | None = _resource(
        "range of array tasks; $TASK is the number of the task", task_range, metavar="A-B"
    )
    after: str | None = _resource("job that must complete successfully first", job_id, metavar="ID")
    requeue: bool = switch("rerun the job if a node fails (default: end it)")
    tolerate_node_failures: bool = switch("continue if a node fails, unless it is the first")

    module: tuple[str, ...] = _repeated(
        "environment module to load; may be repeated", module_name, group="job", metavar="NAME"
    )
    env: str | None = optional("Python environment (this one), or none", metavar="DIR")
    stage_env: bool = switch(
        "start the ranks from copies of the environment in $TMPDIR of each node"
    )
    setup: tuple[str, ...] = _repeated(
        "line of shell to run before the command; may be repeated", setup_line, metavar="LINE"
    )
    var: tuple[tuple[str, str], ...] = _repeated(
        "default of $NAME in the command, changed by qsub -v or sbatch --export; may be repeated",
        variable,
        metavar="NAME=VALUE",
    )
    once: bool = switch("run the command once, on the first node: it starts its own ranks")
    ladder: bool = switch("run on 1, 2, 4, ... ranks in one job; $RANKS is their number")
    chain: bool = switch("chain of jobs that resume the command until it is finished")
    chain_limit: int = option(CHAIN_LIMIT, "maximum number of jobs", count)
    progress: str | None = optional(
        "stop the chain if a job leaves this directory unchanged (its --checkpoint-dir)",
        metavar="DIR",
    )
    comment: str = option("", "comment in the script", metavar="TEXT")

    scheduler: str | None = optional(
        "batch system (detected); none: a script for bash", choices=SCHEDULERS, group="submission"
    )
    site: str | None = optional("site file, or polaris, aurora, perlmutter, pbs", metavar="FILE")
    logs: Path = option(LOGS, "directory of scripts and logs", Path, metavar="DIR")
    follow: bool = switch("show state and log until the job ends; its exit code")
    dry_run: bool = switch("print the script without submitting it")
    json: bool = json_switch()

    @property
    def ranks(self) -> int:
        """The total number of ranks."""
        return self.nodes * (self.ppn or 1)

    @property
    def cores_per_node(self) -> int:
        """The number of cores that the ranks of a node have together."""
        return (self.ppn or 1) * (self.threads or 1)

    @property
    def seconds(self) -> int:
        """The walltime; 0: none, without a batch system."""
        return self.walltime or 0

    @property
    def tasks(self) -> list[str]:
        """The numbers of the tasks of an array; empty: no array."""
        match = _ARRAY.fullmatch(self.array or "")
        if match is None:
            return []
        return [str(n) for n in range(int(match[1]), int(match[2]) + 1, int(match[3] or 1))]

    @property
    def names(self) -> list[str]:
        """The variables that words of the command may contain."""
        names = [name for name, _ in self.var]
        return names + [RANKS] * self.ladder + [TASK] * bool(self.array)

    @property
    def optional(self) -> list[str]:
        """The names of variables that may be empty: then a word with one is left out."""
        return [name for name, default in self.var if not default]


def check_job(job: Job) -> None:
    """Raise ``UsageError`` if the options exclude one another."""
    if not job.command or not job.command[0]:
        raise UsageError("missing command: put it after `--`, e.g. `-- python train.py`")
    if job.chain_limit < 2:
        raise UsageError(f"--chain-limit {job.chain_limit}: must be at least 2")
    if job.gpus_per_node and (job.ppn or 1) > job.gpus_per_node:
        raise UsageError(
            f"--ppn {job.ppn}: more ranks than the {job.gpus_per_node} GPUs of a node; each rank "
            "needs one"
        )
    if job.array and job.chain:
        raise UsageError("--array and --chain cannot be combined: array tasks have no chains")
    if job.chain and not job.progress:
        raise UsageError(
            "--chain: the jobs have no directory to resume from; add --checkpoint-dir DIR to the "
            "command, or use --progress DIR"
        )
    if job.chain and job.ladder:
        raise UsageError("--chain and --ladder cannot be combined: a chain resumes one command")
    if job.once and job.ladder:
        raise UsageError("--once and --ladder cannot be combined: omit one")
    if job.stage_env:
        refuse_value(job.command)
    if job.once and job.stage_env:
        raise UsageError(
            "--stage-env and --once cannot be combined: add --stage-env to the command's "
            "`hvdtrain launch`"
        )
    names = [name for name, _ in job.var]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--var {name}: specified twice")


def memory_megabytes(text: str) -> int:
    """Return the megabytes of an amount such as ``64gb``, at least 1."""
    match = _MEMORY.fullmatch(text)
    assert match is not None  # see ``memory_size``
    kilobytes = int(match[1]) * 1024 ** "kmgt".index(match[2].lower())
    return max(1, kilobytes // 1024)
