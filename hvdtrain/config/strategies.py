"""The strategies: how the ranks train together. One record each, data only, which others read.

No other file compares a strategy's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hvdtrain.system.runtime.detect import HOROVODRUN, LAUNCHERS, SPAWN, TORCHRUN
from hvdtrain.system.runtime.tuning import MPI_VARIABLES

PACKAGES = {"pytorch": "torch", "tensorflow": "tensorflow"}  # of each framework
WITH_TORCHRUN = frozenset(one.name for one in LAUNCHERS) - {HOROVODRUN}
WITHOUT_TORCHRUN = WITH_TORCHRUN - {TORCHRUN, SPAWN}
HOROVOD_VARIABLES = {
    "fusion_threshold_mb": "HOROVOD_FUSION_THRESHOLD",
    "cycle_time_ms": "HOROVOD_CYCLE_TIME",
    "hierarchical_allreduce": "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "autotune": "HOROVOD_AUTOTUNE",
}


@dataclass(frozen=True)
class Strategy:
    """One way to train on several ranks, or on one."""

    name: str
    """As ``--strategy`` spells it."""
    adapters: Mapping[str, str]
    """``module:class`` of the adapter, by framework."""
    launchers: frozenset[str] = frozenset()
    """What may start its ranks (names of ``runtime/detect``); none: it is for one process."""
    traffic: float = 2.0
    """Bytes that a rank sends per byte of gradients, times (p - 1) / p; 2: an allreduce."""
    library: str = ""
    """What connects the ranks, as users call it."""
    requires: Mapping[str, str] = field(default_factory=dict)
    """A module that has to be installed, by framework."""
    oldest: Mapping[str, str] = field(default_factory=dict)
    """The oldest version of a framework's package that will do, by framework."""
    remedy: str = ""
    """What to do where ``requires`` is not installed, or does not load."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for several ranks, set before the library starts where the user has not."""
    short_steps: Mapping[str, str] = field(default_factory=dict)
    """More of them, where a step takes a few milliseconds."""
    gradient_libraries: tuple[str, ...] = ()
    """Who may sum the gradients, best first: names of ``collectives/bench.py``."""
    compressions: tuple[str, ...] = ()
    """The types besides their own in which it can sum gradients."""
    levers: tuple[str, ...] = ()
    """The other levers that it has: attributes of ``Levers`` (``config/levers.py``)."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Where its library reads a lever, by the name of that."""
    splits_model: bool = False
    """Whether several ranks hold one model together, of which each has some layers."""
    has_timeline: bool = False
    """Whether Horovod's timeline shows its collectives."""


DDP = Strategy(
    "ddp",
    {"pytorch": "hvdtrain.adapters.pytorch.ddp:DdpAdapter"},
    launchers=WITH_TORCHRUN,
    library="torch.distributed",
    oldest={"pytorch": "2.4"},
    environment=MPI_VARIABLES,
    gradient_libraries=("nccl", "gloo"),
    compressions=("fp16", "bf16"),
    levers=("fusion_threshold_mb",),
)
STRATEGIES = {
    one.name: one
    for one in (
        Strategy(
            "horovod",
            {
                "pytorch": "hvdtrain.adapters.pytorch.horovod:HorovodAdapter",
                "tensorflow": "hvdtrain.adapters.tensorflow.horovod:HorovodAdapter",
            },
            launchers=WITHOUT_TORCHRUN | {HOROVODRUN},
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
                # On a GPU: a sum is waited for by the device's stream, not by the host.
                "HOROVOD_ENABLE_ASYNC_COMPLETION": "1",
            },
            # Horovod looks for work once per cycle (ms); with short steps one waits for the cycle.
            short_steps={"HOROVOD_CYCLE_TIME": "0.1"},
            gradient_libraries=("horovod",),
            compressions=("fp16",),  # Horovod 0.28.1 knows no bfloat16, over NCCL neither
            levers=("reduction", *HOROVOD_VARIABLES),
            variables=HOROVOD_VARIABLES,
            has_timeline=True,
        ),
        DDP,
        replace(
            DDP,
            name="zero",
            adapters={"pytorch": "hvdtrain.adapters.pytorch.zero:ZeroAdapter"},
            traffic=3.0,  # an allreduce, and each owner broadcasts what it has updated
        ),
        replace(
            DDP,
            name="fsdp",
            adapters={"pytorch": "hvdtrain.adapters.pytorch.fsdp:FsdpAdapter"},
            oldest={"pytorch": "2.9"},
            traffic=3.0,  # gathered before forward and backward pass, gradients reduce-scattered
            levers=(),
        ),
        replace(
            DDP,
            name="pipeline",
            adapters={"pytorch": "hvdtrain.adapters.pytorch.pipeline:PipelineAdapter"},
            compressions=(),
            levers=("stages", "micro_batches"),
            splits_model=True,
        ),
        Strategy(
            "mpi",
            {
                "pytorch": "hvdtrain.adapters.pytorch.mpi:MpiAdapter",
                "tensorflow": "hvdtrain.adapters.tensorflow.mpi:MpiAdapter",
            },
            launchers=WITHOUT_TORCHRUN,
            library="mpi4py",
            requires={"pytorch": "mpi4py", "tensorflow": "mpi4py"},
            remedy="pip install 'hvdtrain[mpi]'",
            environment=MPI_VARIABLES,
            gradient_libraries=("mpi4py",),
            compressions=("fp16", "bf16"),
            levers=("fusion_threshold_mb",),
        ),
        Strategy(
            "data-parallel",
            {"pytorch": "hvdtrain.adapters.pytorch.data_parallel:DataParallelAdapter"},
        ),
        Strategy(
            "single",
            {
                "pytorch": "hvdtrain.adapters.pytorch.single:SingleAdapter",
                "tensorflow": "hvdtrain.adapters.tensorflow.single:SingleAdapter",
            },
        ),
    )
}
HOROVOD = STRATEGIES["horovod"]
DEFAULT = HOROVOD
ONE_PROCESS = STRATEGIES["single"]  # in place of the default where that is not installed
