"""Jobs, and an emulation of PBS, which reads and runs their scripts.

It refuses the scripts that PBS or Slurm refuses or misreads, and runs the others from a copy in a
spool directory, in the home directory, with the environment of a login and without exported
variables.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.commands.submit.job import Job

OPTIONS = set("aACcehIJjklmMNopPqrRSuvVWXz")
BUILT_IN = {"select", "walltime", "place", "nodes"}
CHUNK = {"ncpus", "mpiprocs", "ompthreads", "mem", "vmem", "host", "vnode", "arch"}
WHOLE_JOB = {"ncpus", "mem", "walltime"}
DIRECTIVE = re.compile(r"#(PBS|SBATCH)\b")


def job_with(*command: str, **options: Any) -> Job:
    """Return a complete job of a minute."""
    return Job(command, **{"walltime": 60, "ppn": 1, "name": "job", **options})


class RefusedError(Exception):
    """The script is refused by qsub or sbatch, or some of its directives would be ignored."""


@dataclass
class Directives:
    """The directives of a script."""

    options: dict[str, str] = field(default_factory=dict)
    resources: dict[str, str] = field(default_factory=dict)

    @property
    def chunk(self) -> dict[str, str]:
        """The resources of each node; ``count`` is the number of nodes."""
        count, *parts = self.resources["select"].split(":")
        return {"count": count, **dict(part.split("=", 1) for part in parts)}


def read_script(text: str, site_defines: frozenset[str] = frozenset()) -> Directives:
    """Return the directives as qsub reads them; resources of the site must be defined.

    Batch systems stop reading at the first command, and silently ignore directives after it.
    """
    if not text.startswith("#!/"):
        raise RefusedError("line 1: no #! with a shell; PBS would take the user's own")
    if "\r" in text:
        raise RefusedError("it has DOS line ends, which sbatch refuses")
    directives, command = Directives(), 0
    for number, line in enumerate(text.split("\n"), 1):
        if command and DIRECTIVE.match(line):
            raise RefusedError(
                f"line {number}: {line!r} comes after the first command (line {command})"
            )
        if line.startswith("#PBS"):
            _read_directive(line.removeprefix("#PBS").strip(), directives, site_defines)
        elif not command and line.strip() and not line.startswith("#"):
            command = number
    if "J" in directives.options and directives.options.get("r") == "n":
        raise RefusedError("cannot submit non-rerunable Array Job")
    return directives


def _read_directive(text: str, directives: Directives, site_defines: frozenset[str]) -> None:
    match = re.fullmatch(r"-(\w)\s*(.*)", text)
    if match is None or match[1] not in OPTIONS:
        raise RefusedError(f"illegal option: {text}")
    option, value = match.groups()
    if option == "N" and not re.fullmatch(r"[A-Za-z][\w.+-]{0,229}", value):
        raise RefusedError(f"illegal -N value: {value}")
    if option == "k" and not set(value) <= set("oed"):
        raise RefusedError(f"illegal -k value: {value}")
    if option != "l":
        directives.options[option] = value
        return
    if "walltime=" in value and "select=" in value:
        raise RefusedError("Slurm wants select and walltime on lines of their own")
    if value.startswith("select=") and "+" in value:
        raise RefusedError("Slurm knows no chunks joined by +")
    if re.search(r"\bmem=[^:,]*[:,]", value):
        raise RefusedError("Slurm reads mem= only at the end")
    for part in value.split(","):
        name, _, amount = part.partition("=")
        if name not in BUILT_IN | WHOLE_JOB | site_defines:
            raise RefusedError(f"Unknown resource: {name}")
        if name in directives.resources:
            raise RefusedError(f"{name} is specified twice")
        directives.resources[name] = amount
    if {"select", "nodes"} <= directives.resources.keys():
        raise RefusedError("nodes= and select= exclude each other")
    if "select" in directives.resources:
        for name in directives.chunk.keys() - {"count"} - CHUNK - site_defines:
            raise RefusedError(f"Unknown resource: {name}")
    if not re.fullmatch(r"(\d+:)?\d+:\d\d|", directives.resources.get("walltime", "")):
        raise RefusedError("illegal -l value: walltime")


@dataclass
class Node:
    """A node: a home, a spool directory, and the directory of submission."""

    root: Path

    def __post_init__(self) -> None:
        for name in ("home", "spool", "submit"):
            (self.root / name).mkdir()

    @property
    def submit(self) -> Path:
        return self.root / "submit"

    def start(
        self, text: str, hosts: tuple[str, ...], directives: Directives, **values: str
    ) -> subprocess.Popen[str]:
        """Run a script as a job; ``values`` are the variables of ``qsub -v``."""
        script = self.root / "spool" / "12.server.SC"
        script.write_bytes(os.fsencode(text))
        script.chmod(0o700)
        chunk = directives.chunk
        nodefile = self.root / "spool" / "nodes"
        lines = [host for host in hosts for _ in range(int(chunk.get("mpiprocs", "1")))]
        nodefile.write_text("".join(f"{line}\n" for line in lines))
        # PBS's mom writes the path to the standard input of the user's login shell.
        job: subprocess.Popen[str] = subprocess.Popen(
            ["-bash"],
            executable="/bin/bash",
            cwd=self.root / "home",
            env={
                "HOME": str(self.root / "home"),
                "PATH": "/usr/bin:/bin",
                "LANG": "C.UTF-8",
                "PBS_ENVIRONMENT": "PBS_BATCH",
                "PBS_JOBID": "12.server",
                "PBS_JOBNAME": directives.options["N"],
                "PBS_NODEFILE": str(nodefile),
                "PBS_O_WORKDIR": str(self.submit),
                "PBS_QUEUE": "workq",
                "NCPUS": chunk.get("ncpus", "1"),
                "OMP_NUM_THREADS": chunk.get("ncpus", "1"),
                **values,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert job.stdin is not None
        job.stdin.write(f"{shlex.quote(str(script))}\n")
        job.stdin.close()
        job.stdin = None
        return job
