"""The argv with which each kind of launcher starts a job: pure functions, one a dialect.

Sources: ``--help`` of Open MPI 5.0.11 and 4.1.4 and of MPICH 5.0.2, and trials with them; the
manuals of Intel MPI and of Slurm's srun, and the user guides of sites with Cray PALS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.launch.layout import Layout
from hvdtrain.launch.mpirun import AGENT, NAMES, OPEN_MPI, Mpi
from hvdtrain.launch.run import Command

# Variables that ranks on other hosts need too, where they are set.
FORWARDED = (
    "CUDA_",
    "FI_",
    "HOROVOD_",
    "HVDTRAIN_",
    "KERAS_",
    "KMP_",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "MKL_",
    "NCCL_",
    "OMP_",
    "PATH",
    "PYTHON",
    "PYTORCH_",
    "TF_",
    "TORCH_",
    "UCX_",
    "VIRTUAL_ENV",
    "XLA_",
)
# What Intel's mpiexec reads from its own environment: -ppn counts inside a batch job too, and TERM
# is handed on to the ranks.
INTEL = {"I_MPI_JOB_RESPECT_PROCESS_PLACEMENT": "0", "I_MPI_JOB_SIGNAL_PROPAGATION": "1"}


@dataclass(frozen=True)
class Job:
    """What is to be started, whatever the dialect."""

    layout: Layout
    """Ranks and hosts."""
    cores: int = 1
    """Cores of a host."""
    packages: int = 1
    """Processor packages of a host, with as many cores each; 0 where they differ."""
    room: int = 0
    """Ranks to share a host's cores out among, also where there are fewer; 0: those there are."""
    cpus: int = 0
    """Hardware threads of a host."""
    bind: bool = True
    """Whether all of its cores are this job's, so that ranks may be bound to them."""
    threads: int | None = None
    """Threads of a rank as asked for; None leaves them to the program."""
    gpus: int = 0
    """GPUs of a host."""
    root: bool = False
    """Whether the user is root, which Open MPI refuses by itself."""
    tag: bool = False
    """Whether each line of output is to be marked with its rank."""
    agent: str = ""
    """Program by which Open MPI starts its daemons on other hosts; empty leaves it to Open MPI."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """The user's environment; what is set there is left alone."""

    @property
    def crowded(self) -> bool:
        """Whether some host gets more ranks than it has slots or cores."""
        return self.layout.over_slots or self.layout.per_host > self.cores

    @property
    def sharers(self) -> int:
        """Ranks that share out the cores of the fullest host; where they fit, a core each."""
        return max(self.layout.per_host, min(self.room, self.cores))

    @property
    def width(self) -> int:
        """Cores for each rank to itself; 0 where ranks have to share cores, and none is bound.

        Bound, a rank sees its own cores only and takes as many threads (``threads_per_rank``). All
        cores are dealt out, also where ``threads`` leaves some idle: two small jobs on one machine
        would else be bound to the same first cores.
        """
        width = self.cores // self.sharers
        shared = self.crowded or not self.bind or (self.threads or 1) > width
        return 0 if shared else width

    @property
    def yields(self) -> bool:
        """Whether a rank that waits should make way: it polls, on a core that computes."""
        return self.crowded or not self.gpus


def build(mpi: Mpi, job: Job, words: Sequence[str]) -> Command:
    """The command that starts ``words``, a program and its arguments, on the ranks of ``job``.

    Raises:
        UsageError: this launcher cannot place ranks so.
    """
    own = {"OMP_NUM_THREADS": str(job.threads)} if job.threads else {}
    if mpi.dialect == "intel":
        own |= {name: value for name, value in INTEL.items() if name not in job.environ}
    if job.layout.hosts and job.agent and mpi.dialect in AGENT:
        own[AGENT[mpi.dialect]] = job.agent
    if job.environ.get("SLURM_EXPORT_ENV") == "NONE":
        # As its qsub sets it for the jobs that it makes, it would hide all else from the ranks:
        # Open MPI and Hydra start their daemons by srun.
        own["SLURM_EXPORT_ENV"] = "ALL"
    if job.tag and mpi.dialect not in OPEN_MPI and "PYTHONUNBUFFERED" not in job.environ:
        # Into the pipe of these launchers Python writes only every 8 kB, not line by line.
        own["PYTHONUNBUFFERED"] = "1"
    argv = BUILDERS[mpi.dialect](mpi, replace(job, environ={**job.environ, **own}))
    return Command((*argv, *words), own)


def forwarded(environ: Mapping[str, str]) -> list[str]:
    """Names of the variables in ``environ`` that ranks on other hosts must see too."""
    names = [name for name in sorted(environ) if name.startswith(FORWARDED)]
    # A GPU's UUID means nothing on another host; a list of numbers, or an empty one, does.
    devices = environ.get("CUDA_VISIBLE_DEVICES", "")
    foreign = devices.startswith(("GPU-", "MIG-"))
    return [name for name in names if not (foreign and name == "CUDA_VISIBLE_DEVICES")]


