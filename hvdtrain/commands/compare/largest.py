"""``--batch-size max``: the largest batch per rank that fits, for each method.

On a GPU by trying: it ends a process that asks for too much, and nothing else. A host that runs out
of memory ends other processes, so there the peak memory at three small batches is extended by a
line to what the host, or its control group, has; nothing is run near that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.commands.compare.methods import Method, as_method, method_words, title
from hvdtrain.commands.compare.trials import Comparison, Trial, launch, why_no_result
from hvdtrain.commands.runs import lines
from hvdtrain.commands.runs.start import file_words, read_summary, start
from hvdtrain.commands.runs.words import without
from hvdtrain.errors import HvdtrainError
from hvdtrain.steps.summary import Summary
from hvdtrain.system.machine.limits import find_resources

log = logging.getLogger(__name__)

LINES = "largest.jsonl"
RUNS = ".largest"  # hidden from `hvdtrain report`: they are no measurements
STEPS = 2  # of each run: the second one has all memory that later ones have
FINE = 8  # the search ends where the rest is 1 / FINE of what fits
SHARE = 0.9  # of a host's memory
SMALL = (1, 2, 4)  # times the batch of the comparison

Points = Sequence[tuple[int, int]]  # batch per rank, peak memory in bytes


@dataclass(frozen=True)
class Largest:
    """The largest batch per rank of a method."""

    method: Method
    batch: int | None  # None: it could not be found out
    predicted: bool  # by a line, not run


def search(fits: Callable[[int], bool], start: int, most: int) -> int:
    """Return a batch that fits, of which no 1 / FINE more does; 0 where none does.

    Args:
        fits: whether a batch does; what fits does so with every smaller batch.
        start: from where on to double.
        most: the largest that makes sense.
    """
    low, high = 0, min(start, most)
    while fits(high):
        low = high
        if low == most:
            return low
        high = min(2 * high, most)
    while high - low > max(1, low // FINE):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def predict(points: Points, budget: float) -> int | None:
    """Return the batch at which the line through ``points`` meets ``budget`` bytes; None: never.

    The line is that of the least squares; the result is rounded down to two digits.
    """
    batches, peaks = np.array(points, np.float64).T
    slope, base = np.polyfit(batches, peaks, 1) if len(set(batches)) > 1 else (0.0, 0.0)
    # The least squares leave a rounding error in what is a whole number of samples.
    return _round_down(max(0, int((budget - base) / slope + 1e-6))) if slope > 0 else None


def _round_down(count: int) -> int:
    """Return ``count`` with two digits that count: a prediction has no more."""
    unit = 10 ** max(0, len(str(count)) - 2)
    return count // unit * unit


def find_largest(plan: Comparison, trials: Sequence[Trial]) -> None:
    """Find the largest batch of each method that has been run; keep each as it is found."""
    file = plan.folder / LINES
    known = {one.method for one in read_largest(plan.folder)}
    for method in plan.methods:
        done = next((one.summary for one in trials if one.method == method and one.summary), None)
        if done is None or method in known:
            continue
        log.info("%s: the largest batch", title(method))
        found = _search(plan, method, done) if _on_gpus(done) else _predict(plan, method, done)
        content = {**vars(found), "method": asdict(found.method)}
        lines.append(file, content, _largest)
        note = ", predicted" if found.predicted else ""
        log.info("    %s%s", found.batch or "could not be found out", note)


def read_largest(folder: Path) -> list[Largest]:
    """Return what is known of a comparison in its directory."""
    return lines.read(folder / LINES, _largest, "search for the largest batch")


def _largest(content: Any) -> Largest:
    batch, predicted = content["batch"], bool(content["predicted"])
    if not (batch is None or isinstance(batch, int)):
        raise TypeError("batch is no number")
    return Largest(as_method(content["method"]), batch, predicted)


def _on_gpus(summary: Summary) -> bool:
    return bool((summary.environment or {}).get("gpus_of_this_host"))


def _search(plan: Comparison, method: Method, done: Summary) -> Largest:
    def fits(batch: int) -> bool:
        return _peak(plan, method, batch) is not None

    share = max(1, plan.batch // method.ranks)
    most = max(share, (done.training_samples or share) // method.ranks)
    return Largest(method, search(fits, share, most) or None, predicted=False)


def _predict(plan: Comparison, method: Method, done: Summary) -> Largest:
    share = max(1, plan.batch // method.ranks)
    host = find_resources().memory * SHARE
    budget = host / int((done.environment or {}).get("ranks_on_this_host") or 1)
    points: list[tuple[int, int]] = []
    for batch in (factor * share for factor in SMALL):
        if points and points[-1][1] * batch / points[-1][0] > budget:
            break  # more than in proportion it cannot take
        peak = _peak(plan, method, batch)
        if peak is None:
            break
        points.append((batch, peak))
    largest = predict(points, budget) if points else None
    return Largest(method, largest, predicted=True)


def _peak(plan: Comparison, method: Method, batch: int) -> int | None:
    """Return the peak memory of a short run with ``batch`` per rank; None where it does not fit.

    Raises:
        HvdtrainError: it failed for another reason.
    """
    stem = plan.folder / RUNS / f"{method.name}-{batch}"
    words = without(method_words(plan.words, method, batch * method.ranks), "--num-steps")
    command = launch(plan, method, [*words, "--num-steps", str(STEPS), *file_words(stem)])
    result = start(command, stem, plan.timeout, f"batch {batch} per rank")
    if result.ok:
        return read_summary(stem, title(method)).peak_memory_bytes
    reason, failed = why_no_result(result, batch * method.ranks)
    if failed:
        raise HvdtrainError(f"{title(method)}, with a batch of {batch} per rank: {reason}")
    return None
