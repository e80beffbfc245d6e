"""The launcher on the PATH and its dialect, detected by ``--version``."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.commands.launch.hosts import SHOWN
from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.command import Command, run

# The first lines of `--version`. Spectrum MPI 10 is based on Open MPI 4; the mpiexec of Open MPI 4
# calls itself OpenRTE.
VERSIONS = (
    ("openmpi4", re.compile(r"\((?:Open MPI|OpenRTE)\)\s+([1-4]\.[\w.]+)")),
    ("openmpi4", re.compile(r"\(IBM Spectrum MPI\)\s+([\w.]+)")),
    ("openmpi5", re.compile(r"\((?:Open MPI|OpenRTE)\)\s+([\w.]+)")),
    ("intel", re.compile(r"Intel\(R\) MPI Library for Linux\*? OS,\s+Version\s+([\w.]+)")),
    ("mpich", re.compile(r"HYDRA build details:\s+Version:\s+([\w.]+)")),
    ("pals", re.compile(r"\Ampiexec version ([\w.]+)")),
    ("srun", re.compile(r"\Aslurm(?:-\w+)? ([\w.]+)")),
)
OPEN_MPI = ("openmpi4", "openmpi5")
# The variable with the agent, the program that starts daemons on other hosts.
AGENT = {"openmpi4": "OMPI_MCA_plm_rsh_agent", "openmpi5": "PRTE_MCA_plm_ssh_agent"}
AGENT_NAME = re.compile(r"(?:OMPI|PRTE)_MCA_[a-z]+_[rs]sh_agent")
AGENT_SET = re.compile(r"^\s*[a-z]+_[rs]sh_agent\s*=\s*(.*?)\s*$", re.MULTILINE)  # in a file
SITE_AGENTS = ("PE_HOSTFILE", "LOADL_STEP_ID")  # set in jobs of Grid Engine and LoadLeveler
REMEDY = "load the MPI module that Horovod was built with, or pip install 'hvdtrain[mpi]'"
NAMES = {
    "openmpi4": "Open MPI",
    "openmpi5": "Open MPI",
    "mpich": "MPICH",
    "intel": "Intel MPI",
    "pals": "Cray PALS",
    "srun": "Slurm",
}


@dataclass(frozen=True)
class MpiLauncher:
    """A launcher of MPI programs."""

    dialect: str  # openmpi4, openmpi5, mpich (any Hydra), intel, pals or srun
    program: str  # its path
    version: str  # e.g. "5.0.11"; empty: unknown

    def __str__(self) -> str:
        return f"{NAMES[self.dialect]} {self.version}".strip()


def find_mpi(environ: Mapping[str, str]) -> MpiLauncher:
    """Return the first launcher on the PATH of ``environ``: mpirun, mpiexec; srun in a Slurm job.

    Raises:
        UsageError: there is none, or none of a known dialect.
    """
    unrecognized, names = [], ["mpirun", "mpiexec"]
    names += ["srun"] if environ.get("SLURM_JOB_ID") else []
    for name in names:
        program = shutil.which(name, path=environ.get("PATH"))
        if program is None:
            continue
        done = run(Command((program, "--version"), env=dict(environ)), timeout=30)
        if match := classify(done.output) or (("srun", "") if name == "srun" else None):
            dialect, version = match
            hydra = Path(program).with_name("mpiexec.hydra")
            if dialect == "intel" and hydra.exists():  # mpirun is a script that forwards no signals
                program = str(hydra)
            return MpiLauncher(dialect, program, version)
        # For example, Debian's Slurm has an mpirun that only calls srun.
        problem = "unknown version"
        if not done.ok:
            lines = done.output.strip().splitlines() or [""]
            line = lines[0 if lines[-1][:1] == " " else -1]  # a usage text ends indented
            problem = f"--version ended with code {done.exit_code}: {line[:SHOWN]}"
        unrecognized.append(f"{program}: {problem}")
    unknown = f" ({'; '.join(unrecognized)})" if unrecognized else ""
    raise UsageError(f"no mpirun, mpiexec or srun of an MPI is on the PATH{unknown}: {REMEDY}")


def classify(output: str) -> tuple[str, str] | None:
    """Return dialect and version by the ``output`` of ``--version``; None: unknown."""
    for dialect, pattern in VERSIONS:
        match = pattern.search(output)
        if match:
            return dialect, match[1]
    return None


def agent_settings(mpi: MpiLauncher, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make Open MPI's agent for other hosts ignore TERM.

    The agent is the one set in the environment or in a parameter file of Open MPI, by default ssh.
    If its program does not exist, the result is empty.
    """
    if mpi.dialect not in AGENT or any(name in environ for name in SITE_AGENTS):
        return {}
    chosen = {name: value for name, value in environ.items() if AGENT_NAME.fullmatch(name)}
    if not chosen:
        chosen = {AGENT[mpi.dialect]: _agent_in_file(mpi, environ) or "ssh"}
    wrapped = {name: _deaf_to_term(value, environ) for name, value in chosen.items()}
    return {name: value for name, value in wrapped.items() if value}


def _agent_in_file(mpi: MpiLauncher, environ: Mapping[str, str]) -> str:
    """Return the agent set in a parameter file of Open MPI, the user's first; empty: none."""
    root, home = Path(mpi.program).absolute().parent.parent, Path(environ.get("HOME", "/"))
    files = [home / f".{name}" / "mca-params.conf" for name in ("prte", "openmpi")]
    files += [
        folder / f"{name}-mca-params.conf"
        for folder in (root / "etc", Path("/etc/openmpi"))
        for name in ("prte", "openmpi")
    ]
    for file in files:
        with contextlib.suppress(OSError):
            if agents := AGENT_SET.findall(file.read_text(errors="replace")):
                return str(agents[-1])
    return ""


def _deaf_to_term(agent: str, environ: Mapping[str, str]) -> str:
    """Return ``agent`` wrapped so that it ignores TERM; empty: leave it as it is.

    It consists of alternatives separated by colons, each a program and its arguments.
    """
    wrapper = Path(__file__).with_name("deaf_to_term")
    if not os.access(wrapper, os.X_OK) or re.search(r"[\s:]", str(wrapper)):  # would be split
        return ""
    for alternative in agent.split(":"):
        words = alternative.split()
        if words and shutil.which(words[0], path=environ.get("PATH")):
            # Open MPI adds -x to an ssh, which it does not recognize when wrapped.
            no_x = ["-x"] if Path(words[0]).name == "ssh" and "-x" not in words else []
            return " ".join([str(wrapper), *words, *no_x])
    return ""
