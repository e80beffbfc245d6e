"""The command lines that start a job: pure functions, one per dialect of launcher.

Sources: ``--help`` of Open MPI 5.0.11 and 4.1.4 and of MPICH 5.0.2, and runs with them; the manuals
of Intel MPI and of Slurm's srun, and the user guides of sites with Cray PALS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hvdtrain.commands.launch.layout import RankLayout
from hvdtrain.commands.launch.mpirun import NAMES, OPEN_MPI, Mpi
from hvdtrain.errors import UsageError
from hvdtrain.system.machine.threads import thread_variables
from hvdtrain.system.runtime.command import Command

# Environment variables to export to ranks on other hosts, if they are set.
FORWARDED = (
    *("CUDA_", "FI_", "GLOO_", "HOROVOD_", "HVDTRAIN_", "KERAS_", "KMP_", "LD_LIBRARY_PATH"),
    *("LD_PRELOAD", "MKL_", "NCCL_", "OMP_", "PATH", "PYTHON", "PYTORCH_", "TF_", "TORCH_", "UCX_"),
    *("VIRTUAL_ENV", "XLA_"),
)
# Environment of Intel's mpiexec: make -ppn count inside a batch job too, and forward TERM to the
# ranks.
INTEL = {"I_MPI_JOB_RESPECT_PROCESS_PLACEMENT": "0", "I_MPI_JOB_SIGNAL_PROPAGATION": "1"}


@dataclass(frozen=True)
class Placement:
    """The ranks to start, on which hosts and bound to which cores; independent of the dialect."""

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


def build(mpi: Mpi, placement: Placement, words: Sequence[str]) -> Command:
    """Return the command that starts ``words``, a program and its arguments, with ``placement``.

    Raises:
        UsageError: this launcher does not support the placement.
    """
    variables = thread_variables(placement.threads, placement.environ)
    if mpi.dialect == "intel":
        variables |= {name: value for name, value in INTEL.items() if name not in placement.environ}
    if placement.layout.hosts and mpi.dialect in OPEN_MPI:
        variables |= placement.agent
    if placement.environ.get("SLURM_EXPORT_ENV") == "NONE":
        # Set by Slurm's qsub for its jobs, it would hide all other variables from the ranks: Open
        # MPI and Hydra start their daemons by srun.
        variables["SLURM_EXPORT_ENV"] = "ALL"
    unset = "PYTHONUNBUFFERED" not in placement.environ
    if unset and placement.tag and mpi.dialect not in OPEN_MPI:
        # Python buffers 8 kB of output to the pipe of these launchers, instead of a line.
        variables["PYTHONUNBUFFERED"] = "1"
    environ = Command((), variables).environ(placement.environ)
    argv = BUILDERS[mpi.dialect](mpi, replace(placement, environ=environ))
    return Command((*argv, *words), variables)


def forwarded(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables in ``environ`` to export to ranks on other hosts."""
    names = [name for name in sorted(environ) if name.startswith(FORWARDED)]
    # A GPU's UUID is invalid on other hosts; a list of numbers, or an empty one, is not.
    devices = environ.get("CUDA_VISIBLE_DEVICES", "")
    foreign = devices.startswith(("GPU-", "MIG-"))
    return [name for name in names if not (foreign and name == "CUDA_VISIBLE_DEVICES")]


def _open_mpi(mpi: Mpi, placement: Placement) -> list[str]:
    four = mpi.dialect == "openmpi4"
    argv = [_program(mpi, placement), "-n", str(placement.layout.ranks)]
    if placement.layout.hosts:
        argv += ["--host", _with_slots(placement)]
    width = _within_packages(placement)
    mapping = f"slot:PE={width}" if width else "slot"
    if placement.oversubscribed:
        mapping += ":OVERSUBSCRIBE"
    argv += ["--map-by", mapping, "--bind-to", "core" if width else "none"]
    if placement.yields and "OMPI_MCA_mpi_yield_when_idle" not in placement.environ:
        argv += ["--mca", "mpi_yield_when_idle", "1"]
    argv += ["--allow-run-as-root"] if placement.root else []
    if placement.tag:
        argv += ["--tag-output"] if four else ["--output", "tag"]
    if placement.layout.hosts:
        argv += [word for name in forwarded(placement.environ) for word in ("-x", name)]
    return argv


def _within_packages(placement: Placement) -> int:
    """Return ``placement.width`` or less: Open MPI 5 refuses ranks that span two packages."""
    if placement.width and placement.packages and placement.sharers % placement.packages == 0:
        return placement.cores // placement.packages // (placement.sharers // placement.packages)
    return 0


