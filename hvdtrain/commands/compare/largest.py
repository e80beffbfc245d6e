"""``--batch-size max``: the largest batch per rank that fits, for each method.

On a GPU by trial: running out of memory ends only the process itself. On a host it may end other
processes, so there the peak memory at three small batches is extrapolated linearly to the memory
of the host or its control group; no run comes close to that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.commands.compare.methods import Method, method_from_json, method_words, title
from hvdtrain.commands.compare.trials import Comparison, Trial, classify_failure, launch
from hvdtrain.commands.runs import json_lines
from hvdtrain.commands.runs.command_options import without_option
from hvdtrain.commands.runs.start import file_options, read_summary, start
from hvdtrain.errors import HvdtrainError
from hvdtrain.steps.summary import Summary
from hvdtrain.system.machine.limits import find_resources

log = logging.getLogger(__name__)

LINES = "largest.jsonl"
RUNS = ".largest"  # hidden from `hvdtrain report`: these runs are not measurements
STEPS = 2  # of each run: from the second step on, the memory is constant
FINE = 8  # the search ends within 1 / FINE of the largest batch
SHARE = 0.9  # usable fraction of a host's memory
SMALL = (1, 2, 4)  # small batches, as multiples of the comparison's batch

Points = Sequence[tuple[int, int]]  # batch per rank, peak memory in bytes


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch per rank of a method."""

    method: Method
    batch: int | None  # None: unknown
    predicted: bool  # extrapolated, not run


def search(fits: Callable[[int], bool], start: int, most: int) -> int:
    """Return the largest batch that fits, within 1 / FINE; 0 if none fits.

    Args:
        fits: returns whether a batch fits; every smaller batch then fits, too.
        start: the first batch to try, then doubled.
        most: upper limit.
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
    """Return the batch at which the line through ``points`` reaches ``budget`` bytes; None: never.

    The line is fitted by least squares; the result is rounded down to two digits.
    """
    batches, peaks = np.array(points, np.float64).T
    slope, base = np.polyfit(batches, peaks, 1) if len(set(batches)) > 1 else (0.0, 0.0)
    # 1e-6: the rounding error of the least squares must not reduce a whole number by one.
    return _round_down(max(0, int((budget - base) / slope + 1e-6))) if slope > 0 else None


def _round_down(count: int) -> int:
    """Return ``count`` with two significant digits, the precision of a prediction."""
    unit = 10 ** max(0, len(str(count)) - 2)
    return count // unit * unit


def find_largest(plan: Comparison, trials: Sequence[Trial]) -> None:
    """Find the largest batch of each method that has run; record each result."""
    file = plan.folder / LINES
    complete = {largest.method for largest in read_largest(plan.folder)}
    for method in plan.methods:
        summaries = (trial.summary for trial in trials if trial.method == method)
        summary = next(filter(None, summaries), None)
        if summary is None or method in complete:
            continue
        log.info("%s: the largest batch", title(method))
        find = _search if _on_gpus(summary) else _predict
        largest = find(plan, method, summary)
        content = {**vars(largest), "method": asdict(largest.method)}
        json_lines.append(file, content, _largest)
        note = ", predicted" if largest.predicted else ""
        log.info("    %s%s", largest.batch or "unknown", note)


def read_largest(folder: Path) -> list[LargestBatch]:
    """Return the largest batches recorded in a comparison's directory."""
    return json_lines.read(folder / LINES, _largest, "search for the largest batch")


def _largest(content: Any) -> LargestBatch:
    batch, predicted = content["batch"], bool(content["predicted"])
    if not (batch is None or isinstance(batch, int)):
        raise TypeError("batch is not a number")
    return LargestBatch(method_from_json(content["method"]), batch, predicted)


def _on_gpus(summary: Summary) -> bool:
    return bool((summary.environment or {}).get("gpus_of_this_host"))


def _search(plan: Comparison, method: Method, summary: Summary) -> LargestBatch:
    def fits(batch: int) -> bool:
        return _peak(plan, method, batch) is not None

    share = max(1, plan.batch // method.ranks)
    most = max(share, (summary.training_samples or share) // method.ranks)
    return LargestBatch(method, search(fits, share, most) or None, predicted=False)


def _predict(plan: Comparison, method: Method, summary: Summary) -> LargestBatch:
    share = max(1, plan.batch // method.ranks)
    host = find_resources().memory * SHARE
    budget = host / int((summary.environment or {}).get("ranks_on_this_host") or 1)
    points: list[tuple[int, int]] = []
    for batch in (factor * share for factor in SMALL):
        if points and points[-1][1] * batch / points[-1][0] > budget:
            break  # the memory grows at most in proportion to the batch
        peak = _peak(plan, method, batch)
        if peak is None:
            break
        points.append((batch, peak))
    largest = predict(points, budget) if points else None
    return LargestBatch(method, largest, predicted=True)


def _peak(plan: Comparison, method: Method, batch: int) -> int | None:
    """Return the peak memory of a short run with ``batch`` per rank; None if it does not fit.

    Raises:
        HvdtrainError: it failed for another reason.
    """
    stem = plan.folder / RUNS / f"{method.name}-{batch}"
    words = method_words(plan.words, method, batch * method.ranks)
    words = without_option(words, "--num-steps")
    command = launch(plan, method, [*words, "--num-steps", str(STEPS), *file_options(stem)])
    result = start(command, stem, plan.timeout, f"batch {batch} per rank")
    if result.ok:
        return read_summary(stem, title(method)).peak_memory_bytes
    reason, failed = classify_failure(result, batch * method.ranks)
    if failed:
        raise HvdtrainError(f"{title(method)}, with a batch of {batch} per rank: {reason}")
    return None
