"""The text of a job script.

It does not depend on features of a single batch system: its initial directory, an inherited
environment, the location of the script, or the origin of the node list.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection

from hvdtrain.commands.submit.dialect import Dialect
from hvdtrain.commands.submit.job import RANKS, TASK, Job
from hvdtrain.commands.submit.site import Site
from hvdtrain.system.runtime.exit import END_MARK
from hvdtrain.system.runtime.walltime import show_clock

WIDTH = 92  # of lines of the command, before the backslash
_REFERENCE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SPECIAL = re.compile(r'[\\"$`]')  # inside double quotes

Lines = list[str]


def script_text(
    job: Job, dialect: Dialect, site: Site, chain: str = "", exit_file: str = ""
) -> str:
    """Return the text of the script; a pure function.

    Args:
        job: the requested job, checked.
        dialect: the batch system.
        site: for its directives.
        chain: path of the file through which the jobs of a chain communicate.
        exit_file: path of the file for the exit code, without the suffix of a dot and a number;
            empty: the job is not followed.
    """
    comments = [f"# {line}".rstrip() for line in job.comment.splitlines()]
    # Of the class: a script for PBS is the same where its commands are wrappers of Slurm.
    stop = [f"# To save and end early: {' '.join(type(dialect).stop)} JOB"] * dialect.in_job
    blocks = [
        [dialect.shebang, *comments, *dialect.directives(job, site), *stop],
        list(dialect.prologue),
        _variables(job, dialect),
        _exit_code(job, exit_file) if exit_file else [],
        _environment(job, site),
        _end_of_job(job) if dialect.in_job else [],
    ]
    if job.ladder:
        blocks.append(_sweep(job, dialect))
    else:
        begin, end = _chain(job, chain) if job.chain else ([], [])
        # A command that is run once may start ranks by another launcher.
        foreign = job.once and job.command[0] != "hvdtrain"
        file, check = _end_mark() if foreign else ([], [])
        blocks += [begin, file, _launch(job, str(job.ranks), str(job.ppn))]
        blocks.append(["code=$?", *check, *end, 'exit "$code"'] if check or end else [])
    return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"


def _variables(job: Job, dialect: Dialect) -> Lines:
    lines = [f"{name}=${{{name}:-{quote(text) if text else ''}}}" for name, text in job.var]
    if lines:
        lines.insert(0, f"# To change a value: {dialect.change}")
    if job.array:
        lines.append(f"export {TASK}=${{PBS_ARRAY_INDEX:-$SLURM_ARRAY_TASK_ID}}")
    return lines


def _environment(job: Job, site: Site) -> Lines:
    site_modules, modules = (
        [f"module load {' '.join(names)} || exit 2"] if names else []
        for names in (site.modules, job.module)
    )
    lines = [*site_modules, *site.setup, *modules]  # site.setup: `module use`, for the latter
    if job.env and job.env != "none":
        lines += [
            "# The Python environment; its programs come first.",
            f"HVDTRAIN_ENV=${{HVDTRAIN_ENV:-{quote(job.env)}}}",
            'HVDTRAIN_ENV=$(realpath -e -- "$HVDTRAIN_ENV") || exit 2',
            'export PATH="$HVDTRAIN_ENV/bin:$PATH"',
        ]
    return [*lines, *job.setup]


def _end_of_job(job: Job) -> Lines:
    query = f"python -m hvdtrain.system.runtime.walltime {show_clock(job.seconds)}"
    return [
        "# With --checkpoint-dir trainers save before the end of the job, and exit with 75. The",
        "# end is queried from the batch system; if that fails, it is now plus the walltime.",
        f"HVDTRAIN_WALLTIME_ENDS=$({query})",
        "export HVDTRAIN_WALLTIME_ENDS",
        "# These signals are for the ranks, which save. Without a trap this shell would end at",
        "# once, and the job with it.",
        "trap : TERM INT USR1 USR2",
    ]


def _exit_code(job: Job, file: str) -> Lines:
    number = f"${TASK}" if job.array else "${SLURM_JOB_ID:-${PBS_JOBID%%.*}}"
    return [
        "# The exit code, for --follow: PBS may forget a job at once. Empty: it was killed.",
        f'HVDTRAIN_EXIT=$(realpath -m -- {quote(file)})."{number}"',
        ': > "$HVDTRAIN_EXIT"',
        """trap 'echo "$?" > "$HVDTRAIN_EXIT"' EXIT""",
        "trap 'exit 143' TERM  # else it would be 0",
    ]


def _launch(job: Job, ranks: str, ppn: str, indent: str = "") -> Lines:
    """Return the lines of the command that starts the ranks."""
    options = f" --threads {job.threads}" if job.threads else ""
    # Otherwise one rank would get all cores of a node, and two would get no more.
    options += f" --room-for {job.ppn}" if job.ladder else ""
    options += " --stage-env" if job.stage_env else ""
    lines = [f"{indent}hvdtrain launch -n {ranks} --ppn {ppn}{options} --"]
    words = [render(word, job.names, job.optional) for word in job.command]
    line = f"{indent}    {words[0]}"
    if job.once:
        # Unquoted, a first word with "=" would be an assignment.
        assigns = words[0] == job.command[0] and "=" in words[0]
        lines, line = [], indent + (f"'{words[0]}'" if assigns else words[0])
    for word in words[1:]:
        if len(line) + 1 + len(word) > WIDTH:
            lines.append(line)
            line = f"{indent}   "
        line += f" {word}"
    return [f"{folded} \\" for folded in lines] + [line]


def _end_mark() -> tuple[Lines, Lines]:
    """Return the lines that create a file for the exit code of a training, and that read it."""
    file = f'"${END_MARK}"'
    return [
        "# If a host is lost, the mpirun of Open MPI 5 may end with 0: a training writes its exit",
        "# code to this file.",
        f"{END_MARK}=$(mktemp)",
        f"export {END_MARK}",
    ], [
        f'[ "$code" -ne 0 ] || [ ! -s {file} ] || code=$(cat {file})',
        f"rm -f {file}",
    ]


def _sweep(job: Job, dialect: Dialect) -> Lines:
    sizes = " ".join(map(str, sweep_sizes(job.nodes, job.ppn or 1)))
    ppn = f"$(({RANKS} < {job.ppn} ? {RANKS} : {job.ppn}))"
    return [
        "# Run each size that fits on the nodes of this job.",
        f"NODES=${{NODES:-{dialect.nodes}}}",
        f"for {RANKS} in {sizes}; do",
        f'    [ "${RANKS}" -le $((NODES * {job.ppn})) ] || break',
        *_launch(job, f'"${RANKS}"', ppn, "    "),
        "    code=$?",
        '    [ "$code" -eq 0 ] || exit "$code"',
        "done",
    ]


def sweep_sizes(nodes: int, ppn: int) -> list[int]:
    """Return numbers of ranks, doubling: on one node up to ``ppn``, then on whole nodes."""
    small = [2**k for k in range(ppn.bit_length()) if 2**k < ppn]
    return small + [ppn * 2**k for k in range(nodes.bit_length())]


def _chain(job: Job, file: str) -> tuple[Lines, Lines]:
    """Return the lines before and after the command of a job of a chain."""
    words = (quote(f"--file={file}"), render(f"--progress={job.progress}", job.names))
    word = " ".join(("python -m hvdtrain.commands.submit.chain", *words))
    return [
        "# Has an earlier job of the chain finished the training?",
        f"case $({word} begin) in",
        "    go) ;;",
        "    over) exit 0 ;;",
        "    *) exit 1 ;;",
        "esac",
    ], [f'{word} end "$code"']


def quote(word: str) -> str:
    """Return ``word`` quoted for bash, on one line.

    Bash accepts a newline inside quotes, but batch systems read the script, too: a line that begins
    with ``#PBS`` could be read as a directive, and sbatch refuses a CR.
    """
    if not _CONTROL.search(word):
        return shlex.quote(word)
    plain = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _CONTROL.sub(lambda match: f"\\{ord(match[0]):03o}", plain) + "'"


def render(word: str, variables: Collection[str], optional: Collection[str] = ()) -> str:
    """Return ``word`` quoted, except ``$NAME`` and ``${NAME}`` with a name in ``variables``.

    Any other ``$`` is literal. A word with a variable in ``optional`` is left out if the variable
    is empty.
    """
    text, end, names = "", 0, []
    for match in _REFERENCE.finditer(word):
        name = match[1] or match[2]
        if name in variables:
            text += _inner(word[end : match.start()]) + f"${{{name}}}"
            end = match.end()
            names.append(name)
    if not names:
        return quote(word)
    text += _inner(word[end:])
    # "$A/b" reads better than "${A}/b", if it means the same.
    text = re.sub(r"(?<!\\)\$\{(\w+)\}(?!\w)", r"$\1", text)
    guard = next((name for name in names if name in optional), None)
    return f'${{{guard}:+"{text}"}}' if guard else f'"{text}"'


def _inner(literal: str) -> str:
    """Return ``literal`` quoted for the inside of double quotes."""
    escaped = _SPECIAL.sub(r"\\\g<0>", literal)
    if not _CONTROL.search(escaped):
        return escaped
    # Double quotes have no escape for a newline: they are closed and reopened around it.
    return _CONTROL.sub(lambda match: f'"{quote(match[0])}"', escaped)