def _open_mpi(mpi: Mpi, job: Job) -> list[str]:
    four = mpi.dialect == "openmpi4"
    argv = [_program(mpi, job), "-n", str(job.layout.ranks)]
    if job.layout.hosts:
        argv += ["--host", _with_slots(job)]
    width = _within_packages(job)
    mapping = f"slot:PE={width}" if width else "slot"
    if job.crowded:
        mapping += ":OVERSUBSCRIBE"
    argv += ["--map-by", mapping, "--bind-to", "core" if width else "none"]
    if job.yields and "OMPI_MCA_mpi_yield_when_idle" not in job.environ:
        argv += ["--mca", "mpi_yield_when_idle", "1"]
    argv += ["--allow-run-as-root"] if job.root else []
    if job.tag:
        argv += ["--tag-output"] if four else ["--output", "tag"]
    if job.layout.hosts:
        argv += [word for name in forwarded(job.environ) for word in ("-x", name)]
    return argv


def _within_packages(job: Job) -> int:
    """``job.width``, no rank reaching from one package into the next: Open MPI 5 refuses that."""
    if job.width and job.packages and job.sharers % job.packages == 0:
        return job.cores // job.packages // (job.sharers // job.packages)
    return 0


def _hydra(mpi: Mpi, job: Job) -> list[str]:
    argv = [_program(mpi, job), "-n", str(job.layout.ranks)]
    argv += ["-hosts", _with_slots(job)] if job.layout.hosts else []
    argv += ["-bind-to", f"core:{job.width}" if job.width else "none"]
    # With -prepend-rank a text that itself begins with [1] could not be told from a mark.
    argv += ["-prepend-pattern", "<rank %r> "] if job.tag else []
    return [*argv, "-genvall"]


def _intel(mpi: Mpi, job: Job) -> list[str]:
    argv = [_program(mpi, job), "-n", str(job.layout.ranks)]
    if job.layout.hosts:
        argv += ["-hosts", _names(job), "-ppn", str(_even(mpi, job))]
    # auto deals the hardware threads out among the ranks that there are.
    domain = f"{job.cpus // job.sharers}" if job.sharers > job.layout.per_host else "auto"
    pinning = ["I_MPI_PIN_DOMAIN", domain] if job.width else ["I_MPI_PIN", "0"]
    settings = [pinning, *([["I_MPI_THREAD_YIELD", "2"]] if job.yields else [])]
    argv += [word for one in settings if one[0] not in job.environ for word in ("-genv", *one)]
    argv += ["-prepend-rank"] if job.tag else []
    return [*argv, "-genvall"]


def _pals(mpi: Mpi, job: Job) -> list[str]:
    argv = [_program(mpi, job), "-n", str(job.layout.ranks)]
    argv += ["--ppn", str(_even(mpi, job))]
    argv += ["--hosts", _names(job)] if job.layout.hosts else []
    argv += (
        ["--depth", f"{job.width}", "--cpu-bind", "depth"] if job.width else ["--cpu-bind", "none"]
    )
    argv += ["--label", "--line-buffer"] if job.tag else []
    # PALS tells a rank its number, but not how many there are.
    return [*argv, "--envall", "--env", f"PALS_SIZE={job.layout.ranks}"]


def _srun(mpi: Mpi, job: Job) -> list[str]:
    argv = [_program(mpi, job), f"--ntasks={job.layout.ranks}"]
    if job.layout.hosts:
        argv += [f"--nodes={len(job.layout.hosts)}", f"--nodelist={_names(job)}"]
    argv += [f"--ntasks-per-node={_even(mpi, job)}"]
    if job.width:
        argv += [f"--cpus-per-task={job.width}", "--cpu-bind=cores"]
    else:
        argv += ["--overcommit", "--cpu-bind=none"]
    # Each rank picks its GPU by its number on the host, so it has to see them all.
    argv += ["--gpu-bind=none"] if job.gpus else []
    # Cray's MPI wants the site's own default.
    if not any(job.environ.get(name) for name in ("SLURM_MPI_TYPE", "CRAY_MPICH_VERSION")):
        argv += ["--mpi=pmix"]
    argv += ["--label"] if job.tag else []
    return [*argv, "--kill-on-bad-exit=1", "--export=ALL"]


BUILDERS: dict[str, Callable[[Mpi, Job], list[str]]] = {
    "openmpi4": _open_mpi,
    "openmpi5": _open_mpi,
    "mpich": _hydra,
    "intel": _intel,
    "pals": _pals,
    "srun": _srun,
}


def _program(mpi: Mpi, job: Job) -> str:
    """The launcher as one would type it; by its path where a host is named.

    Open MPI started by its path finds itself on the other hosts as well.
    """
    return mpi.program if job.layout.hosts else Path(mpi.program).name


def _with_slots(job: Job) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in job.layout.hosts)


def _names(job: Job) -> str:
    return ",".join(host.name for host in job.layout.hosts)


def _even(mpi: Mpi, job: Job) -> int:
    """Ranks a host, for a launcher that gives each host as many, and the last one the rest."""
    counts = [host.slots for host in job.layout.hosts] or [job.layout.ranks]
    if len(set(counts[:-1])) > 1 or counts[-1] > counts[0]:
        shown = ",".join(map(str, counts))
        raise UsageError(
            f"{NAMES[mpi.dialect]} starts the same number of ranks on each host, not {shown}: "
            "give --ppn K"
        )
    return counts[0]
