"""Communication options: how gradients are exchanged between ranks, for any task.

A strategy's record (``config/strategies.py``) lists the options that it supports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from hvdtrain.config.declare import OptionValues, option
from hvdtrain.config.strategies import STRATEGIES, Strategy
from hvdtrain.config.values import non_negative
from hvdtrain.errors import UsageError

NONE = "none"
COMPRESSIONS = (NONE, "fp16", "bf16")
AVERAGE, ADASUM = REDUCTIONS = ("average", "adasum")
MIB = 2**20
BUCKET_BYTES = 25 * MIB  # default size of a bucket

# Environment variables in which a strategy's library reads its options.
VARIABLES = {
    "Horovod": {
        "fusion_threshold_mb": "HOROVOD_FUSION_THRESHOLD",
        "cycle_time_ms": "HOROVOD_CYCLE_TIME",
        "hierarchical_allreduce": "HOROVOD_HIERARCHICAL_ALLREDUCE",
        "autotune": "HOROVOD_AUTOTUNE",
    }
}
CONTRADICTIONS = (
    ("autotune", "fusion_threshold_mb"),  # autotuning chooses both of these
    ("autotune", "cycle_time_ms"),
    ("reduction", "fusion_threshold_mb"),  # Adasum is computed per parameter
)


@dataclass(frozen=True)
class CommOptions:
    """Communication options; each attribute is the command-line option of that name."""

    compression: str = option(
        NONE,
        "numeric type in which gradients are sent and summed",
        choices=COMPRESSIONS,
        group="distribution",
    )
    reduction: str = option(
        AVERAGE, "gradient reduction: average, or Horovod's Adasum", choices=REDUCTIONS
    )
    fusion_threshold_mb: float | None = option(
        None, "size of a gradient bucket in MiB; 0: no fusion (default: 25)", non_negative
    )
    cycle_time_ms: float | None = option(
        None, "Horovod's cycle time in milliseconds (default: 1; mnist: 0.1)", non_negative
    )
    hierarchical_allreduce: bool = option(
        False, "sum within each host first, then across hosts (Horovod with NCCL)", bool
    )
    autotune: bool = option(
        False, "let Horovod tune fusion threshold and cycle time; results are not bit-equal", bool
    )

    @property
    def bucket_bytes(self) -> int:
        """Size of a gradient bucket in bytes."""
        if self.autotune or self.reduction == ADASUM:
            return 0  # Horovod fuses the gradients
        mebibytes = self.fusion_threshold_mb
        return BUCKET_BYTES if mebibytes is None else int(mebibytes * MIB)

    def weight(self, share: float) -> float:
        """Return the weight of a rank's gradients, given its part's share of the global batch."""
        return float(share > 0) if self.reduction == ADASUM else share

    @property
    def changed(self) -> OptionValues:
        """Options that differ from their default, by name."""
        values = {field: getattr(self, field.name) for field in fields(CommOptions)}
        return {field.name: value for field, value in values.items() if value != field.default}

    def variables(self, record: Strategy) -> dict[str, str]:
        """Return the environment variables that pass these options to the strategy's library."""
        values = self.changed
        if "fusion_threshold_mb" in values:
            values["fusion_threshold_mb"] = self.bucket_bytes
        return {
            variable: format(values[name], "g" if isinstance(values[name], float) else "d")
            for name, variable in VARIABLES.get(record.library, {}).items()
            if name in values
        }

    def environment(self, record: Strategy, *, short_steps: bool) -> dict[str, str]:
        """Return default environment variables for a strategy with several ranks.

        Args:
            record: the strategy.
            short_steps: whether a step takes only a few milliseconds.
        """
        defaults = {**record.environment, **(record.short_steps if short_steps else {})}
        if self.autotune:  # Horovod does not tune values that are set
            tuned = set(VARIABLES.get(record.library, {}).values())
            defaults = {name: value for name, value in defaults.items() if name not in tuned}
        return {**defaults, **self.variables(record)}


def check_comm_options(
    options: CommOptions, record: Strategy, framework: str, environ: Mapping[str, str]
) -> None:
    """Raise if the strategy lacks an option, or options contradict each other or the environment.

    Raises:
        UsageError: naming the option and the alternative.
    """
    for name, choices in (("compression", COMPRESSIONS), ("reduction", REDUCTIONS)):
        if (value := getattr(options, name)) not in choices:
            raise UsageError(f"{_option(name)} {value}: choose one of {', '.join(choices)}")
    compression = options.compression
    strategies = [strategy for strategy in STRATEGIES.values() if framework in strategy.adapters]
    if compression not in (NONE, *record.compressions):
        if record.compressions:
            raise UsageError(
                f"--compression {compression}: {record.library} cannot sum in that type; give "
                f"--compression {' or '.join(record.compressions)}"
            )
        others = [strategy for strategy in strategies if compression in strategy.compressions]
        raise _not_for(f"--compression {compression}", record, others)
    for name in options.changed:
        if name not in ("compression", *record.comm_options):
            others = [strategy for strategy in strategies if name in strategy.comm_options]
            raise _not_for(_option(name), record, others)
    for pair in CONTRADICTIONS:
        if set(pair) <= set(options.changed):
            first, second = map(_option, pair)
            raise UsageError(f"{first} and {second} contradict each other: give one")
    for variable, value in options.variables(record).items():
        if variable in environ and _number(environ[variable]) != float(value):
            variables = VARIABLES[record.library]
            (name,) = [name for name in variables if variables[name] == variable]
            raise UsageError(
                f"{_option(name)} and {variable}={environ[variable]} in the environment contradict "
                f"each other (the option means {value}): leave one out"
            )


def check_nccl(options: CommOptions, *, used: bool) -> None:
    """Raise if an option needs NCCL and NCCL is not ``used``.

    Raises:
        UsageError: naming the option.
    """
    if options.hierarchical_allreduce and not used:
        raise UsageError(
            "--hierarchical-allreduce is not available: it needs GPUs and a Horovod built with "
            "NCCL (`hvdtrain install-horovod --gpu nccl`); leave it out"
        )


def check_adasum(options: CommOptions, size: int, *, gpu: bool) -> None:
    """Raise if Adasum does not support the number of ranks or the device.

    Raises:
        UsageError: naming valid numbers of ranks, or the device.
    """
    if options.reduction != ADASUM:
        return
    if gpu:
        raise UsageError("--reduction adasum is for CPUs only: leave it out, or hide the GPUs")
    if size & (size - 1):
        below = 1 << (size.bit_length() - 1)
        raise UsageError(
            f"--reduction adasum: the number of ranks must be a power of two, not {size}: start "
            f"{below} or {2 * below}"
        )


def _not_for(option: str, record: Strategy, others: list[Strategy]) -> UsageError:
    names = " or ".join(strategy.name for strategy in others)
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
