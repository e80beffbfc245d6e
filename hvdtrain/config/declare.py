"""Options as fields of a frozen dataclass, for the trainers and the verbs, and their parser.

::

    @dataclass(frozen=True)
    class Options:
        ranks: tuple[int, ...] = option((1, 2), "numbers of ranks", positives, group="runs")

    add_options(parser, Options)
    options = from_namespace(Options, parser.read(words))
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from typing_extensions import override

from hvdtrain.config.values import counts, local_folder, numbers, path, ranks, span, tracker
from hvdtrain.errors import UsageError

T = TypeVar("T")
OptionValues = dict[str, Any]
"""Values of options by the names of their fields."""
REQUIRED = dataclasses.MISSING  # default of an option that must be given
SHOWN = 200  # characters of an invalid value in a message
PLAIN_TYPES = {int: "a whole number", float: "a number"}
MISSING = "the following arguments are required: "  # argparse's message
LISTS = (counts, numbers, ranks)  # kinds of options that accept several words
BY_FORMULA = "choose --checkpoint-every by the formula in docs/training.md"
NO_PIPELINE = (
    "use --strategy fsdp for a model that does not fit on one device; homework/model_parallel.py "
    "is the lesson in model parallelism"
)
# Options of earlier versions and values of options, those of a verb with its name: what to use
# instead.
REMOVED: Mapping[str, str] = {
    "--autotune": "set HOROVOD_AUTOTUNE=1",
    "--checkpoint-every auto": "choose a number by the formula in docs/training.md",
    "--cycle-time-ms": "set HOROVOD_CYCLE_TIME (ms)",
    "--fusion-threshold-mb": "set HOROVOD_FUSION_THRESHOLD (bytes)",
    "--hierarchical-allreduce": "set HOROVOD_HIERARCHICAL_ALLREDUCE=1",
    "--local-rank": "use torchrun, which sets LOCAL_RANK",
    "--micro-batches": NO_PIPELINE,
    "--mtbf": BY_FORMULA,
    "--on-nan rollback": "use stop and resume, or skip",
    "--reduction": "for Adasum use Horovod's own DistributedOptimizer(op=hvd.Adasum)",
    "--stages": NO_PIPELINE,
    "--strategy pipeline": NO_PIPELINE,
    "--study": "docs/collectives.md compares allreduce algorithms, a job for each",
    "compare --batch-size": "omit it; that of the program comes after --",
    "compare --csv": "--out DIR writes compare.csv",
    "doctor --data": "step_split in a training's summary shows whether it waits for data",
    "launch --discovery": "a chain of jobs takes the hosts that it gets (hvdtrain submit --chain)",
    "scaling --host-mtbf": BY_FORMULA,
    "scaling --leave-out": "use --from FILE without the rows of that size, and --predict",
    "scaling --saves": BY_FORMULA,
    "timeline --profile": "open the traces of a training's --profile in Perfetto",
}
# Options of other programs whose letters are not close to ours.
SYNONYMS: Mapping[str, str] = {
    "--bs": "--batch-size",
    "--learning-rate": "--lr",
    "--max-grad-norm": "--clip-norm",
    "--nproc-per-node": "--ppn",
    "--output-dir": "--checkpoint-dir",
    "--save-dir": "--checkpoint-dir",
    "--wd": "--weight-decay",
}
METAVARS: Mapping[Any, str] = {
    Path: "PATH",
    local_folder: "PATH",
    str: "NAME",
    counts: "N,N",
    numbers: "N,N",
    ranks: "N,N",
    span: "A:B",
    tracker: "NAME[=WHERE]",
}


def option(
    default: Any,
    text: str,
    kind: Callable[[Any], Any] = str,
    choices: Sequence[str] = (),
    *,
    name: str = "",
    alias: str = "",
    group: str = "",
    metavar: str = "",
    repeated: bool = False,
    either: str = "",
    needs: str = "",
    number: str = "",
) -> Any:
    """Return a field that is an option.

    Args:
        default: its value if the option is not given; ``REQUIRED``: it must be given.
        text: its help text.
        kind: the function that reads its value (``config/values.py``); ``bool``: a switch.
        choices: the valid names.
        name: its name on the command line; empty: that of the field, with dashes.
        alias: another name, which the help does not show.
        group: title of its group in the help; empty: that of the field before it.
        metavar: its value in the help; empty: by ``kind``.
        repeated: whether it may be given several times, each value one item of a tuple.
        either: a name that it shares with the options of which at most one may be given.
        needs: the option without which it has no meaning, with its value, e.g. ``--profile A:B``.
        number: of a positional argument the number of its values, in argparse's notation or ``1``.
    """
    metadata = {"help": text, "kind": kind, "choices": tuple(choices), "name": name}
    metadata |= {"alias": alias, "group": group, "metavar": metavar, "repeated": repeated}
    metadata |= {"either": either, "needs": needs, "number": number}
    return dataclasses.field(default=default, kw_only=default is REQUIRED, metadata=metadata)


optional = partial(option, None)
switch = partial(option, False, kind=bool)  # without a value
json_switch = partial(switch, "print the result as one JSON object")
argument = partial(option, REQUIRED, number="1")  # positional
command = partial(option, (), argparse.SUPPRESS, number=argparse.REMAINDER)  # usually after `--`


def declared(kind: type[Any]) -> list[dataclasses.Field[Any]]:
    """Return the fields of ``kind`` that are options or arguments."""
    return [field for field in dataclasses.fields(kind) if "help" in field.metadata]


def exclusive(kind: type[Any]) -> list[tuple[str, str]]:
    """Return the pairs of fields of ``kind`` of which at most one may be given."""
    groups: dict[str, list[str]] = {}
    for field in declared(kind):
        if either := field.metadata["either"]:
            groups.setdefault(either, []).append(field.name)
    return [pair for names in groups.values() for pair in itertools.combinations(names, 2)]


def option_name(field: dataclasses.Field[Any]) -> str:
    """Return the name of an option on the command line."""
    return field.metadata["name"] or "--" + field.name.rstrip("_").replace("_", "-")


def add_options(
    parser: argparse.ArgumentParser, kind: type[Any], *, has_files: bool = False
) -> None:
    """Declare an option or an argument per field of ``kind``.

    Args:
        parser: where they are declared.
        kind: the dataclass.
        has_files: whether files set options, too: options that are not given are None instead of
            their default, and ``either`` is left to ``config/checks.py``.
    """
    groups: dict[str, argparse._ActionsContainer] = {"": parser, "options": parser}
    exclusive: dict[str, argparse._ActionsContainer] = {}
    title = ""
    for field in declared(kind):
        settings = _settings(field)
        if number := field.metadata["number"]:
            parser.add_argument(field.name, nargs=None if number == "1" else number, **settings)
            continue
        title = field.metadata["group"] or title
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        target = groups[title]
        if (either := field.metadata["either"]) and not has_files:
            if either not in exclusive:
                exclusive[either] = target.add_mutually_exclusive_group()
            target = exclusive[either]
        default = [] if field.metadata["repeated"] else field.default
        if has_files or default in (REQUIRED, ()):
            default = None
        target.add_argument(option_name(field), dest=field.name, default=default, **settings)
        if alias := field.metadata["alias"]:
            target.add_argument(alias, dest=field.name, **{**settings, "help": argparse.SUPPRESS})


def _settings(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for a field, but for the number of values."""
    text, kind, choices = (field.metadata[name] for name in ("help", "kind", "choices"))
    if kind is bool:
        return {"action": "store_true", "help": text}
    if field.default not in (None, "", (), REQUIRED) and "(default" not in text:
        text += f" (default: {field.default})"
    settings: dict[str, Any] = {"type": kind, "help": text}
    settings["metavar"] = field.metadata["metavar"] or "|".join(choices) or METAVARS.get(kind, "N")
    if choices:
        settings["choices"] = [kind(choice) for choice in choices]
    elif kind in LISTS:
        settings["nargs"] = "+"
    if field.metadata["repeated"]:
        settings["action"] = "append"
    if field.default is REQUIRED and not field.metadata["number"]:
        settings["required"] = True
    return settings


