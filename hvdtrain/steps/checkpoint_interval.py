"""Interval between checkpoints that loses least time: Young (1974), Daly (2006).

A checkpoint costs time when it is saved, and a failure costs the work since the last one. Failures
are assumed to be independent, with exponentially distributed times between them. Source of the
formulas: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps", Future Generation Computer Systems 22(3), 2006.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HOUR = 3600.0
# Of one host with 8 GPUs: 419 unexpected interruptions in 54 days on 2,048 hosts ("The Llama 3 Herd
# of Models", 2024, section 3.3.4). Failures of hosts without GPUs are rarer.
HOST_HOURS = round(54 * 24 * 2048 / 419)
FIRST = 10  # updates before the first save, which measures its cost


def hours_between_failures(hosts: int) -> float:
    """Return the assumed mean hours between failures of a job on ``hosts`` hosts."""
    return HOST_HOURS / hosts


def best_interval(cost: float, between: float) -> float:
    """Return Daly's interval between saves, in seconds of training, from equation 37 of the source.

    Args:
        cost: seconds for which a save stops the training.
        between: mean seconds between failures.
    """
    if cost >= 2 * between:
        return between
    ratio = math.sqrt(cost / (2 * between))
    return math.sqrt(2 * cost * between) * (1 + ratio / 3 + ratio**2 / 9) - cost


@dataclass(frozen=True)
class FailureCosts:
    """What failures and checkpoints cost in the mean."""

    lost_seconds: float  # work that one failure undoes
    goodput: float  # share of the time that is spent on new work


def failure_costs(
    interval: float, *, cost: float, latency: float, restart: float, between: float
) -> FailureCosts:
    """Return what is lost if a checkpoint is saved every ``interval`` seconds of training.

    The goodput is equation 20 of the source for a long training. A save takes effect only when it
    is complete; the work meanwhile counts as a part of the restart.

    Args:
        interval: seconds of training between saves, positive.
        cost: seconds for which a save stops the training.
        latency: seconds from the begin of a save until the checkpoint is complete, at least
            ``cost``.
        restart: seconds from a failure to the next update.
        between: mean seconds between failures.
    """
    late = latency - cost
    exponent = (interval + cost) / between
    # 1 / (exp(exponent) - 1), without an overflow if each step fails.
    inverse = math.exp(-exponent) / -math.expm1(-exponent)
    goodput = interval / between * math.exp(-(restart + late) / between) * inverse
    return FailureCosts(lost_seconds=interval / 2 + late, goodput=goodput)
