"""The methods that are compared: which there are, which can run here, and the words of each."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.adapters.select import check_version
from hvdtrain.commands.runs.words import REFUSED, batches, given, value_of, without
from hvdtrain.config.command_line import parse
from hvdtrain.config.strategies import ONE_PROCESS, PACKAGES, STRATEGIES, Strategy
from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import Summary
from hvdtrain.system.machine.frameworks import is_installed
from hvdtrain.system.output.text import plural
from hvdtrain.workloads import own

ALL = "all"
AUTO = "auto"  # as --precision: workload and device decide
NONE = "none"  # as --compression
PLAIN = (AUTO, NONE)
COMPRESSION = "--compression"
# What the methods of a comparison differ or agree in, and so no option of a single one.
SHARED = (
    *("--strategy", "--framework", "--precision", "--batch-size", "--global-batch-size"),
    "--config",  # it may hold any of these
)


@dataclass(frozen=True)
class Method:
    """One way to train; a row of the table."""

    strategy: str
    framework: str
    precision: str = AUTO
    compression: str = NONE
    ranks: int = 1
    options: str = ""  # more of its own, as on a command line

    @property
    def name(self) -> str:
        """Return what its files are called: ``ddp-pytorch-bf16-n2``, defaults left out."""
        packed = "" if self.compression == NONE else f"packed-{self.compression}"
        own = re.sub(r"[^\w.]+", "-", self.options).strip("-")
        parts = [part for part in (self.precision, packed, own) if part not in (AUTO, "")]
        return "-".join([self.strategy, self.framework, *parts, f"n{self.ranks}"])

    @property
    def label(self) -> str:
        """Return what a person calls it among others of its framework and precision."""
        packed = "" if self.compression == NONE else f" + {self.compression} gradients"
        return f"{self.strategy} {self.options}".strip() + packed

    @property
    def is_baseline(self) -> bool:
        """Whether it is the one process that the others are compared with."""
        return self.strategy == ONE_PROCESS.name and not self.options

    @property
    def takes_the_host(self) -> bool:
        """Whether it is one process with all devices of its host: ``nn.DataParallel``."""
        return self.strategy != ONE_PROCESS.name and self.ranks == 1

    def shares_baseline(self, other: Method) -> bool:
        """Whether both are measured against the same one process."""
        return (self.framework, self.precision) == (other.framework, other.precision)


@dataclass(frozen=True)
class Choice:
    """What was asked for; None: as the command has it."""

    strategies: tuple[str, ...] = (ALL,)  # each a name, which options of its own may follow
    frameworks: tuple[str, ...] | None = None
    precisions: tuple[str, ...] | None = None
    ranks: int = 2


def choose(choice: Choice, words: Sequence[str]) -> list[Method]:
    """Return the methods in the order of the table: by framework, precision, strategy.

    Raises:
        UsageError: a strategy or framework that there is not, or an option that is not one
            method's own.
    """
    frameworks = choice.frameworks or (given(words, "--framework") or next(iter(PACKAGES)),)
    precisions = choice.precisions or (given(words, "--precision") or AUTO,)
    compression = given(words, COMPRESSION)
    for framework in frameworks:
        if framework not in PACKAGES:
            raise UsageError(f"--frameworks {framework}: choose of {', '.join(PACKAGES)}")
    methods = [
        Method(name, framework, precision, packed, _ranks(name, choice.ranks), more)
        for framework in frameworks
        for precision in precisions
        for name, options in _strategies(choice.strategies)
        for packed, more in _compressions(name, options, compression)
    ]
    return list(dict.fromkeys(methods))


def _strategies(asked: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return names and options, the one process first: the others are told as multiples of it."""
    found: list[tuple[str, list[str]]] = []
    for text in asked:
        try:
            name, *options = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"--strategies {text!r}: {error}") from error
        if name not in {ALL, *STRATEGIES}:
            raise UsageError(f"--strategies {name}: choose of {', '.join([ALL, *STRATEGIES])}")
        for option in (*SHARED, *REFUSED):
            if value_of(options, option) is not None:
                raise UsageError(f"--strategies {text!r}: {option} is not of one strategy alone")
        found += [(one, options) for one in (STRATEGIES if name == ALL else [name])]
    return sorted(found, key=lambda one: one != (ONE_PROCESS.name, []))


def _compressions(name: str, options: Sequence[str], asked: str | None) -> list[tuple[str, str]]:
    """Return how a strategy sends gradients, and its other options.

    As the options say, or the command; else as they are and packed, where it has no options.
    """
    record, own = STRATEGIES.get(name), value_of(options, COMPRESSION)
    types = record.compressions if record else ()
    rest = shlex.join(without(options, COMPRESSION))
    if own is not None:
        return [(own, rest)]
    if asked is not None:
        return [(asked if types else NONE, rest)]
    return [(packed, rest) for packed in (NONE, *(() if rest else types[:1]))]


