"""What the runs of each number of ranks say together: means, errors, parts of a step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.measure import efficiency
from hvdtrain.measure.efficiency import Estimate, Point, estimate
from hvdtrain.measure.records import SPLIT, Run

# The parts that together are a step, told apart or not.
WHOLE = ({"data", "compute", "communication", "waiting"}, {"data", "undivided"})


@dataclass(frozen=True)
class Size:
    """How one number of ranks did: the means over its runs."""

    point: Point
    hosts: int | None
    seconds: float | None
    """Of a step, mean; None where the batch is not known."""
    split: Mapping[str, float]
    """Seconds a step by part; without those that are not known."""
    communication: Estimate | None
    """That part over the runs; None where it is not known, or nothing."""
    crowded: bool
    """Whether ranks had to share cores, which says little about scaling."""
    slowest: tuple[int, float] | None
    """The rank that came last most often, and in what share of the steps; None if it differed."""

    @property
    def ranks(self) -> int:
        """How many."""
        return self.point.ranks


def summarize(runs: Sequence[Run]) -> tuple[Size, ...]:
    """The sizes by rising number of ranks."""
    by_ranks: dict[int, list[Run]] = {}
    for run in runs:
        by_ranks.setdefault(run.ranks, []).append(run)
    rates = {ranks: [run.rate for run in same] for ranks, same in by_ranks.items()}
    return tuple(_size(point, by_ranks[point.ranks]) for point in efficiency.points(rates))


def _size(point: Point, runs: Sequence[Run]) -> Size:
    first = runs[0]
    hosts, cores = first.summary.get("hosts"), first.cores
    threads = math.ceil(point.ranks / (hosts or 1)) * (first.threads or 1)
    split = {
        part: statistics.fmean(run.split[part] for run in runs)
        for part in SPLIT
        if all(run.split.get(part) is not None for run in runs)
    }
    return Size(
        point=point,
        hosts=hosts,
        seconds=_seconds(split) or (first.batch / point.rate.mean if first.batch else None),
        split=split,
        communication=_communication(runs),
        crowded=cores is not None and threads > cores,
        slowest=_slowest(runs),
    )


def _seconds(split: Mapping[str, float]) -> float | None:
    """Of a mean step: the sum of its parts, where they are all there.

    Where epochs end in a smaller batch, that is shorter than a step of a whole batch.
    """
    return sum(split.values()) if any(whole <= split.keys() for whole in WHOLE) else None


def _communication(runs: Sequence[Run]) -> Estimate | None:
    seconds = [run.split.get("communication") or 0.0 for run in runs]
    return estimate(seconds) if all(seconds) else None


def _slowest(runs: Sequence[Run]) -> tuple[int, float] | None:
    ranks = {run.split.get("slowest_rank") for run in runs}
    rank = ranks.pop()
    if ranks or rank is None:
        return None
    return rank, statistics.fmean(run.split["slowest_share"] for run in runs)
