"""The variants of a comparison: one training by several methods, and the records of its runs.

With ``--batch-size max`` also the largest batch per rank of each method, by trial on its GPUs:
there running out of memory ends only the process itself, whereas on a host it may end others.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.commands.compare.methods import (
    AUTO,
    RANKS,
    REPEATS,
    CompareOptions,
    Method,
    choose,
    method_words,
    title,
    unavailable_reason,
)
from hvdtrain.commands.study import engine, records
from hvdtrain.commands.study.command_options import (
    check_measurable,
    global_batch,
    value_of,
    without_option,
)
from hvdtrain.commands.study.engine import (
    HostShare,
    Plan,
    Planned,
    RecordedSetting,
    RunOutcome,
    Variant,
    find_share,
    launch_command,
    measure,
)
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.steps.summary import Summary

log = logging.getLogger(__name__)

LINES, LARGEST = "compare.jsonl", "largest.jsonl"
RUNS = ".largest"  # hidden from `hvdtrain report`: these runs are not measurements
STEPS = 2  # of each run: from the second step on, the memory is constant
FINE = 8  # the search ends within 1 / FINE of the largest batch


@dataclass(frozen=True)
class Trial:
    """One run of a method, or the reason for its absence."""

    method: Method
    repeat: int  # from 1
    command: tuple[str, ...]  # of the comparison
    batch: int
    machine: str = ""
    threads: int | None = None
    summary: Summary | None = None
    reason: str = ""  # if there is no summary
    failed: bool = False  # the method is available, but the run failed


def _trial(content: Any) -> Trial:
    """Return the trial in a line; raise one of ``records.INVALID`` if it is not a trial."""
    trial = records.decode(Trial, content)
    if trial.summary is not None and not (trial.summary.images_per_second_mean or 0) > 0:
        raise ValueError("no throughput")
    return trial


def read_trials(folder: Path) -> list[Trial]:
    """Return the runs in a comparison's directory; an empty list without results.

    Raises:
        UsageError: they cannot be read.
    """
    return records.read(folder / LINES, _trial, "comparison")


def append_trial(folder: Path, trial: Trial) -> None:
    """Append a run to the records in a comparison's directory."""
    records.append(folder / LINES, records.encode(trial), _trial)


@dataclass(frozen=True)
class Comparison:
    """The requested runs of one training by several methods."""

    options: CompareOptions
    words: tuple[str, ...]  # the command as typed
    methods: tuple[Method, ...]
    batch: int  # global: samples per update, in every row
    share: HostShare  # of a host, also for the baseline

    @property
    def plan(self) -> Plan:
        """The runs: the methods in turn (A B A B)."""
        variants = tuple(self.variant(method, self.batch) for method in self.methods)
        repeats = self.options.repeat or REPEATS
        return Plan(self.options.folder, variants, repeats, self.options.timeout)

    def variant(self, method: Method, batch: int) -> Variant:
        """Return the variant of a method, with a global batch."""
        words = method_words(self.words, method, batch)
        bind = not method.uses_all_devices
        request = self.share.request(self.options, method.ranks, words, bind=bind)
        return Variant(method.name, title(method), request, unavailable_reason(method))

    def missing(self) -> list[Planned]:
        """Return the runs that are not complete, in order.

        Raises:
            UsageError: the complete runs belong to another comparison.
        """
        trials = read_trials(self.options.folder)
        self._check_names(trial.method for trial in trials)
        for trial in trials:
            engine.check_continues(
                self.options.folder,
                f"{trial.method.name}-{trial.repeat}",
                (trial.command, self.words),
                [
                    RecordedSetting("global batch", trial.batch, self.batch),
                    RecordedSetting("machine", trial.machine, self.share.machine),
                    RecordedSetting(
                        "number of threads per rank", trial.threads, self.share.threads
                    ),
                ],
            )
        return self.plan.missing({(t.method.name, t.repeat) for t in trials if t.summary})

    def _check_names(self, recorded: Iterable[Method]) -> None:
        """Reject methods whose files would replace those of another one: ``--x 1``, ``--x=1``."""
        by_name: dict[str, Method] = {}
        for method in (*self.methods, *recorded):
            namesake = by_name.setdefault(method.name, method)
            if namesake != method and namesake in self.methods:
                raise UsageError(
                    f"--strategies {namesake.label!r}: the names of its files are those of "
                    f"{method.label!r}; write its options as there, or use another --out"
                )

    def record(self, variant: Variant, repeat: int, outcome: RunOutcome) -> None:
        """Append a run, or the reason for its absence, to the records.

        Raises:
            UsageError: the command is invalid, even for a single process.
        """
        method = next(method for method in self.methods if method.name == variant.name)
        if outcome.invalid and method.is_baseline and method.precision == AUTO:
            raise UsageError(
                f"the command cannot be run, even in a single process: {outcome.reason}. Put "
                "options of single strategies after their names, e.g. --strategies 'horovod "
                "--autotune'"
            )
        trial = Trial(
            method,
            repeat,
            self.words,
            self.batch,
            self.share.machine,
            self.share.threads,
            outcome.summary,
            outcome.reason,
            outcome.failed,
        )
        append_trial(self.options.folder, trial)


