"""Slurm: sbatch, scontrol, scancel."""

from __future__ import annotations

import re
from collections.abc import Sequence

from typing_extensions import override

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
from hvdtrain.commands.submit.job import Job, memory_megabytes
from hvdtrain.commands.submit.site import Site
from hvdtrain.system.runtime.command import Command
from hvdtrain.system.runtime.walltime import show_clock

QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "SUSPENDED")
HELD = ("REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
STARTED = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "RESIZING", "STOPPED", "EXPEDITING")
# All others: the job has ended.
PHASES = dict.fromkeys(QUEUED + HELD, WAITING) | dict.fromkeys(STARTED, RUNNING)


class Slurm(Dialect):
    """Slurm with its own commands."""

    name, suffix = "slurm", ".slurm"
    change, listing = "sbatch --export=ALL,NAME=VALUE SCRIPT", "squeue"
    stop = ("scancel", "--full", "-s", "URG")  # without --full it signals steps, not the script
    nodes = "$SLURM_JOB_NUM_NODES"

    @override
    def directives(self, job: Job, site: Site) -> list[str]:
        queue = "--qos" if site.queue_is_qos else "--partition"
        lines = [f"--job-name={job.name}"]
        lines += [f"{queue}={job.queue}"] if job.queue else []
        lines += [f"--account={job.account}"] if job.account else []
        lines += [f"--nodes={job.nodes}", f"--ntasks-per-node={job.ppn}"]
        lines += [f"--cpus-per-task={job.threads}"] if job.threads else []
        lines += [f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []
        lines += [f"--mem={memory_megabytes(job.memory)}M"] if job.memory else []
        lines.append(f"--time={show_clock(job.seconds)}")
        lines += [f"--licenses={job.filesystems.replace(':', ',')}"] if job.filesystems else []
        lines += [f"--array={job.array}"] if job.array else []
        if job.after:  # without the second option it would wait forever if that job fails
            lines += [f"--dependency=afterok:{job.after}", "--kill-on-invalid-dep=yes"]
        lines.append("--requeue" if job.requeue else "--no-requeue")
        lines += ["--no-kill"] if job.tolerate_node_failures else []
        lines += [f"--mail-user={job.email}", "--mail-type=END,FAIL"] if job.email else []
        return [f"#SBATCH {line}" for line in [*lines, *site.directives, *job.directive]]

    @override
    def submit(self, script: str, log: str, *, array: str | None, waits: str | None) -> Command:
        log = log.replace("%", "%%") + (".%a" if array else "")
        words = ["sbatch", "--parsable", f"--output={log}"]
        words += [f"--dependency={waits}"] if waits else []
        return Command((*words, script))

    @override
    def read_id(self, output: str) -> str | None:
        ids = re.findall(r"^(\d+)(?:;\S+)?$", output, re.MULTILINE)
        return ids[-1] if ids else None

    @override
    def queries(self, job_id: str) -> Sequence[Query]:
        return (Query(Command(("scontrol", "show", "job", "-o", job_id)), read),)

    @override
    def delete(self, job_ids: Sequence[str]) -> Command:
        return Command(("scancel", *job_ids))


def read(output: str) -> State | None:
    """Return the state in the output of ``scontrol show job -o``: a line per job or task."""
    if "Invalid job id specified" in output:
        return State(GONE)
    lines = {line: state for line in output.splitlines() if (state := _read_line(line))}
    tasks = {
        match[1]: state
        for line, state in lines.items()
        if (match := re.search(r" ArrayTaskId=(\S+)", line))
    }
    return array_state(tasks) if tasks else next(iter(lines.values()), None)


def _read_line(line: str) -> State | None:
    # Values may contain blanks and equal signs. Those read here do not, except the path of the log,
    # which ends at the next key.
    word = re.search(r"\bJobState=(\w+)(?: Reason=(\S+))?", line)
    if word is None:
        return None
    phase = PHASES.get(word[1], ENDED)
    if word[1] == "CANCELLED" and re.search(r" NodeList=(\(null\))? ", line):
        return NEVER_RAN
    reason = word[2] if phase == WAITING and word[2] not in (None, "None") else ""
    log = re.split(r" [A-Z]\w*=", line.partition(" StdOut=")[2], maxsplit=1)[0].rstrip()
    code = re.search(r"\bExitCode=(\d{1,9}):(\d{1,9})\b", line)
    return State(
        phase,
        word[1].lower() + (f" ({reason})" if reason else ""),
        exit_code(word[1], int(code[1]), int(code[2])) if phase == ENDED and code else None,
        log_files(log),
        host=host[1] if (host := re.search(r" BatchHost=(\S+)", line)) else "",
    )


def exit_code(state: str, code: int, number: int) -> int:
    """Return ``ExitCode=code:number`` as in a shell; 0 only if the job completed."""
    if number:
        return WALLTIME_OVER if state == "TIMEOUT" else SIGNALLED + number
    if code == 0 and state != "COMPLETED":
        return WALLTIME_OVER if state == "TIMEOUT" else 1
    return code
