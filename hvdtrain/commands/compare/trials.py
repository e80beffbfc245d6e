"""The variants of a comparison: one training by several methods, and the records of its runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hvdtrain.commands.compare.methods import (
    AUTO,
    RANKS,
    REPEATS,
    CompareOptions,
    Method,
    choose,
    full_label,
    method_words,
    unavailable_reason,
)
from hvdtrain.commands.study import engine, records
from hvdtrain.commands.study.command_options import check_measurable, global_batch, value_of
from hvdtrain.commands.study.engine import (
    HostShare,
    Plan,
    Planned,
    RecordedSetting,
    RunOutcome,
    Variant,
    find_share,
)
from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import Summary, typed
from hvdtrain.system.output.text import plural

LINES = "compare.jsonl"


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


_trial = partial(typed, Trial)


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
        variants = tuple(map(self._variant, self.methods))
        repeats = self.options.repeat or REPEATS
        return Plan(self.options.folder, variants, repeats, self.options.timeout)

    def _variant(self, method: Method) -> Variant:
        words = method_words(self.words, method, self.batch)
        bind = not method.uses_all_devices
        request = self.share.request(self.options, method.ranks, words, bind=bind)
        title = f"{full_label(method)}, {plural(method.ranks, 'rank')}"
        return Variant(method.name, title, request, unavailable_reason(method))

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
                "--compression fp16'"
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
