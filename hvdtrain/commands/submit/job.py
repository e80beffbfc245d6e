"""A job as it was asked for: what to run, on how many nodes, for how long; not yet a text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.errors import UsageError

RANKS = "RANKS"
"""The variable of a ladder: on how many ranks the command is run this time."""
TASK = "TASK"
"""The variable of an array: which of its tasks this job is."""

LONGEST_NAME = 230  # characters that PBS takes; Torque takes 15, and a shorter name is cut for it
DIRECTIVE = re.compile(r"^#(PBS|SBATCH)\b", re.MULTILINE)
PLAIN = re.compile(r"[A-Za-z0-9][\w.@:/=+-]*")
_NAME = re.compile(r"[A-Za-z][\w.+-]*")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_ARRAY = re.compile(r"(\d+)-(\d+)(?::([1-9]\d*))?")
_MEMORY = re.compile(r"([1-9]\d*)\s*([kmgt])i?b?", re.IGNORECASE)
_TAKEN = {"PATH", "HOME", "USER", "SHELL", "PWD", "OMP_NUM_THREADS"}  # a job needs them as they are


@dataclass(frozen=True)
class Variable:
    """A value that can be changed when the script is submitted, without editing it."""

    name: str  # of the shell variable
    default: str  # its value otherwise; where it is empty, a word that names it is left out


@dataclass(frozen=True)
class Job:
    """What is asked of the batch system, and what the job does."""

    command: tuple[str, ...]  # what every rank runs: the program and its arguments
    walltime: int  # seconds that the job may run
    nodes: int = 1
    ppn: int = 1  # ranks per node
    threads: int | None = None  # cores per rank; None: one is asked for
    name: str = "job"  # as the batch system shows it
    queue: str | None = None
    account: str | None = None
    gpus_per_node: int | None = None
    memory: str | None = None  # per node, such as ``64gb``
    filesystems: str | None = None  # names joined by colons, where the site wants to know
    array: str | None = None  # range of tasks ``A-B`` or ``A-B:STEP``
    after: str | None = None  # job that has to end well before this one starts
    requeue: bool = False  # start again if a node dies; else the job ends
    tolerate_node_failures: bool = False  # go on if a node dies
    modules: tuple[str, ...] = ()  # what ``module load`` is given
    setup: tuple[str, ...] = ()  # lines of shell that run before the command
    environment: str | None = None  # of Python; None: as the setup leaves it
    variables: tuple[Variable, ...] = ()  # values that ``$NAME`` stands for in the command
    once: bool = False  # run the command once, on the first node: it starts its own ranks
    ladder: bool = False  # run the command on 1, 2, 4, ... ranks, one after the other
    chain: int = 0  # jobs that go on with the command until it is finished; 0: it is one job
    progress: str = ""  # directory in which a job of a chain shows that it got further
    comment: str = ""  # for the reader of the script

    @property
    def ranks(self) -> int:
        """The ranks of the whole job."""
        return self.nodes * self.ppn

    @property
    def tasks(self) -> list[str]:
        """The numbers of the tasks of an array, which is checked."""
        match = _ARRAY.fullmatch(self.array or "")
        if match is None:
            return []
        return [str(n) for n in range(int(match[1]), int(match[2]) + 1, int(match[3] or 1))]

    @property
    def names(self) -> list[str]:
        """The variables that words of the command may name."""
        given = [variable.name for variable in self.variables]
        return given + [RANKS] * self.ladder + [TASK] * bool(self.array)

    @property
    def optional(self) -> list[str]:
        """Those of them that may be empty."""
        return [variable.name for variable in self.variables if not variable.default]


def check_job(job: Job) -> None:
    """Refuse what no batch system would take, or what it would misread.

    Raises:
        UsageError: naming the option.
    """
    if not job.command or not job.command[0]:
        raise UsageError("what should the job run? Give it after --, as in `-- python train.py`")
    for option, number in (("--nodes", job.nodes), ("--ppn", job.ppn), ("--threads", job.threads)):
        if number is not None and number < 1:
            raise UsageError(f"{option} {number}: it must be 1 or more")
    if job.gpus_per_node and job.ppn > job.gpus_per_node:
        raise UsageError(
            f"--ppn {job.ppn}: more ranks than the {job.gpus_per_node} GPUs of a node, and each "
            "rank needs one of its own"
        )
    _check_words(job)
    if job.array and job.chain:
        raise UsageError("--array and --chain: each task would have to be followed on its own")
    if job.chain and not job.progress:
        raise UsageError(
            "--chain: from what should a job of the chain go on? Give the command --checkpoint-dir "
            "DIR, or say --progress DIR"
        )
    if job.chain and job.ladder:
        raise UsageError("--chain and --ladder: one command is resumed, not a row of them")
    if job.once and job.ladder:
        raise UsageError("--once and --ladder: once, or once for each size?")
    _check_variables(job.variables)


def _check_words(job: Job) -> None:
    if not _NAME.fullmatch(job.name) or len(job.name) > LONGEST_NAME:
        raise UsageError(
            f"--name {job.name!r}: a letter, then letters, digits and . _ + -, at most "
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
            raise UsageError(f"{option} {word!r}: one word of letters, digits and . _ : @ / = + -")
    for word in job.modules:
        if not PLAIN.fullmatch(word):
            raise UsageError(f"--module {word!r}: give one module; repeat the option for more")
    span = _ARRAY.fullmatch(job.array or "0-1")
    if span is None or int(span[1]) >= int(span[2]):
        raise UsageError(f"--array {job.array!r}: a range such as 1-10, or 0-90:10")
    if job.memory is not None and not _MEMORY.fullmatch(job.memory):
        raise UsageError(f"--memory {job.memory!r}: a number with its unit, such as 64gb")


def check_setup(lines: Sequence[str]) -> None:
    """Refuse lines of setup that a batch system would not take as they are meant.

    Raises:
        UsageError: naming the line.
    """
    for line in lines:
        if DIRECTIVE.search(line):
            raise UsageError(
                f"--setup {line!r}: it comes after the first command, where no batch system reads "
                "it; `directives` of a --site file come before"
            )
        if "\r" in line:
            raise UsageError(f"--setup {line!r}: DOS line ends, which sbatch refuses")


def _check_variables(variables: tuple[Variable, ...]) -> None:
    names = [variable.name for variable in variables]
    for name in names:
        if not _VARIABLE.fullmatch(name) or name in _TAKEN or name.startswith(("PBS_", "SLURM_")):
            raise UsageError(f"--var {name}: no name for a variable of the job")
        if name in (RANKS, TASK):
            raise UsageError(f"--var {name}: the script sets it itself")
        if names.count(name) > 1:
            raise UsageError(f"--var {name}: it is given twice")


def memory_megabytes(text: str) -> int:
    """Return ``64gb`` as a number of megabytes, at least 1."""
    match = _MEMORY.fullmatch(text)
    assert match is not None  # check_job has seen it
    kilobytes = int(match[1]) * 1024 ** "kmgt".index(match[2].lower())
    return max(1, kilobytes // 1024)
