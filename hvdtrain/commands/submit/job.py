"""The requested job: command, resources and walltime, independent of the batch system."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.errors import UsageError

RANKS = "RANKS"
"""The variable of a sweep: the current number of ranks."""
TASK = "TASK"
"""The variable of an array: the number of the task."""

LONGEST_NAME = 230  # characters, the limit of PBS; Torque's is 15 (``Site.name_limit``)
DIRECTIVE = re.compile(r"^#(PBS|SBATCH)\b", re.MULTILINE)
PLAIN = re.compile(r"[A-Za-z0-9][\w.@:/=+-]*")
_NAME = re.compile(r"[A-Za-z][\w.+-]*")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_ARRAY = re.compile(r"(\d+)-(\d+)(?::([1-9]\d*))?")
_MEMORY = re.compile(r"([1-9]\d*)\s*([kmgt])i?b?", re.IGNORECASE)
_RESERVED = {
    "PATH",
    "HOME",
    "USER",
    "SHELL",
    "PWD",
    "OMP_NUM_THREADS",
}  # a job needs them unchanged


@dataclass(frozen=True)
class Variable:
    """A value that can be changed at submission, without editing the script."""

    name: str  # of the shell variable
    default: str  # its default; if the value is empty, a word with the variable is left out


@dataclass(frozen=True)
class Job:
    """The requested resources, and the command of the job."""

    command: tuple[str, ...]  # of every rank: the program and its arguments
    walltime: int  # seconds
    nodes: int = 1
    ppn: int = 1  # ranks per node
    threads: int | None = None  # cores per rank; None: one is requested
    name: str = "job"  # shown by the batch system
    queue: str | None = None
    account: str | None = None
    gpus_per_node: int | None = None
    memory: str | None = None  # per node, e.g. ``64gb``
    filesystems: str | None = None  # names joined by colons, if the site requires it
    array: str | None = None  # range of tasks ``A-B`` or ``A-B:STEP``
    after: str | None = None  # job that must complete successfully before this one starts
    requeue: bool = False  # rerun if a node fails; False: the job ends
    tolerate_node_failures: bool = False  # continue if a node fails
    modules: tuple[str, ...] = ()  # arguments of ``module load``
    setup: tuple[str, ...] = ()  # lines of shell that run before the command
    environment: str | None = None  # of Python; None: as after the setup
    variables: tuple[Variable, ...] = ()  # values of ``$NAME`` in the command
    once: bool = False  # run the command once, on the first node: it starts its own ranks
    sweep: bool = False  # run the command on 1, 2, 4, ... ranks, one after the other
    chain: int = 0  # number of jobs that resume the command until it is finished; 0: a single job
    progress: str = ""  # directory in which each job of a chain must save
    comment: str = ""  # in the script

    @property
    def ranks(self) -> int:
        """The total number of ranks."""
        return self.nodes * self.ppn

    @property
    def tasks(self) -> list[str]:
        """The numbers of the tasks of a valid array; empty: no array."""
        match = _ARRAY.fullmatch(self.array or "")
        if match is None:
            return []
        return [str(n) for n in range(int(match[1]), int(match[2]) + 1, int(match[3] or 1))]

    @property
    def names(self) -> list[str]:
        """The variables that words of the command may contain."""
        names = [variable.name for variable in self.variables]
        return names + [RANKS] * self.sweep + [TASK] * bool(self.array)

    @property
    def optional(self) -> list[str]:
        """The names of variables that may be empty."""
        return [variable.name for variable in self.variables if not variable.default]


def check_job(job: Job) -> None:
    """Raise an error if a batch system would refuse or misread the job.

    Raises:
        UsageError: an option is invalid.
    """
    if not job.command or not job.command[0]:
        raise UsageError("missing command: put it after `--`, e.g. `-- python train.py`")
    for option, number in (("--nodes", job.nodes), ("--ppn", job.ppn), ("--threads", job.threads)):
        if number is not None and number < 1:
            raise UsageError(f"{option} {number}: must be at least 1")
    if job.gpus_per_node and job.ppn > job.gpus_per_node:
        raise UsageError(
            f"--ppn {job.ppn}: more ranks than the {job.gpus_per_node} GPUs of a node; each rank "
            "needs one"
        )
    _check_words(job)
    if job.array and job.chain:
        raise UsageError("--array and --chain: chains of array tasks are not supported")
    if job.chain and not job.progress:
        raise UsageError(
            "--chain: the jobs have no directory to resume from; add --checkpoint-dir DIR to the "
            "command, or use --progress DIR"
        )
    if job.chain and job.sweep:
        raise UsageError("--chain and --ladder: only a single command can be resumed")
    if job.once and job.sweep:
        raise UsageError("--once and --ladder cannot be combined")
    _check_variables(job.variables)


def _check_words(job: Job) -> None:
    if not _NAME.fullmatch(job.name) or len(job.name) > LONGEST_NAME:
        raise UsageError(
            f"--name {job.name!r}: must be a letter, then letters, digits and . _ + -, at most "
            f"{LONGEST_NAME} characters"
        )
    words = {
        "--queue": job.queue,
        "--account": job.account,
        "--filesystems": job.filesystems,
        "--after": job.after,
    }
    for option, word in words.items():
        if word is not None and not PLAIN.fullmatch(word):
            raise UsageError(f"{option} {word!r}: must be one word of [A-Za-z0-9_.:@/=+-]")
    for word in job.modules:
        if not PLAIN.fullmatch(word):
            raise UsageError(f"--module {word!r}: must be one module; repeat the option for more")
    span = _ARRAY.fullmatch(job.array or "0-1")
    if span is None or int(span[1]) >= int(span[2]):
        raise UsageError(f"--array {job.array!r}: must be a range such as 1-10 or 0-90:10")
    if job.memory is not None and not _MEMORY.fullmatch(job.memory):
        raise UsageError(f"--memory {job.memory!r}: must be a number with a unit, e.g. 64gb")


def check_setup(lines: Sequence[str]) -> None:
    """Raise an error if a batch system would misread a line of setup.

    Raises:
        UsageError: a line is invalid.
    """
    for line in lines:
        if DIRECTIVE.search(line):
            raise UsageError(
                f"--setup {line!r}: a directive after the first command is ignored; use "
                "`directives` in a --site file"
            )
        if "\r" in line:
            raise UsageError(f"--setup {line!r}: remove the DOS line ends, which sbatch refuses")


def _check_variables(variables: tuple[Variable, ...]) -> None:
    names = [variable.name for variable in variables]
    for name in names:
        valid = _VARIABLE.fullmatch(name) and not name.startswith(("PBS_", "SLURM_"))
        if not valid or name in _RESERVED:
            raise UsageError(f"--var {name}: not a valid variable of a job")
        if name in (RANKS, TASK):
            raise UsageError(f"--var {name}: reserved for the script")
        if names.count(name) > 1:
            raise UsageError(f"--var {name}: specified twice")


def memory_megabytes(text: str) -> int:
    """Return the megabytes of a text such as ``64gb``, at least 1."""
    match = _MEMORY.fullmatch(text)
    assert match is not None  # see check_job
    kilobytes = int(match[1]) * 1024 ** "kmgt".index(match[2].lower())
    return max(1, kilobytes // 1024)
