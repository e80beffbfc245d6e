"""The variants of a batch-size study: one training with increasing global batches, by optimizer.

A global batch of B is what B / b ranks with a batch of b each have; where there are fewer ranks,
they accumulate gradients over passes of b. Each repeat has another seed.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from hvdtrain.commands.scaling.sweep import ScalingOptions
from hvdtrain.commands.study.command_options import (
    REFUSED,
    batch_sizes,
    check_measurable,
    default_batch,
)
from hvdtrain.commands.study.engine import Plan, Variant, find_share
from hvdtrain.commands.study.run import RunOutcome, read_records
from hvdtrain.config.command_line import effective_value, value_of, without_option
from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import Summary

LINES, KIND = "batches.jsonl", "batch-size study"
SET = {  # options that the study sets, or that would end its runs early
    "--global-batch-size": "use --batches",
    "--accumulate-steps": "it follows from --batches, --ranks and --batch-size",
    "--seed": "each repeat has another one",
    "--num-steps": "each batch is trained for the same --epochs",
}


@dataclass(frozen=True)
class BatchSetting:
    """An optimizer with its options, and a global batch."""

    optimizer: str  # as on a command line, e.g. ``lars --lr 2``; empty: that of the command
    batch: int

    @property
    def name(self) -> str:
        """The stem of its file names, e.g. ``lars-lr-2-512``."""
        return "-".join(filter(None, [re.sub(r"[^\w.]+", "-", self.optimizer), str(self.batch)]))

    @property
    def title(self) -> str:
        """Its description in messages."""
        optimizer = f"{self.optimizer}, " if self.optimizer else ""
        return f"{optimizer}global batch {self.batch}"


@dataclass(frozen=True)
class BatchRun:
    """A run of the study."""

    setting: BatchSetting
    repeat: int  # from 1; the seed
    ranks: int
    batch: int  # of a rank and pass, at most
    command: tuple[str, ...]  # as typed
    machine: str = ""
    summary: Summary | None = None
    reason: str = ""  # if there is no summary

    @property
    def variant(self) -> str:
        """The name of the variant of the study."""
        return self.setting.name


def read_runs(folder: Path) -> list[BatchRun]:
    """Return the runs in a study's directory; an empty list without results."""
    return read_records(folder / LINES, BatchRun, KIND)


@dataclass(frozen=True)
class BatchStudy(Plan[BatchRun]):
    """The requested runs of one training with several global batches and optimizers."""

    batch: int  # of a rank and pass, at most

    file_name, record_type, kind = LINES, BatchRun, KIND
    same = (("ranks", "number of ranks"), ("batch", "batch per pass"))
    independent = True

    @property
    def ranks(self) -> int:
        """Number of ranks of each run."""
        return self.options.ranks[0] if self.options.ranks else 1

    @property
    def batch_settings(self) -> list[BatchSetting]:
        """The variants, in the order of the table."""
        # So that another spelling of an optimizer, --lr=2, is the same variant.
        spelled = (re.sub(r"(--[\w-]+)=", r"\1 ", text) for text in self.options.optimizers)
        optimizers = list(dict.fromkeys(spelled)) or [""]
        return [BatchSetting(name, batch) for name in optimizers for batch in self.options.batches]

    def variant_of(self, setting: BatchSetting) -> Variant:
        """Return the variant of a setting."""
        passes = math.ceil(setting.batch / (self.ranks * self.batch))
        words = without_option(self.words, "--batch-size")
        words += ["--global-batch-size", str(setting.batch)]
        words += ["--accumulate-steps", str(passes)]
        if effective_value(self.words, "--lr-base-batch") is None:
            words += ["--lr-base-batch", str(self.batch)]
        if setting.optimizer:
            words += ["--optimizer", *shlex.split(setting.optimizer)]
        request = self.share.request(self.options, self.ranks, words)
        record = BatchRun(setting, 0, self.ranks, self.batch, self.words, self.share.machine)
        return Variant(setting.name, setting.title, request, record)

    @property
    @override
    def variants(self) -> list[Variant]:
        return list(map(self.variant_of, self.batch_settings))

    @override
    def repeat_words(self, repeat: int) -> Sequence[str]:
        return ("--seed", str(repeat))

    @override
    def check(self, variant: Variant, run: BatchRun, outcome: RunOutcome) -> None:
        """Reject an invalid command, or an epoch that is smaller than the batch."""
        if outcome.invalid:
            raise UsageError(f"{variant.title}: {outcome.reason}")
        batch, summary = run.setting.batch, outcome.summary or Summary()
        updates, samples = summary.steps_completed or 0, summary.samples_trained or 0
        if updates == summary.epochs_completed and samples < updates * batch:
            raise UsageError(
                f"--batches {batch}: more than the {samples // updates:,} samples of an epoch; "
                "remove this batch"
            )


def make_study(options: ScalingOptions, words: Sequence[str]) -> BatchStudy:
    """Return the study that ``options`` and the command describe.

    Raises:
        UsageError: an option is missing or wrong, or the command cannot be measured.
    """
    check_measurable(words, os.environ)
    for option, reason in SET.items():
        if effective_value(words, option) is not None:
            raise UsageError(f"{option} in the command: {reason}")
    for text in options.optimizers:
        _check_optimizer(text)
    if options.target is None:
        raise UsageError("--batches needs the metric to compare, e.g. --target accuracy=0.985")
    if len(options.ranks) > 1:
        raise UsageError("--batches: use a single number of --ranks")
    per_rank, _ = batch_sizes(words)
    batch = per_rank or str(default_batch(words) or "")
    if not re.fullmatch(r"[1-9]\d*", batch):
        raise UsageError(
            "missing batch size in the command, e.g. `--batch-size 64`: that of one rank, for "
            "which the learning rate is right"
        )
    share = find_share(options, options.ranks or (1,))
    return BatchStudy(options, tuple(words), share, int(batch))


def _check_optimizer(text: str) -> None:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--optimizers {text!r}: {error}") from error
    for option in (*SET, *REFUSED, "--batch-size", "--config"):
        if value_of(words, option) is not None:
            raise UsageError(f"--optimizers {text!r}: {option} is not allowed for one optimizer")
