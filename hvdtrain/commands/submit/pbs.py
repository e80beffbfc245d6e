"""PBS: OpenPBS and PBS Professional, and the PBS commands of Slurm's Torque wrappers.

A script has to be valid for both, so it requests nothing that either refuses: one ``select`` and
one ``walltime``, each on a separate line, no chunks joined by ``+``, ``mem`` last. Resources that a
site has to define (GPUs, file systems) come only from its site file: PBS refuses unknown ones.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from typing_extensions import override

from hvdtrain.commands.submit import slurm
from hvdtrain.commands.submit.dialect import (
    ENDED,
    GONE,
    NEVER_RAN,
    RUNNING,
    SIGNALLED,
    WAITING,
    WALLTIME_OVER,
    Dialect,
    Query,
    State,
    array_state,
    log_files,
)
from hvdtrain.commands.submit.job import Job
from hvdtrain.commands.submit.site import Site
from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.command import Command
from hvdtrain.system.runtime.walltime import show_clock

PHASES = {
    **dict.fromkeys("QHWTMSU", WAITING),
    **dict.fromkeys("RBE", RUNNING),
    **dict.fromkeys("FCX", ENDED),
}
WORDS = {"Q": "queued", "H": "held", "B": "begun", "R": "running", "E": "exiting"}
WORDS |= dict.fromkeys("FX", "finished")

_PLAIN = re.compile(r"[\w./+=@^%-]+", re.ASCII)  # of a path
_STATUS = re.compile(r"-?\d{1,9}", re.ASCII)
_TASK = re.compile(r"\d+\[(\d+)\]")  # id of a task of an array

JOB_KILLED_BY_WALLTIME = -29  # JOB_EXEC_KILL_WALLTIME in pbs_error.h
# Values of substate that invalidate an exit status of 0: a running job was deleted by qdel, or
# tasks of an array failed.
FAILED = ("91", "93")
# Comments of tasks that PBS has dropped before the array: their other values are the array's.
SUBJOB = {"Subjob finished": 0, "Subjob failed": None, "Subjob terminated": None}
HELD = "too many failed attempts"  # in the comment of a job that PBS holds after them
SIGNAL_OFFSET = 256  # PBS adds it to the number of the signal that ended the job


class Pbs(Dialect):
    """PBS, or Slurm's Torque wrappers."""

    name, suffix = "pbs", ".pbs"
    change, listing = "qsub -v NAME=VALUE,NAME=VALUE SCRIPT", "qstat"
    # The login shell above a script has no trap: USR1 or TERM ends it and the job. It ignores URG.
    stop: tuple[str, ...] = ("qsig", "-s", "SIGURG")
    nodes = '${SLURM_JOB_NUM_NODES:-$(sort -u "${PBS_NODEFILE:-/etc/hostname}" | wc -l)}'

    prologue = (
        "# PBS starts a job in the home directory.",
        'cd -- "${PBS_O_WORKDIR:-.}" || exit 2',
        "# PBS sets OMP_NUM_THREADS to all cores of a chunk, for each rank; your own value stays.",
        "# With Slurm's qsub -v, SLURM_EXPORT_ENV is NONE: ranks would get no environment.",
        '[ "$OMP_NUM_THREADS" != "$NCPUS" ] || unset OMP_NUM_THREADS',
        "unset SLURM_EXPORT_ENV",
    )

    def __init__(self, wraps_slurm: bool = False) -> None:
        """Set ``wraps_slurm`` if qsub and qstat are Slurm's Torque wrappers."""
        self.wraps_slurm = self.inherits = wraps_slurm
        self.stop = slurm.Slurm.stop if wraps_slurm else Pbs.stop

    @override
    def directives(self, job: Job, site: Site) -> list[str]:
        lines = [f"-N {job.name}"]
        lines += [f"-q {job.queue}"] if job.queue else []
        lines += [f"-A {job.account}"] if job.account else []
        lines.append(f"-l select={self._select(job, site)}")
        lines.append(f"-l walltime={show_clock(job.seconds)}")
        has_placement = any("place=" in line for line in (*site.directives, *job.directive))
        if (job.nodes > 1 or site.whole_nodes) and not has_placement:
            lines.append("-l place=scatter")  # without it PBS may put two chunks on one node
        lines += [f"-l filesystems={job.filesystems}"] if job.filesystems else []
        lines += [f"-J {job.array}"] if job.array else []
        lines += [f"-W depend=afterok:{job.after}"] if job.after else []
        if job.requeue or not job.array:  # qsub refuses arrays that are not rerunable
            lines.append(f"-r {'y' if job.requeue else 'n'}")
        lines += ["-W tolerate_node_failures=all"] if job.tolerate_node_failures else []
        lines += [f"-M {job.email}", "-m ae"] if job.email else []
        lines += [*site.directives, *job.directive]
        # One file for both streams, written while the job runs, not only at its end.
        return [f"#PBS {line}" for line in [*lines, "-j oe", "-k oed"]]

    def _select(self, job: Job, site: Site) -> str:
        parts = [str(job.nodes)]
        if not site.whole_nodes:
            parts += [f"ncpus={job.cores_per_node}", f"mpiprocs={job.ppn}"]
        if job.gpus_per_node and site.gpu_resource:
            parts.append(f"{site.gpu_resource}={job.gpus_per_node}")
        parts += [site.select] if site.select else []
        parts += [f"mem={job.memory}"] if job.memory else []
        return ":".join(parts)

    @override
    def submit(self, script: str, log: str, *, array: str | None, waits: str | None) -> Command:
        # -j is a directive, too, but the wrappers of Slurm read it only on the command line.
        words = ["qsub", "-j", "oe"]
        if array:
            log += ".%a" if self.wraps_slurm else ".^array_index^"
            words += ["-J", array]
        # PBS reads text before a colon as a host: such a log gets its default path.
        words += ["-o", log] if _PLAIN.fullmatch(log) else []
        words += ["-W", f"depend={waits}"] if waits else []
        if self.wraps_slurm and not _PLAIN.fullmatch(script):
            raise UsageError(
                f"--logs: Slurm's qsub passes {script!r} to a shell unquoted; use another "
                "directory, or --scheduler slurm"
            )
        return Command((*words, script))

    @override
    def log_path(self, log: str, job: Job, job_id: str, task: str = "") -> Path:
        if _PLAIN.fullmatch(log):
            return super().log_path(log, job, job_id, task)
        number = re.match(r"\d+", job_id)
        name = f"{job.name}.o{number[0] if number else job_id}"
        return Path.cwd() / (f"{name}.{task}" if task else name)

    @override
    def lost_log(self, log: str, host: str) -> str:
        text = super().lost_log(log, host)
        if self.wraps_slurm:
            return text
        return f"{text}, or *.OU in /var/spool/pbs/undelivered there"

    @override
    def read_id(self, output: str) -> str | None:
        ids = re.findall(r"^\d+(?:\[\])?(?:\.[\w.-]+)?$", output, re.MULTILINE)
        return ids[-1] if ids else None

    @override
    def queries(self, job_id: str) -> Sequence[Query]:
        # PBS writes invalid JSON if a variable of the job contains a quote; then its text is read.
        # -x shows finished jobs if PBS keeps them; Torque does not know -x. -t shows the tasks of
        # an array; the array itself always ends with 0.
        if self.wraps_slurm:
            return slurm.Slurm().queries(job_id)
        words = ("-t", "-f") if "[]" in job_id else ("-f",)
        return (
            Query(Command(("qstat", "-x", *words, "-F", "json", job_id)), read_json),
            Query(Command(("qstat", "-x", *words, job_id)), read_text),
            Query(Command(("qstat", *words, job_id)), read_text),
        )

    @override
    def delete(self, job_ids: Sequence[str]) -> Command:
        return Command(("qdel", *job_ids))


