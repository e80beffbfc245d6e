"""The argv with which each kind of launcher starts a job: pure functions, one per dialect.

Sources: ``--help`` of Open MPI 5.0.11 and 4.1.4 and of MPICH 5.0.2, and trials with them; the
manuals of Intel MPI and of Slurm's srun, and the user guides of sites with Cray PALS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hvdtrain.commands.launch.layout import Layout
from hvdtrain.commands.launch.mpirun import NAMES, OPEN_MPI, Mpi
from hvdtrain.errors import UsageError
from hvdtrain.system.machine.threads import thread_variables
from hvdtrain.system.runtime.command import Command

# Variables that ranks on other hosts need too, where they are set.
FORWARDED = (
    *("CUDA_", "FI_", "GLOO_", "HOROVOD_", "HVDTRAIN_", "KERAS_", "KMP_", "LD_LIBRARY_PATH"),
    *("LD_PRELOAD", "MKL_", "NCCL_", "OMP_", "PATH", "PYTHON", "PYTORCH_", "TF_", "TORCH_", "UCX_"),
    *("VIRTUAL_ENV", "XLA_"),
)
# What Intel's mpiexec reads from its own environment: -ppn counts inside a batch job too, and TERM
# is handed on to the ranks.
INTEL = {"I_MPI_JOB_RESPECT_PROCESS_PLACEMENT": "0", "I_MPI_JOB_SIGNAL_PROPAGATION": "1"}


@dataclass(frozen=True)
class Placement:
    """The ranks to be started, where and bound to what, whatever the dialect."""

    layout: Layout  # ranks and hosts
    cores: int = 1  # cores per host
    packages: int = 1  # processor packages per host; 0 where their cores differ in number
    ranks_per_host: int = 0  # ranks that share a host's cores, even if fewer run; 0: those that run
    cpus: int = 0  # hardware threads per host
    bind: bool = True  # whether all cores of the hosts are this job's, to bind ranks to
    threads: int | None = None  # threads per rank as asked for; None leaves them to the program
    gpus: int = 0  # GPUs per host
    root: bool = False  # whether the user is root, which Open MPI refuses by itself
    tag: bool = False  # whether the launcher marks each line of output with its rank
    # Variables for what starts Open MPI's daemons on other hosts; empty: its own choice.
    agent: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)  # what the user has set

    @property
    def oversubscribed(self) -> bool:
        """Whether some host gets more ranks than it has slots or cores."""
        return self.layout.over_slots or self.layout.per_host > self.cores

    @property
    def sharers(self) -> int:
        """How many ranks share the cores of the fullest host."""
        return max(self.layout.per_host, min(self.ranks_per_host, self.cores))

    @property
    def width(self) -> int:
        """The cores bound to each rank; 0 where ranks share cores, and none is bound.

        A bound rank sees its own cores only and takes as many threads (``threads_per_rank``). All
        cores are dealt out, also where ``threads`` leaves some idle: two small jobs on one machine
        would else be bound to the same first cores.
        """
        width = self.cores // self.sharers
        shared = self.oversubscribed or not self.bind or (self.threads or 1) > width
        return 0 if shared else width

    @property
    def yields(self) -> bool:
        """Whether a waiting rank should yield: it polls, on a core that computes."""
        return self.oversubscribed or not self.gpus


def build(mpi: Mpi, placed: Placement, words: Sequence[str]) -> Command:
    """Return the command that starts ``words``, a program and its arguments, as ``placed`` says.

    Raises:
        UsageError: this launcher cannot place ranks so.
    """
    own = thread_variables(placed.threads, placed.environ)
    if mpi.dialect == "intel":
        own |= {name: value for name, value in INTEL.items() if name not in placed.environ}
    if placed.layout.hosts and mpi.dialect in OPEN_MPI:
        own |= placed.agent
    if placed.environ.get("SLURM_EXPORT_ENV") == "NONE":
        # As its qsub sets it for the jobs that it makes, it would hide all else from the ranks:
        # Open MPI and Hydra start their daemons by srun.
        own["SLURM_EXPORT_ENV"] = "ALL"
    if placed.tag and mpi.dialect not in OPEN_MPI and "PYTHONUNBUFFERED" not in placed.environ:
        # Into the pipe of these launchers Python writes only every 8 kB, not line by line.
        own["PYTHONUNBUFFERED"] = "1"
    environ = Command((), own).environ(placed.environ)
    argv = BUILDERS[mpi.dialect](mpi, replace(placed, environ=environ))
    return Command((*argv, *words), own)


def forwarded(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables in ``environ`` that ranks on other hosts need too."""
    names = [name for name in sorted(environ) if name.startswith(FORWARDED)]
    # A GPU's UUID means nothing on another host; a list of numbers, or an empty one, does.
    devices = environ.get("CUDA_VISIBLE_DEVICES", "")
    foreign = devices.startswith(("GPU-", "MIG-"))
    return [name for name in names if not (foreign and name == "CUDA_VISIBLE_DEVICES")]