def values_of(kind: type[Any], parsed: argparse.Namespace) -> OptionValues:
    """Return the values of the parsed options of ``kind``, without those that are None."""
    values = {}
    for field in declared(kind):
        value = getattr(parsed, field.name)
        if isinstance(value, list):
            if field.metadata["kind"] in LISTS:  # in several words: 30 60 is 30,60
                value = list(itertools.chain(*value))
            before_command = field.metadata["number"] == argparse.REMAINDER
            value = tuple(value[before_command and value[:1] == ["--"] :])
        if value is not None:
            values[field.name] = value
    return values


def from_namespace(kind: type[T], parsed: argparse.Namespace) -> T:
    """Return a ``kind`` of the parsed options; absent ones have their default."""
    return kind(**values_of(kind, parsed))


class CommandParser(argparse.ArgumentParser):
    """Parser that raises ``UsageError`` and accepts no abbreviated options."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(exit_on_error=False, allow_abbrev=False, **settings)
        self.register("type", Path, path)  # for each option of ``type=Path``

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse a command line.

        Raises:
            UsageError: naming the option, the wrong value and the valid ones.
        """
        try:
            namespace, unknown = self.parse_known_args(words)
        except argparse.ArgumentError as error:
            if error.argument_name is None and error.message.startswith(MISSING):
                missing = error.message.removeprefix(MISSING)
                raise UsageError(f"{missing}: missing; see {self.prog} --help") from error
            option = f"{error.argument_name}: " if error.argument_name else ""
            raise UsageError(f"{option}{error.message}") from error
        if unknown:
            raise UsageError(self._unknown(unknown[0]))
        return namespace

    def action_of(self, option: str) -> argparse.Action | None:
        """Return the action of ``option``, or None if there is no such option."""
        return next((action for action in self._actions if option in action.option_strings), None)

    def _unknown(self, word: str) -> str:
        name = word.partition("=")[0]
        if not name.startswith("-"):
            return f"{word[:SHOWN]!r} is not expected here; see {self.prog} --help"
        verb = self.prog.partition("hvdtrain ")[2]
        if remedy := REMOVED.get(f"{verb} {name}".strip()):
            return f"{name} was removed: {remedy}"
        known = [name for action in self._actions for name in action.option_strings]
        near = SYNONYMS.get(name) if SYNONYMS.get(name) in known else nearest(name, known)
        hint = f"did you mean {near}?" if near else f"see {self.prog} --help"
        return f"{name}: no such option; {hint}"

    @override
    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)

    # argparse has no public hook for these two messages.

    @override
    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if remedy := REMOVED.get(f"{'/'.join(action.option_strings)} {arg_string}"):
            raise argparse.ArgumentError(action, f"{arg_string} was removed: {remedy}")
        kind = self._registry_get("type", action.type, action.type)
        try:
            return kind(arg_string)
        except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
            message = str(error)
            if kind in PLAIN_TYPES:
                message = f"{arg_string!r} is not {PLAIN_TYPES[kind]}"
            raise argparse.ArgumentError(
                action, message.replace(arg_string, arg_string[:SHOWN])
            ) from error

    @override
    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, not_among(str(value), map(str, action.choices)))


def not_among(word: str, names: Iterable[str]) -> str:
    """Return the message for a ``word`` that is not in ``names``."""
    names = list(names)
    near = nearest(word, names)
    guess = f" (did you mean {near}?)" if near else ""
    return f"{word[:SHOWN]!r}: choose from {', '.join(names)}{guess}"


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name in ``names`` closest to ``word``, or None."""
    return next(iter(difflib.get_close_matches(word, list(names), 1)), None)