def read_json(output: str) -> State | None:
    """Return the state in the output of ``qstat -f -F json``."""
    try:
        jobs = json.loads(output)["Jobs"]
        return _read({name: {k: str(v) for k, v in job.items()} for name, job in jobs.items()})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def read_text(output: str) -> State | None:
    """Return the state in the output of ``qstat -f``."""
    if "Unknown Job Id" in output:
        return State(GONE)
    _, *parts = re.split(r"^Job Id: *(\S+)$", output.replace("\n\t", ""), flags=re.MULTILINE)
    jobs: dict[str, dict[str, str]] = {}
    for name, part in zip(parts[::2], parts[1::2], strict=True):
        pairs = re.findall(r"^[ \t]+([\w.]+) = (.*)$", part, re.MULTILINE)
        # The first counts: a variable may contain such lines, too.
        jobs.setdefault(name, dict(reversed(pairs)))
    return _read(jobs)


def _read(jobs: Mapping[str, Mapping[str, str]]) -> State | None:
    """Return the state of the first job, or of the array of the tasks."""
    states = {name: state for name, values in jobs.items() if (state := _state(name, values))}
    tasks = {match[1]: state for name, state in states.items() if (match := _TASK.match(name))}
    job = next((state for name, state in states.items() if not _TASK.match(name)), None)
    return array_state(tasks, job.phase if job else None) if tasks else job


def _state(name: str, values: Mapping[str, str]) -> State | None:
    letter = values.get("job_state", "")
    if letter not in PHASES:
        return None
    phase = PHASES[letter]
    path = values.get("Output_Path", "").partition(":")[2]
    task = _TASK.match(name)
    path = path.replace("^array_index^", task[1] if task else "")  # the log of each task
    status = values.get("Exit_status", values.get("exit_status"))
    if letter == "F" and not status and "stime" not in values:
        return NEVER_RAN
    known = phase == ENDED and status and _STATUS.fullmatch(status)
    code = exit_code(int(status)) if known and status else None
    comment = values.get("comment", "")
    if comment in SUBJOB:
        code = SUBJOB[comment]
    elif values.get("substate") in FAILED:
        code = code or None
    return State(
        phase,
        WORDS.get(letter, letter) + (f" ({comment})" if comment and phase == WAITING else ""),
        code,
        log_files(path),
        host=values.get("exec_host", "").partition("/")[0],
        failure=_failure(letter, comment),
    )


def _failure(letter: str, comment: str) -> str:
    """Return the reason why PBS will not start a job; empty: it will."""
    if letter != "H" or HELD not in comment:
        return ""
    return (
        f"PBS could not start it and holds it ({comment}); probably the directory of its log does "
        "not exist on the node: submit from a directory that all nodes share, or use --logs"
    )


def exit_code(status: int) -> int:
    """Return ``Exit_status`` as an exit code of a shell."""
    if status == JOB_KILLED_BY_WALLTIME:
        return WALLTIME_OVER
    if status < 0:  # PBS could not run the job
        return 1
    if status >= SIGNAL_OFFSET:
        return SIGNALLED + min(status - SIGNAL_OFFSET, int(signal.SIGRTMAX))
    return status
