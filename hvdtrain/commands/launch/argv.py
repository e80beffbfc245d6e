"""The command lines that start a job: pure functions, one per dialect of launcher.

Sources: ``--help`` of Open MPI 5.0.11 and 4.1.4 and of MPICH 5.0.2, and runs with them; the manuals
of Intel MPI and of Slurm's srun, and the user guides of sites with Cray PALS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hvdtrain.commands.launch.hosts import RankLayout
from hvdtrain.commands.launch.launcher_choice import NAMES, OPEN_MPI, MpiLauncher
from hvdtrain.errors import UsageError
from hvdtrain.system.machine.gpus import VISIBLE
from hvdtrain.system.machine.threads import thread_variables
from hvdtrain.system.runtime.command import Command
from hvdtrain.system.runtime.detect import STEP

# Beginnings of the variables to export to ranks on other hosts, if they are set.
FORWARDED = re.compile(
    "CCL_|CONDA_PREFIX|CUBLAS_|CUDA_|FI_|GLOO_|HIP_|HOROVOD_|HSA_|HVDTRAIN_|KERAS_|KMP_|"
    "LD_LIBRARY_PATH|LD_PRELOAD|MIOPEN_|MKL_|NCCL_|OMP_|ONEAPI_|OPENBLAS_|PATH|PYTHON|PYTORCH_|"
    "ROCR_|TF_|TORCH_|UCX_|VIRTUAL_ENV|XLA_|ZE_"
)
UUID = re.compile(r"\b(GPU|MIG)-")  # the beginning of the UUID of a GPU of NVIDIA or AMD
# Environment of Intel's mpiexec: make -ppn count inside a batch job too, and forward TERM to the
# ranks.
INTEL = {"I_MPI_JOB_RESPECT_PROCESS_PLACEMENT": "0", "I_MPI_JOB_SIGNAL_PROPAGATION": "1"}


@dataclass(frozen=True)
class Launch:
    """A job to start: the launcher, and the ranks, on which hosts and bound to which cores."""

    mpi: MpiLauncher  # the launcher
    words: Sequence[str]  # the program that each rank runs, and its arguments
    layout: RankLayout  # ranks and hosts
    cores: int = 1  # cores per host
    packages: int = 1  # processor packages per host; 0: they differ in their number of cores
    ranks_per_host: int = 0  # ranks to divide a host's cores among; 0: those that run
    cpus: int = 0  # hardware threads per host
    bind: bool = True  # whether this job has all cores of its hosts, so that ranks can be bound
    threads: int | None = None  # requested threads per rank; None leaves them to the program
    gpus: int = 0  # GPUs per host
    root: bool = False  # whether the user is root, which Open MPI refuses by default
    tag: bool = False  # whether the launcher prefixes each line of output with its rank
    # Variables that set the agent by which Open MPI starts daemons on other hosts; empty: default.
    agent: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)  # the user's
    variables: Mapping[str, str] = field(default_factory=dict)  # additional ones of the ranks

    @property
    def oversubscribed(self) -> bool:
        """Whether a host gets more ranks than it has slots or cores."""
        return self.layout.over_slots or self.layout.per_host > self.cores

    @property
    def sharers(self) -> int:
        """The number of ranks that share the cores of the fullest host."""
        return max(self.layout.per_host, min(self.ranks_per_host, self.cores))

    @property
    def width(self) -> int:
        """The number of cores bound to each rank; 0 if ranks share cores and are not bound.

        A bound rank sees only its cores and uses as many threads (``threads_per_rank``). All cores
        are assigned, even if ``threads`` leaves some idle: otherwise two small jobs on one machine
        would be bound to the same first cores.
        """
        width = self.cores // self.sharers
        shared = self.oversubscribed or not self.bind or (self.threads or 1) > width
        return 0 if shared else width

    @property
    def yields(self) -> bool:
        """Whether a waiting rank, which polls, should yield its core to a computing one."""
        return self.oversubscribed or not self.gpus

    @property
    def names(self) -> str:
        """The names of the hosts, separated by commas."""
        return ",".join(host.name for host in self.layout.hosts)

    @property
    def slots(self) -> str:
        """The names of the hosts with their slots, separated by commas."""
        return ",".join(f"{host.name}:{host.slots}" for host in self.layout.hosts)

    @property
    def command(self) -> Command:
        """The command that starts the job.

        Raises:
            UsageError: the launcher does not support the placement of the ranks.
        """
        dialect = self.mpi.dialect
        variables = {**thread_variables(self.threads, self.environ), **self.variables}
        if dialect == "intel":
            variables |= {name: value for name, value in INTEL.items() if name not in self.environ}
        if self.layout.hosts and dialect in OPEN_MPI:
            variables |= self.agent
        if self.environ.get("SLURM_EXPORT_ENV") == "NONE":
            # Set by Slurm's qsub for its jobs, it would hide all other variables from the ranks:
            # Open MPI and Hydra start their daemons by srun.
            variables["SLURM_EXPORT_ENV"] = "ALL"
        if STEP in self.environ:
            # As srun's option --overlap: since Slurm 20.11 a step would wait for the cores of the
            # one that this process belongs to, e.g. the shell of `srun --pty`, forever.
            variables["SLURM_OVERLAP"] = "1"
        unset = "PYTHONUNBUFFERED" not in self.environ
        if unset and self.tag and dialect not in OPEN_MPI:
            # Python buffers 8 kB of output to the pipe of these launchers, instead of a line.
            variables["PYTHONUNBUFFERED"] = "1"
        environ = Command((), variables).environ(self.environ)
        options = BUILDERS[dialect](replace(self, environ=environ))
        # Started by its path, Open MPI is found on the other hosts, too; and with another PATH.
        named = self.layout.hosts or "PATH" in self.variables
        program = self.mpi.program if named else Path(self.mpi.program).name
        return Command((program, *options, *self.words), variables)


def forwarded(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables in ``environ`` to export to ranks on other hosts."""
    # A GPU's UUID is invalid on other hosts; a list of numbers, or an empty one, is not.
    foreign = {name for name in VISIBLE if UUID.search(environ.get(name, ""))}
    return [name for name in sorted(environ.keys() - foreign) if FORWARDED.match(name)]


