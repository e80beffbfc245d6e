"""The levers: how gradients travel between the ranks, whatever is trained.

Which strategy has which, and under what name its library reads it from the environment, its record
says (``config/strategies.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hvdtrain.config.strategies import STRATEGIES, Strategy
from hvdtrain.errors import UsageError

NONE = "none"
COMPRESSIONS = (NONE, "fp16", "bf16")
AVERAGE, ADASUM = REDUCTIONS = ("average", "adasum")
MIB = 2**20
BUCKET_BYTES = 25 * MIB  # from which on a bucket is full

CONTRADICTIONS = (
    ("autotune", "fusion_threshold_mb"),  # it chooses both of these
    ("autotune", "cycle_time_ms"),
    ("reduction", "fusion_threshold_mb"),  # Adasum is of one parameter's gradient
)


@dataclass(frozen=True)
class Levers:
    """What a user can say about it; each attribute is the option of that name."""

    compression: str = NONE
    """The type in which gradients are sent and summed; ``none``: their own."""
    reduction: str = AVERAGE
    """The mean over the samples of the global batch, or Adasum of the ranks' own means."""
    fusion_threshold_mb: float | None = None
    """MiB from which on a bucket of gradients is full; 0: each is one."""
    cycle_time_ms: float | None = None
    """Milliseconds between two looks of Horovod for gradients to sum."""
    hierarchical_allreduce: bool = False
    """Sum within each host first, then over the hosts."""
    autotune: bool = False
    """Let Horovod choose by what it measures."""
    stages: int | None = None
    """Ranks that hold one model together, each a part of it; None: all."""
    micro_batches: int | None = None
    """Into how many a batch is cut that goes through them; None: four for each stage."""

    @property
    def bucket_bytes(self) -> int:
        """Bytes from which on a bucket of gradients is full."""
        if self.autotune or self.reduction == ADASUM:
            return 0  # it is Horovod that puts gradients together
        asked = self.fusion_threshold_mb
        return BUCKET_BYTES if asked is None else int(asked * MIB)

    def weight(self, share: float) -> float:
        """Return the factor of a rank's gradients whose part has this share in the global batch."""
        return float(share > 0) if self.reduction == ADASUM else share

    @property
    def given(self) -> dict[str, Any]:
        """Those that are not at their default, by name."""
        return {
            one.name: value
            for one in fields(self)
            if (value := getattr(self, one.name)) != one.default
        }

    def variables(self, record: Strategy) -> dict[str, str]:
        """Return what the strategy's library reads from its environment."""
        given = self.given
        if "fusion_threshold_mb" in given:
            given["fusion_threshold_mb"] = self.bucket_bytes
        return {
            variable: format(given[name], "g" if isinstance(given[name], float) else "d")
            for name, variable in record.variables.items()
            if name in given
        }

    def environment(self, record: Strategy, *, short_steps: bool) -> dict[str, str]:
        """Return what is set for several ranks of a strategy where the user has not.

        Args:
            record: of the strategy.
            short_steps: a step takes a few milliseconds.
        """
        defaults = {**record.environment, **(record.short_steps if short_steps else {})}
        if self.autotune:  # what is set is not tuned
            tuned = set(record.variables.values())
            defaults = {name: value for name, value in defaults.items() if name not in tuned}
        return {**defaults, **self.variables(record)}


def check_levers(
    levers: Levers, record: Strategy, framework: str, environ: Mapping[str, str]
) -> None:
    """Refuse what the strategy does not have, and what contradicts itself or the environment.

    Raises:
        UsageError: naming the option, and what to give instead.
    """
    _check_compression(levers.compression, record, framework)
    for name in levers.given:
        if name != "compression" and name not in record.levers:
            others = [one for one in _others(framework) if name in one.levers]
            raise _not_for(_option(name), record, others)
    if levers.reduction not in REDUCTIONS:
        raise UsageError(f"--reduction {levers.reduction}: choose one of {', '.join(REDUCTIONS)}")
    for one, other in CONTRADICTIONS:
        if one in levers.given and other in levers.given:
            raise UsageError(f"{_option(one)} and {_option(other)} contradict each other: give one")
    for variable, value in levers.variables(record).items():
        if variable in environ and _number(environ[variable]) != float(value):
            (name,) = [name for name, one in record.variables.items() if one == variable]
            raise UsageError(
                f"{_option(name)} and {variable}={environ[variable]} in the environment contradict "
                f"each other (the option means {value}): leave one out"
            )


def check_stages(levers: Levers, size: int) -> None:
    """Refuse stages into groups of which the ranks cannot be put.

    Raises:
        UsageError: naming the numbers of ranks to start instead.
    """
    stages = levers.stages
    if stages and size % stages:
        raise UsageError(
            f"--stages {stages}: {size} rank{'s' * (size > 1)} cannot be put together in groups of "
            f"{stages}: start a multiple of {stages}"
        )


def check_nccl(levers: Levers, *, used: bool) -> None:
    """Refuse what only NCCL does, unless it is ``used``.

    Raises:
        UsageError: naming the option.
    """
    if levers.hierarchical_allreduce and not used:
        raise UsageError(
            "--hierarchical-allreduce is not available: it takes GPUs, and a Horovod that sums by "
            "NCCL (`hvdtrain install-horovod --gpu nccl`); leave it out"
        )


def check_adasum(levers: Levers, size: int, *, gpu: bool) -> None:
    """Refuse Adasum where Horovod, or we, cannot compute it.

    Raises:
        UsageError: naming the number of ranks to start instead, or the device.
    """
    if levers.reduction != ADASUM:
        return
    if gpu:
        raise UsageError("--reduction adasum is for CPUs: leave it out, or hide the GPUs")
    if size & (size - 1):
        below = 1 << (size.bit_length() - 1)
        raise UsageError(
            f"--reduction adasum takes a power of two of ranks, not {size}: start {below} or "
            f"{2 * below}"
        )


def _check_compression(asked: str, record: Strategy, framework: str) -> None:
    if asked not in COMPRESSIONS:
        raise UsageError(f"--compression {asked}: choose one of {', '.join(COMPRESSIONS)}")
    if asked == NONE or asked in record.compressions:
        return
    if not record.compressions:
        others = [one for one in _others(framework) if asked in one.compressions]
        raise _not_for(f"--compression {asked}", record, others)
    raise UsageError(
        f"--compression {asked}: {record.library} has no sum of that type; give --compression "
        f"{' or '.join(record.compressions)}"
    )


def _others(framework: str) -> list[Strategy]:
    return [one for one in STRATEGIES.values() if framework in one.adapters]


def _not_for(option: str, record: Strategy, others: list[Strategy]) -> UsageError:
    names = " or ".join(one.name for one in others)
    return UsageError(
        f"{option} is not for --strategy {record.name}: leave it out, or give --strategy {names}"
    )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")  # equals nothing
