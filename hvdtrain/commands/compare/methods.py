"""The methods to compare: their selection, availability on this machine, commands, and runs."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from hvdtrain.adapters.select import check_version
from hvdtrain.commands.study.command_options import REFUSED, check_measurable, entries, global_batch
from hvdtrain.commands.study.engine import RESULTS, Plan, Planned, StudyOptions, Variant, find_share
from hvdtrain.commands.study.run import RunOutcome, read_records
from hvdtrain.config.command_line import effective_value, value_of, without_option
from hvdtrain.config.declare import optional
from hvdtrain.config.options import PRECISIONS
from hvdtrain.config.strategies import NONE, ONE_PROCESS, PACKAGES, STRATEGIES
from hvdtrain.config.values import names, positive
from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import Summary
from hvdtrain.system.machine.frameworks import is_installed
from hvdtrain.system.output.text import plural, printable

log = logging.getLogger(__name__)

OUT = Path("compare")
LINES, KIND = "compare.jsonl", "comparison"  # file of the records, and its kind
RANKS = 2  # default
ALL = "all"
AUTO = "auto"  # --precision: chosen by workload and device
DEFAULTS = (AUTO, NONE)
COMPRESSION = "--compression"
# Options that are set by the comparison for all methods, and so not allowed for a single one.
SHARED = (
    "--strategy",
    "--framework",
    "--precision",
    "--batch-size",
    "--global-batch-size",
    "--config",  # it may set any of these
)


def short_label(strategy: str, options: str, compression: str) -> str:
    """Return the label of a method without framework and precision."""
    gradients = "" if compression == NONE else f" + {compression} gradients"
    return f"{strategy} {options}".strip() + gradients


@dataclass(frozen=True)
class Method:
    """A training method; a row of the table."""

    strategy: str
    framework: str
    precision: str = AUTO
    compression: str = NONE
    ranks: int = 1
    options: str = ""  # additional options, as on a command line

    @property
    def name(self) -> str:
        """The stem of its file names, without defaults, e.g. ``ddp-pytorch-bf16-n2``."""
        compression = "" if self.compression == NONE else f"packed-{self.compression}"
        options = re.sub(r"[^\w.]+", "-", self.options).strip("-")
        parts = [part for part in (self.precision, compression, options) if part not in (AUTO, "")]
        return "-".join([self.strategy, self.framework, *parts, f"n{self.ranks}"])

    @property
    def label(self) -> str:
        """The strategy with its options, without framework and precision."""
        return short_label(self.strategy, self.options, self.compression)

    @property
    def is_baseline(self) -> bool:
        """Whether it is the single process that the other methods are compared with."""
        return self.strategy == ONE_PROCESS.name and not self.options

    @property
    def uses_all_devices(self) -> bool:
        """Whether it is one process with all devices of its host: ``nn.DataParallel``."""
        return self.strategy != ONE_PROCESS.name and self.ranks == 1


@dataclass(frozen=True)
class CompareOptions(StudyOptions):
    """The options of ``hvdtrain compare``; None: not given."""

    ranks: int | None = optional(
        "number of ranks of distributed strategies (default: 2)", positive, group="runs"
    )
    repeat: int | None = optional(
        "number of runs per method, in turn (default: 3)", positive, metavar="K", alias="--repeats"
    )
    strategies: tuple[str, ...] | None = optional(
        "strategies, each with its options in quotes, or all (default: all)",
        entries,
        group="runs",
        metavar="S,S,...",
    )
    precision: tuple[str, ...] | None = optional(
        "numeric precisions (default: that of the command)", names, metavar="P,P,..."
    )
    frameworks: tuple[str, ...] | None = optional(
        "deep-learning frameworks (default: that of the command)", names, metavar="F,F,..."
    )
    out: Path | None = optional(f"{RESULTS} (default: {OUT})", Path, group="report", metavar="DIR")

    default_folder = OUT


def choose(options: CompareOptions, words: Sequence[str]) -> list[Method]:
    """Return the methods in the order of the table: by framework, precision, strategy.

    Raises:
        UsageError: an unknown strategy, framework or precision, or an option that is not allowed
            for a single method.
    """
    default = effective_value(words, "--framework") or next(iter(PACKAGES))
    frameworks = options.frameworks or (default,)
    precisions = options.precision or (effective_value(words, "--precision") or AUTO,)
    for framework in frameworks:
        if framework not in PACKAGES:
            raise UsageError(f"--frameworks {framework}: choose from {', '.join(PACKAGES)}")
    for precision in options.precision or ():
        if precision not in PRECISIONS:
            raise UsageError(f"--precision {precision}: choose from {', '.join(PRECISIONS)}")
    ranks = options.ranks or RANKS
    requested = options.strategies or (ALL,)
    strategies = _strategies(requested, effective_value(words, COMPRESSION) or NONE)
    methods = [
        Method(
            name,
            framework,
            precision,
            compression,
            ranks if STRATEGIES[name].launchers else 1,
            strategy_options,
        )
        for framework in frameworks
        for precision in precisions
        for name, compression, strategy_options in strategies
    ]
    return list(dict.fromkeys(methods))


def _strategies(requested: Sequence[str], compression: str) -> list[tuple[str, str, str]]:
    """Return the name, gradient compression and other options of each, the baseline first.

    ``compression``: of the command, for strategies that support one and do not set another.
    """
    strategies: list[tuple[str, str, str]] = []
    for text in requested:
        try:
            name, *options = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"--strategies {text!r}: {error}") from error
        if name not in {ALL, *STRATEGIES}:
            raise UsageError(f"--strategies {name}: choose from {', '.join([ALL, *STRATEGIES])}")
        for word in (*SHARED, *REFUSED):
            if value_of(options, word) is not None:
                raise UsageError(
                    f"--strategies {text!r}: {word} is not allowed for a single strategy"
                )
        stated = value_of(options, COMPRESSION)
        remaining = shlex.join(without_option(options, COMPRESSION))
        for strategy in STRATEGIES if name == ALL else [name]:
            inherited = compression if STRATEGIES[strategy].compressions else NONE
            strategies.append((strategy, inherited if stated is None else stated, remaining))
    return sorted(strategies, key=lambda strategy: strategy[::2] != (ONE_PROCESS.name, ""))


def unavailable_reason(method: Method) -> str:
    """Return the reason if a method cannot run here, without starting it; or ""."""
    framework, package = method.framework, PACKAGES[method.framework]
    record = STRATEGIES[method.strategy]
    if framework not in record.adapters:
        return f"supports only {' and '.join(record.adapters)}"
    if not is_installed(package):
        return f"{package} is not installed: pip install 'hvdtrain[{framework}]'"
    if framework in record.requires and not is_installed(record.requires[framework]):
        return f"{record.library} is not installed for {framework}: {record.remedy}"
    try:
        if framework in record.oldest:
            check_version(record, framework, importlib.metadata.version(PACKAGES[framework]))
    except UsageError as error:
        return str(error)
    return ""


def method_words(words: Sequence[str], method: Method, batch: int) -> list[str]:
    """Return the command with its options replaced by those of ``method``."""
    changed: dict[str, str] = {
        "--strategy": method.strategy,
        "--framework": method.framework,
        "--precision": method.precision,
        COMPRESSION: method.compression,
        "--global-batch-size": str(batch),
    }
    kept = list(words)
    for name in (*changed, "--batch-size"):
        kept = without_option(kept, name)
    # Defaults are only needed to override the command or its --config file.
    added = [
        word
        for name, value in changed.items()
        if value not in DEFAULTS or effective_value(words, name) not in (None, value)
        for word in (name, value)
    ]
    return [*kept, *added, *shlex.split(method.options)]  # the last value of an option counts


def sent_bytes(method: Method, summary: Summary) -> int | None:
    """Return the theoretical number of bytes that a rank sends per step; None if unknown.

    A bandwidth-optimal allreduce of n bytes sends 2 (p - 1) / p n from each rank (R. Thakur et
    al., "Optimization of Collective Communication Operations in MPICH", 2005). The gradient bytes
    are counted by the adapter; ``Strategy.traffic`` has the factors of other collectives.
    """
    record, ranks = STRATEGIES.get(method.strategy), method.ranks
    messages = summary.gradient_messages
    if method.strategy == ONE_PROCESS.name:
        return 0
    if record is None or messages is None or ranks == 1:
        return None
    return round(record.traffic * (ranks - 1) / ranks * messages.bytes)


def full_label(method: Method) -> str:
    """Return the label of a method with its framework and precision."""
    parts = [method.label, method.framework, method.precision]
    return printable(" ".join(part for part in parts if part not in DEFAULTS))


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
