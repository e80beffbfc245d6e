"""Predict what failures and checkpoints cost on more ranks, from the saves of one training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.steps.checkpoint_interval import HOUR, FailureCosts, best_interval, failure_costs
from hvdtrain.steps.summary import Saves, Summary
from hvdtrain.system.output.tables import known, paragraph, table
from hvdtrain.system.output.text import duration, number

MINUTE = 60.0
RANKS = tuple(2**power for power in range(3, 13))  # 8 ... 4096: predicted by default


@dataclass(frozen=True)
class MeasuredSaves:
    """What a save and a restart cost in a training, in seconds."""

    cost: float  # for which a save stops the training
    latency: float  # from the begin of a save until the checkpoint is complete
    restart: float  # from the start to the first update


@dataclass(frozen=True)
class Failures(FailureCosts):
    """The mean cost of failures with the best interval between checkpoints."""

    ranks: int
    hosts: int
    hours_between_failures: float  # mean, of the job
    interval_seconds: float  # of training, between saves


def measured_saves(path: Path) -> MeasuredSaves:
    """Read the cost of a save from the summary of a training.

    Raises:
        UsageError: it is no summary, or the training saved no checkpoint.
    """
    summary = Summary.read(path)
    saves = summary.saves or Saves()
    cost = saves.cost
    if not cost or cost <= 0:
        raise UsageError(
            f"--saves {path}: that training saved no checkpoint; run one with --checkpoint-dir, "
            "--checkpoint-every and --summary"
        )
    return MeasuredSaves(cost, max(cost, saves.longest), summary.seconds_to_first_step or 0.0)


def predict_failures(
    saves: MeasuredSaves, ranks: Sequence[int], *, ranks_per_host: int, host_hours: float
) -> list[Failures]:
    """Predict the cost of failures for each number of ranks.

    The cost of a save and of a restart is assumed to be that of the measured training.

    Args:
        saves: measured cost.
        ranks: numbers of ranks.
        ranks_per_host: ranks that a failing host takes along.
        host_hours: mean hours between failures of one host.
    """
    return [_predict(saves, n, math.ceil(n / ranks_per_host), host_hours) for n in ranks]


def _predict(saves: MeasuredSaves, ranks: int, hosts: int, host_hours: float) -> Failures:
    hours = host_hours / hosts
    # A save begins when the one before is complete.
    interval = max(best_interval(saves.cost, hours * HOUR), saves.latency)
    mean = failure_costs(
        interval,
        cost=saves.cost,
        latency=saves.latency,
        restart=saves.restart,
        between=hours * HOUR,
    )
    return Failures(
        **vars(mean),
        ranks=ranks,
        hosts=hosts,
        hours_between_failures=hours,
        interval_seconds=interval,
    )


def failures_text(failures: Sequence[Failures], saves: MeasuredSaves, host_hours: float) -> str:
    """Return the prediction as a table: a row per number of ranks."""
    source = (
        f"Checkpoints and failures, for a save that stops the training for {duration(saves.cost)} "
        f"and is complete after {duration(saves.latency)}, a restart of {duration(saves.restart)}, "
        f"and a mean time between failures of {host_hours:,g} hours per host (--host-mtbf). "
        "Goodput: share of the time spent on new work."
    )
    rows = known(
        {
            "ranks": [str(row.ranks) for row in failures],
            "hosts": [str(row.hosts) for row in failures],
            "MTBF, hours": [number(row.hours_between_failures) for row in failures],
            "save every, min": [number(row.interval_seconds / MINUTE) for row in failures],
            "lost per failure, min": [number(row.lost_seconds / MINUTE) for row in failures],
            "goodput": [f"{100 * row.goodput:.2f} %" for row in failures],
        }
    )
    return f"{paragraph(source)}\n{table(*rows)}"
