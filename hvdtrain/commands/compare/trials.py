"""The variants of a comparison: one training by several methods, and the records of its runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from hvdtrain.commands.compare.methods import (
    AUTO,
    RANKS,
    CompareOptions,
    Method,
    choose,
    full_label,
    method_words,
    unavailable_reason,
)
from hvdtrain.commands.study.command_options import check_measurable, global_batch
from hvdtrain.commands.study.engine import Plan, Planned, Variant, find_share
from hvdtrain.commands.study.run import RunOutcome, read_records
from hvdtrain.config.command_line import value_of
from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import Summary
from hvdtrain.system.output.text import plural

log = logging.getLogger(__name__)

LINES, KIND = "compare.jsonl", "comparison"


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

    @property
    def variant(self) -> str:
        """The name of the variant of the study."""
        return self.method.name


def read_trials(folder: Path) -> list[Trial]:
    """Return the runs in a comparison's directory; an empty list without results.

    Raises:
        UsageError: they cannot be read.
    """
    return read_records(folder / LINES, Trial, KIND)


@dataclass(frozen=True)
class Comparison(Plan[Trial]):
    """The requested runs of one training by several methods, in turn (A B A B)."""

    methods: tuple[Method, ...]
    batch: int  # global: samples per update, in every row

    file_name, record_type, kind = LINES, Trial, KIND
    same = (
        ("batch", "global batch"),
        ("machine", "machine"),
        ("threads", "number of threads per rank"),
    )

    @property
    @override
    def variants(self) -> list[Variant]:
        return list(map(self._variant, self.methods))

    def _variant(self, method: Method) -> Variant:
        words = method_words(self.words, method, self.batch)
        bind = not method.uses_all_devices
        request = self.share.request(self.options, method.ranks, words, bind=bind)
        title = f"{full_label(method)}, {plural(method.ranks, 'rank')}"
        machine, threads = self.share.machine, self.share.threads
        record = Trial(method, 0, self.words, self.batch, machine, threads)
        return Variant(method.name, title, request, record, unavailable_reason(method))

    @override
    def missing(self) -> list[Planned]:
        # Their files would replace those of another method: ``--x 1``, ``--x=1``.
        by_name: dict[str, Method] = {}
        for method in (*self.methods, *(trial.method for trial in self.read())):
            namesake = by_name.setdefault(method.name, method)
            if namesake != method and namesake in self.methods:
                raise UsageError(
                    f"--strategies {namesake.label!r}: the names of its files are those of "
                    f"{method.label!r}; write its options as there, or use another --out"
                )
        return super().missing()

    @override
    def carry_out(self, missing: Sequence[Planned]) -> None:
        if runs := sum(not variant.unavailable for variant, _ in missing):
            hint = "" if self.options.strategies else "; use --strategies a,b for fewer"
            log.info("%s%s; time estimate after the first run", plural(runs, "run"), hint)
        super().carry_out(missing)

    @override
    def check(self, variant: Variant, run: Trial, outcome: RunOutcome) -> None:
        if outcome.invalid and run.method.is_baseline and run.method.precision == AUTO:
            raise UsageError(
                f"the command cannot be run, even in a single process: {outcome.reason}. Put "
                "options of single strategies after their names, e.g. --strategies 'horovod "
                "--compression fp16'"
            )


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
    return Comparison(options, tuple(words), share, methods, global_batch(words, ranks))