def _open_mpi(launch: Launch) -> list[str]:
    four = launch.mpi.dialect == "openmpi4"
    argv = ["-n", str(launch.layout.ranks)]
    if launch.layout.hosts:
        argv += ["--host", launch.slots]
    width = _within_packages(launch)
    mapping = f"slot:PE={width}" if width else "slot"
    if launch.oversubscribed:
        mapping += ":OVERSUBSCRIBE"
    argv += ["--map-by", mapping, "--bind-to", "core" if width else "none"]
    if launch.yields and "OMPI_MCA_mpi_yield_when_idle" not in launch.environ:
        argv += ["--mca", "mpi_yield_when_idle", "1"]
    argv += ["--allow-run-as-root"] if launch.root else []
    if launch.tag:
        argv += ["--tag-output"] if four else ["--output", "tag"]
    if launch.layout.hosts:
        argv += [word for name in forwarded(launch.environ) for word in ("-x", name)]
    return argv


def _within_packages(launch: Launch) -> int:
    """Return ``launch.width`` or less: Open MPI 5 refuses ranks that span two packages."""
    if launch.width and launch.packages and launch.sharers % launch.packages == 0:
        return launch.cores // launch.packages // (launch.sharers // launch.packages)
    return 0


def _hydra(launch: Launch) -> list[str]:
    argv = ["-n", str(launch.layout.ranks)]
    argv += ["-hosts", launch.slots] if launch.layout.hosts else []
    argv += ["-bind-to", f"core:{launch.width}" if launch.width else "none"]
    # With -prepend-rank, output that begins with [1] would look like a mark.
    argv += ["-prepend-pattern", "<rank %r> "] if launch.tag else []
    return [*argv, "-genvall"]


def _intel(launch: Launch) -> list[str]:
    argv = ["-n", str(launch.layout.ranks)]
    if launch.layout.hosts:
        argv += ["-hosts", launch.names, "-ppn", str(_even(launch))]
    # auto divides the hardware threads among the ranks that run.
    sharers = launch.sharers
    domain = "auto" if sharers == launch.layout.per_host else str(launch.cpus // sharers)
    settings = {"I_MPI_PIN_DOMAIN": domain} if launch.width else {"I_MPI_PIN": "0"}
    settings |= {"I_MPI_THREAD_YIELD": "2"} if launch.yields else {}
    for name in [name for name in settings if name not in launch.environ]:
        argv += ["-genv", name, settings[name]]
    argv += ["-prepend-rank"] if launch.tag else []
    return [*argv, "-genvall"]


def _pals(launch: Launch) -> list[str]:
    argv = ["-n", str(launch.layout.ranks)]
    argv += ["--ppn", str(_even(launch))]
    argv += ["--hosts", launch.names] if launch.layout.hosts else []
    depth = ["--depth", f"{launch.width}"] if launch.width else []
    argv += [*depth, "--cpu-bind", "depth" if depth else "none"]
    argv += ["--label", "--line-buffer"] if launch.tag else []
    # PALS sets the rank, but not the number of ranks.
    return [*argv, "--envall", "--env", f"PALS_SIZE={launch.layout.ranks}"]


def _srun(launch: Launch) -> list[str]:
    argv = [f"--ntasks={launch.layout.ranks}"]
    if launch.layout.hosts:
        argv += [f"--nodes={len(launch.layout.hosts)}", f"--nodelist={launch.names}"]
    argv += [f"--ntasks-per-node={_even(launch)}"]
    if launch.width:
        argv += [f"--cpus-per-task={launch.width}", "--cpu-bind=cores"]
    else:
        argv += ["--overcommit", "--cpu-bind=none"]
    # Each rank selects its GPU by its local rank, so it has to see all of them.
    argv += ["--gpu-bind=none"] if launch.gpus else []
    # Cray's MPI needs the site's default.
    if not any(launch.environ.get(name) for name in ("SLURM_MPI_TYPE", "CRAY_MPICH_VERSION")):
        argv += ["--mpi=pmix"]
    argv += ["--label"] if launch.tag else []
    return [*argv, "--kill-on-bad-exit=1", "--export=ALL"]


BUILDERS: dict[str, Callable[[Launch], list[str]]] = {
    "openmpi4": _open_mpi,
    "openmpi5": _open_mpi,
    "mpich": _hydra,
    "intel": _intel,
    "pals": _pals,
    "srun": _srun,
}


def _even(launch: Launch) -> int:
    """Return the ranks per host, for launchers that take one number; the last may get fewer."""
    counts = [host.slots for host in launch.layout.hosts] or [launch.layout.ranks]
    if len(set(counts[:-1])) > 1 or counts[-1] > counts[0]:
        shown = ",".join(map(str, counts))
        name = NAMES[launch.mpi.dialect]
        raise UsageError(
            f"{name} starts the same number of ranks on each host, not {shown}: use --ppn K"
        )
    return counts[0]