def _hydra(mpi: Mpi, placement: Placement) -> list[str]:
    argv = [_program(mpi, placement), "-n", str(placement.layout.ranks)]
    argv += ["-hosts", _with_slots(placement)] if placement.layout.hosts else []
    argv += ["-bind-to", f"core:{placement.width}" if placement.width else "none"]
    # With -prepend-rank, output that begins with [1] would look like a mark.
    argv += ["-prepend-pattern", "<rank %r> "] if placement.tag else []
    return [*argv, "-genvall"]


def _intel(mpi: Mpi, placement: Placement) -> list[str]:
    argv = [_program(mpi, placement), "-n", str(placement.layout.ranks)]
    if placement.layout.hosts:
        argv += ["-hosts", _names(placement), "-ppn", str(_even(mpi, placement))]
    # auto divides the hardware threads among the ranks that run.
    sharers = placement.sharers
    domain = "auto" if sharers == placement.layout.per_host else str(placement.cpus // sharers)
    settings = {"I_MPI_PIN_DOMAIN": domain} if placement.width else {"I_MPI_PIN": "0"}
    settings |= {"I_MPI_THREAD_YIELD": "2"} if placement.yields else {}
    for name in [name for name in settings if name not in placement.environ]:
        argv += ["-genv", name, settings[name]]
    argv += ["-prepend-rank"] if placement.tag else []
    return [*argv, "-genvall"]


def _pals(mpi: Mpi, placement: Placement) -> list[str]:
    argv = [_program(mpi, placement), "-n", str(placement.layout.ranks)]
    argv += ["--ppn", str(_even(mpi, placement))]
    argv += ["--hosts", _names(placement)] if placement.layout.hosts else []
    argv += (
        ["--depth", f"{placement.width}", "--cpu-bind", "depth"]
        if placement.width
        else ["--cpu-bind", "none"]
    )
    argv += ["--label", "--line-buffer"] if placement.tag else []
    # PALS sets the rank, but not the number of ranks.
    return [*argv, "--envall", "--env", f"PALS_SIZE={placement.layout.ranks}"]


def _srun(mpi: Mpi, placement: Placement) -> list[str]:
    argv = [_program(mpi, placement), f"--ntasks={placement.layout.ranks}"]
    if placement.layout.hosts:
        argv += [f"--nodes={len(placement.layout.hosts)}", f"--nodelist={_names(placement)}"]
    argv += [f"--ntasks-per-node={_even(mpi, placement)}"]
    if placement.width:
        argv += [f"--cpus-per-task={placement.width}", "--cpu-bind=cores"]
    else:
        argv += ["--overcommit", "--cpu-bind=none"]
    # Each rank selects its GPU by its local rank, so it has to see all of them.
    argv += ["--gpu-bind=none"] if placement.gpus else []
    # Cray's MPI needs the site's default.
    if not any(placement.environ.get(name) for name in ("SLURM_MPI_TYPE", "CRAY_MPICH_VERSION")):
        argv += ["--mpi=pmix"]
    argv += ["--label"] if placement.tag else []
    return [*argv, "--kill-on-bad-exit=1", "--export=ALL"]


BUILDERS: dict[str, Callable[[Mpi, Placement], list[str]]] = {
    "openmpi4": _open_mpi,
    "openmpi5": _open_mpi,
    "mpich": _hydra,
    "intel": _intel,
    "pals": _pals,
    "srun": _srun,
}


def _program(mpi: Mpi, placement: Placement) -> str:
    """Return the name of the launcher, or its path if hosts are named.

    Started by its path, Open MPI is found on the other hosts, too.
    """
    return mpi.program if placement.layout.hosts else Path(mpi.program).name


def _with_slots(placement: Placement) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in placement.layout.hosts)


def _names(placement: Placement) -> str:
    return ",".join(host.name for host in placement.layout.hosts)


def _even(mpi: Mpi, placement: Placement) -> int:
    """Return the ranks per host, for launchers that take one number; the last may get fewer."""
    counts = [host.slots for host in placement.layout.hosts] or [placement.layout.ranks]
    if len(set(counts[:-1])) > 1 or counts[-1] > counts[0]:
        shown = ",".join(map(str, counts))
        raise UsageError(
            f"{NAMES[mpi.dialect]} starts the same number of ranks on each host, not {shown}: "
            "use --ppn K"
        )
    return counts[0]