def _open_mpi(mpi: Mpi, placed: Placement) -> list[str]:
    four = mpi.dialect == "openmpi4"
    argv = [_program(mpi, placed), "-n", str(placed.layout.ranks)]
    if placed.layout.hosts:
        argv += ["--host", _with_slots(placed)]
    width = _within_packages(placed)
    mapping = f"slot:PE={width}" if width else "slot"
    if placed.oversubscribed:
        mapping += ":OVERSUBSCRIBE"
    argv += ["--map-by", mapping, "--bind-to", "core" if width else "none"]
    if placed.yields and "OMPI_MCA_mpi_yield_when_idle" not in placed.environ:
        argv += ["--mca", "mpi_yield_when_idle", "1"]
    argv += ["--allow-run-as-root"] if placed.root else []
    if placed.tag:
        argv += ["--tag-output"] if four else ["--output", "tag"]
    if placed.layout.hosts:
        argv += [word for name in forwarded(placed.environ) for word in ("-x", name)]
    return argv


def _within_packages(placed: Placement) -> int:
    """Return ``placed.width``, or less: Open MPI 5 refuses ranks that span two packages."""
    if placed.width and placed.packages and placed.sharers % placed.packages == 0:
        return placed.cores // placed.packages // (placed.sharers // placed.packages)
    return 0


def _hydra(mpi: Mpi, placed: Placement) -> list[str]:
    argv = [_program(mpi, placed), "-n", str(placed.layout.ranks)]
    argv += ["-hosts", _with_slots(placed)] if placed.layout.hosts else []
    argv += ["-bind-to", f"core:{placed.width}" if placed.width else "none"]
    # With -prepend-rank a text that itself begins with [1] could not be told from a mark.
    argv += ["-prepend-pattern", "<rank %r> "] if placed.tag else []
    return [*argv, "-genvall"]


def _intel(mpi: Mpi, placed: Placement) -> list[str]:
    argv = [_program(mpi, placed), "-n", str(placed.layout.ranks)]
    if placed.layout.hosts:
        argv += ["-hosts", _names(placed), "-ppn", str(_even(mpi, placed))]
    # auto deals the hardware threads out among the ranks that run.
    domain = (
        f"{placed.cpus // placed.sharers}" if placed.sharers > placed.layout.per_host else "auto"
    )
    pinning = ["I_MPI_PIN_DOMAIN", domain] if placed.width else ["I_MPI_PIN", "0"]
    settings = [pinning, *([["I_MPI_THREAD_YIELD", "2"]] if placed.yields else [])]
    argv += [word for one in settings if one[0] not in placed.environ for word in ("-genv", *one)]
    argv += ["-prepend-rank"] if placed.tag else []
    return [*argv, "-genvall"]


def _pals(mpi: Mpi, placed: Placement) -> list[str]:
    argv = [_program(mpi, placed), "-n", str(placed.layout.ranks)]
    argv += ["--ppn", str(_even(mpi, placed))]
    argv += ["--hosts", _names(placed)] if placed.layout.hosts else []
    argv += (
        ["--depth", f"{placed.width}", "--cpu-bind", "depth"]
        if placed.width
        else ["--cpu-bind", "none"]
    )
    argv += ["--label", "--line-buffer"] if placed.tag else []
    # PALS gives a rank its number, but not the number of ranks.
    return [*argv, "--envall", "--env", f"PALS_SIZE={placed.layout.ranks}"]


def _srun(mpi: Mpi, placed: Placement) -> list[str]:
    argv = [_program(mpi, placed), f"--ntasks={placed.layout.ranks}"]
    if placed.layout.hosts:
        argv += [f"--nodes={len(placed.layout.hosts)}", f"--nodelist={_names(placed)}"]
    argv += [f"--ntasks-per-node={_even(mpi, placed)}"]
    if placed.width:
        argv += [f"--cpus-per-task={placed.width}", "--cpu-bind=cores"]
    else:
        argv += ["--overcommit", "--cpu-bind=none"]
    # Each rank picks its GPU by its number on the host, so it has to see them all.
    argv += ["--gpu-bind=none"] if placed.gpus else []
    # Cray's MPI wants the site's own default.
    if not any(placed.environ.get(name) for name in ("SLURM_MPI_TYPE", "CRAY_MPICH_VERSION")):
        argv += ["--mpi=pmix"]
    argv += ["--label"] if placed.tag else []
    return [*argv, "--kill-on-bad-exit=1", "--export=ALL"]


BUILDERS: dict[str, Callable[[Mpi, Placement], list[str]]] = {
    "openmpi4": _open_mpi,
    "openmpi5": _open_mpi,
    "mpich": _hydra,
    "intel": _intel,
    "pals": _pals,
    "srun": _srun,
}


def _program(mpi: Mpi, placed: Placement) -> str:
    """Return the launcher as one would type it; its path where a host is named.

    Open MPI that is started by its path finds itself on the other hosts as well.
    """
    return mpi.program if placed.layout.hosts else Path(mpi.program).name


def _with_slots(placed: Placement) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in placed.layout.hosts)


def _names(placed: Placement) -> str:
    return ",".join(host.name for host in placed.layout.hosts)


def _even(mpi: Mpi, placed: Placement) -> int:
    """Return the ranks per host, for a launcher that takes one number; the last has the rest."""
    counts = [host.slots for host in placed.layout.hosts] or [placed.layout.ranks]
    if len(set(counts[:-1])) > 1 or counts[-1] > counts[0]:
        shown = ",".join(map(str, counts))
        raise UsageError(
            f"{NAMES[mpi.dialect]} starts the same number of ranks on each host, not {shown}: "
            "give --ppn K"
        )
    return counts[0]