def make_comparison(options: CompareOptions, words: Sequence[str]) -> Comparison:
    """Return the comparison of the requested methods.

    Raises:
        UsageError: an option or the command is wrong.
    """
    check_measurable(words, os.environ)
    if strategy := value_of(words, "--strategy"):
        raise UsageError(
            f"--strategy {strategy} in the command: it varies between runs; use "
            f"hvdtrain compare --strategies {strategy},single -- ..."
        )
    ranks = options.ranks or RANKS
    methods = tuple(choose(options, words))
    share = find_share(options, (ranks,))
    return Comparison(options, tuple(words), methods, global_batch(words, ranks), share)


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch per rank of a method."""

    method: Method
    batch: int | None  # None: unknown


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


def find_largest(comparison: Comparison) -> None:
    """Search the largest batch of each method that has run on GPUs; record each result."""
    folder = comparison.options.folder
    complete = {largest.method for largest in read_largest(folder)}
    summaries = {trial.method: trial.summary for trial in read_trials(folder) if trial.summary}
    for method, summary in summaries.items():
        if method not in comparison.methods or method in complete:
            continue
        if not (summary.environment or {}).get("gpus_of_this_host"):
            log.warning("%s: --batch-size max needs a GPU; not searched", title(method))
            continue
        log.info("%s: the largest batch", title(method))
        batch = _search(comparison, method, summary)
        content = records.encode(LargestBatch(method, batch))
        records.append(folder / LARGEST, content, _largest)
        log.info("    %s", batch or "unknown")


def read_largest(folder: Path) -> list[LargestBatch]:
    """Return the largest batches found in a comparison's directory."""
    return records.read(folder / LARGEST, _largest, "search for the largest batch")


def _largest(content: Any) -> LargestBatch:
    return records.decode(LargestBatch, content)


def _search(comparison: Comparison, method: Method, summary: Summary) -> int | None:
    """Return the largest batch per rank by short runs; None if none fits.

    Raises:
        HvdtrainError: a run failed for another reason.
    """
    options = comparison.options

    def fits(batch: int) -> bool:
        variant = comparison.variant(method, batch * method.ranks)
        words = [*without_option(variant.request.words, "--num-steps"), "--num-steps", str(STEPS)]
        stem = options.folder / RUNS / f"{method.name}-{batch}"
        command = launch_command(replace(variant.request, words=words), stem)
        outcome = measure(command, stem, options.timeout, f"batch {batch} per rank")
        if outcome.failed:
            reason = f"with a batch of {batch} per rank: {outcome.reason}"
            raise HvdtrainError(f"{title(method)}, {reason}")
        return outcome.summary is not None

    share = max(1, comparison.batch // method.ranks)
    most = max(share, (summary.training_samples or share) // method.ranks)
    return search(fits, share, most) or None