def _ranks(name: str, ranks: int) -> int:
    record = STRATEGIES.get(name)
    return ranks if record is None or record.launchers else 1


def why_not(method: Method) -> str:
    """Return why a method cannot run here, as far as that is seen without starting it; or ""."""
    framework, package = method.framework, PACKAGES[method.framework]
    record = STRATEGIES[method.strategy]
    if framework not in record.adapters:
        return f"is for {' and '.join(record.adapters)} alone"
    if not is_installed(package):
        return f"{package} is not installed: pip install 'hvdtrain[{framework}]'"
    if framework in record.requires and not is_installed(record.requires[framework]):
        return f"{record.library} is not installed for {framework}: {record.remedy}"
    return _too_old(record, framework)


def _too_old(record: Strategy, framework: str) -> str:
    try:
        if framework in record.oldest:
            check_version(record, framework, importlib.metadata.version(PACKAGES[framework]))
    except UsageError as error:
        return str(error)
    return ""


def global_batch(words: Sequence[str], ranks: int) -> int:
    """Return the samples of an update in every row: those of ``ranks`` ranks of the command.

    Raises:
        UsageError: the command does not say it, nor is it one whose default is known; or an
            option of it is wrong.
    """
    own_batch, total = batches(words)
    passes = given(words, "--accumulate-steps") or "1"
    size = total or own_batch or str(default_batch(words) or "")
    if not size:
        raise UsageError(
            "say how large the batch is, as in `-- python train.py --batch-size 32`: the same "
            "global batch is given to each strategy"
        )
    for text in (size, passes):
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(f"the batch or its passes, {text}: give a whole number of 1 or more")
    return int(size) if total else int(size) * ranks * int(passes)


def default_batch(words: Sequence[str]) -> int | None:
    """Return the batch per rank of one of hvdtrain's programs; None for any other.

    Raises:
        UsageError: an option that the program does not take.
    """
    after = [*words[words.index("-m") + 1 :], ""] if "-m" in words else [""]
    package, _, name = after[0].rpartition(".")
    if package != "hvdtrain":
        return None
    if name == "train":
        return own.RECIPE.batch_size
    if importlib.util.find_spec(f"hvdtrain.workloads.{name}") is None:
        return None
    workload = importlib.import_module(f"hvdtrain.workloads.{name}.task").WORKLOAD
    options = parse(name, after[1:-1], description="", epilog="", kind=workload.options)
    return int(workload.recipe(options).batch_size)


def method_words(words: Sequence[str], method: Method, batch: int) -> list[str]:
    """Return the command with the options of ``method`` in place of its own."""
    changed: dict[str, str] = {
        "--strategy": method.strategy,
        "--framework": method.framework,
        "--precision": method.precision,
        COMPRESSION: method.compression,
        "--global-batch-size": str(batch),
    }
    kept = list(words)
    for option in (*changed, "--batch-size"):
        kept = without(kept, option)
    # What the file of --config says is overruled; what is the default need not be said.
    added = [
        word
        for option, value in changed.items()
        if value not in PLAIN or given(words, option) not in (None, value)
        for word in (option, value)
    ]
    return [*kept, *added, *shlex.split(method.options)]  # the last one counts


def sent_bytes(method: Method, summary: Summary) -> int | None:
    """Return the bytes that a rank sends in a step, by theory; None where it is not known.

    An allreduce of n bytes that moves the least sends 2 (p - 1) / p n from each rank (R.
    Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005). The
    gradient bytes are those that the adapter counts; ``Strategy.traffic`` has other factors.
    """
    record, ranks = STRATEGIES.get(method.strategy), method.ranks
    messages = summary.gradient_messages
    if method.strategy == ONE_PROCESS.name:
        return 0
    if record is None or messages is None or ranks == 1:
        return None
    return round(record.traffic * (ranks - 1) / ranks * messages.bytes)


def in_words(method: Method) -> str:
    """Return the method with its framework and precision."""
    parts = [method.label, method.framework, method.precision]
    return " ".join(part for part in parts if part not in PLAIN)


def title(method: Method) -> str:
    """Return the method in words, with its ranks."""
    return f"{in_words(method)}, {plural(method.ranks, 'rank')}"


def as_method(content: Mapping[str, object]) -> Method:
    """Return the method that a line of results holds.

    Raises:
        TypeError, KeyError: it holds none.
    """
    ranks = content["ranks"]
    if not isinstance(ranks, int):
        raise TypeError("ranks is no number")
    return Method(
        strategy=str(content["strategy"]),
        framework=str(content["framework"]),
        precision=str(content["precision"]),
        compression=str(content["compression"]),
        ranks=ranks,
        options=str(content.get("options", "")),
    )
