"""The strategies: one record each of how gradients are synchronized across ranks, and its options.

No other file compares a strategy's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hvdtrain.system.runtime.detect import HOROVODRUN, LAUNCHERS, SPAWN, TORCHRUN
from hvdtrain.system.runtime.tuning import MPI_VARIABLES

PACKAGES = {"pytorch": "torch", "tensorflow": "tensorflow"}  # of each framework
WITH_TORCHRUN = frozenset(launcher.name for launcher in LAUNCHERS) - {HOROVODRUN}
WITHOUT_TORCHRUN = WITH_TORCHRUN - {TORCHRUN, SPAWN}
# What HOROVOD_AUTOTUNE=1 tunes, unless it is set.
AUTOTUNED = {"HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"}
NONE = "none"
COMPRESSIONS = (NONE, "fp16", "bf16")  # of gradients; a strategy's record has those it supports


@dataclass(frozen=True)
class CommOptions:
    """Communication options; each attribute is the command-line option of that name."""

    compression: str = NONE


@dataclass(frozen=True)
class Strategy:
    """Properties of a strategy."""

    name: str
    """Name, as in ``--strategy``."""
    adapters: Mapping[str, str]
    """``module:class`` of its implementation, by framework."""
    launchers: frozenset[str] = frozenset()
    """Supported launchers (names of ``runtime/detect``); empty: single process."""
    traffic: float = 2.0
    """Bytes sent by a rank per byte of gradients, divided by (p - 1) / p; allreduce: 2."""
    library: str = ""
    """Display name of the communication library."""
    requires: Mapping[str, str] = field(default_factory=dict)
    """Required module, by framework."""
    oldest: Mapping[str, str] = field(default_factory=dict)
    """Minimum version of the framework's package, by framework."""
    remedy: str = ""
    """Remedy if ``requires`` is not installed or does not load."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Default environment variables for several ranks, set before the library starts."""
    short_steps: Mapping[str, str] = field(default_factory=dict)
    """Additional ones if a step takes only a few milliseconds."""
    gradient_libraries: tuple[str, ...] = ()
    """Back ends that may sum the gradients, best first: names of ``collectives/timing.py``."""
    compressions: tuple[str, ...] = ()
    """Supported values of ``--compression``."""
    has_timeline: bool = False
    """Whether Horovod's timeline records its collectives."""

    def variables(self, environ: Mapping[str, str], *, short_steps: bool) -> dict[str, str]:
        """Return the default environment variables for several ranks.

        Args:
            environ: the user's environment.
            short_steps: whether a step takes only a few milliseconds.
        """
        defaults = {**self.environment, **(self.short_steps if short_steps else {})}
        autotune = environ.get("HOROVOD_AUTOTUNE", "")
        if autotune.isdecimal() and int(autotune):  # otherwise it is off, as Horovod reads it
            return {name: value for name, value in defaults.items() if name not in AUTOTUNED}
        return defaults


DDP = Strategy(
    "ddp",
    {"pytorch": "hvdtrain.adapters.pytorch.ddp:Ddp"},
    launchers=WITH_TORCHRUN,
    library="torch.distributed",
    oldest={"pytorch": "2.4"},
    environment=MPI_VARIABLES,
    gradient_libraries=("nccl", "gloo"),
    compressions=("fp16", "bf16"),
)
STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            "horovod",
            {
                "pytorch": "hvdtrain.adapters.pytorch.horovod:Horovod",
                "tensorflow": "hvdtrain.adapters.tensorflow.horovod:Horovod",
            },
            launchers=WITHOUT_TORCHRUN,
            library="Horovod",
            requires={
                "pytorch": "horovod.torch.mpi_lib_v2",
                "tensorflow": "horovod.tensorflow.mpi_lib",
            },
            remedy="run `hvdtrain install-horovod`",
            environment={
                **MPI_VARIABLES,
                # The adapters sum few large buckets, each one tensor. Fusing buckets once more
                # costs two copies, and makes the order of summation, so the last bit, a matter of
                # timing.
                "HOROVOD_FUSION_THRESHOLD": "0",
                # On a GPU the device's stream waits for a sum, not the host.
                "HOROVOD_ENABLE_ASYNC_COMPLETION": "1",
            },
            # Horovod starts reductions once per cycle (ms); short steps would wait for the cycle.
            short_steps={"HOROVOD_CYCLE_TIME": "0.1"},
            gradient_libraries=("horovod",),
            compressions=("fp16",),  # Horovod 0.28.1 has no bfloat16, nor over NCCL
            has_timeline=True,
        ),
        DDP,
        replace(
            DDP,
            name="zero",
            adapters={"pytorch": "hvdtrain.adapters.pytorch.zero:Zero"},
            traffic=3.0,  # an allreduce, and each owner broadcasts its updated parameters
        ),
        replace(
            DDP,
            name="fsdp",
            adapters={"pytorch": "hvdtrain.adapters.pytorch.fsdp:Fsdp"},
            oldest={"pytorch": "2.9"},
            traffic=3.0,  # allgather before forward and backward pass, reduce-scatter of gradients
        ),
        Strategy(
            "mpi",
            {
                "pytorch": "hvdtrain.adapters.pytorch.mpi:Mpi",
                "tensorflow": "hvdtrain.adapters.tensorflow.mpi:Mpi",
            },
            launchers=WITHOUT_TORCHRUN,
            library="mpi4py",
            requires={"pytorch": "mpi4py", "tensorflow": "mpi4py"},
            remedy="pip install 'hvdtrain[mpi]'",
            environment=MPI_VARIABLES,
            gradient_libraries=("mpi4py",),
            compressions=("fp16", "bf16"),
        ),
        Strategy(
            "data-parallel",
            {"pytorch": "hvdtrain.adapters.pytorch.data_parallel:DataParallel"},
        ),
        Strategy(
            "single",
            {
                "pytorch": "hvdtrain.adapters.strategy:Single",
                "tensorflow": "hvdtrain.adapters.strategy:Single",
            },
        ),
    )
}
HOROVOD = STRATEGIES["horovod"]
DEFAULT = HOROVOD
ONE_PROCESS = STRATEGIES["single"]  # replaces the default if that is not installed
