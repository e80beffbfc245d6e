"""The command that a study measures: its batch sizes, and what it may not have."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import partial

from hvdtrain.config.command_line import config_options, effective_value, parse, value_of
from hvdtrain.errors import UsageError
from hvdtrain.tasks.own import RECIPE

# Options that would prevent independent measurements, with the reason.
REFUSED = {
    "--summary": "it is set by the study for each run",
    "--metrics": "it is set by the study for each run",
    "--checkpoint-dir": "each run would resume from the previous one",
    "--timeline": "recording it slows a run down",
    "--profile": "recording it slows a run down",
}
NO_COMMAND = "missing command: put it after --, e.g. `-- python train.py`"
NOT_SET = "not set"
DYNAMIC = "DYNAMIC"  # value of HOROVOD_TIMELINE: no timeline unless the program starts one


def entries(text: str) -> tuple[str, ...]:
    """Read ``a --x 1,2,b`` as names with their options; values may contain commas."""
    return tuple(dict.fromkeys(part.strip() for part in re.split(r",(?=\s*[a-z])", text)))


def difference(old: Sequence[str], new: Sequence[str]) -> str:
    """Return the difference of two commands, e.g. ``--num-steps was 40, now 30``."""
    before, now = _by_option(old), _by_option(new)
    if before.get("") != now.get(""):
        return f"{shlex.join(old)}, now {shlex.join(new)}"
    changes = [
        f"{name} was {before.get(name, NOT_SET)}, now {now.get(name, NOT_SET)}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    return ", ".join(changes) or f"{shlex.join(old)}, now {shlex.join(new)}"


def _by_option(words: Sequence[str]) -> dict[str, str]:
    """Return the values by option name; under "" the words before the first option."""
    values: dict[str, str] = {"": ""}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            name, word = name.replace("_", "-"), value
            values[name] = value if equals else ""
        else:
            values[name] = f"{values[name]} {word}".strip()
    return {name: value or "set" for name, value in values.items()}


def batch_sizes(words: Sequence[str]) -> tuple[str | None, str | None]:
    """Return batch per rank and global batch, None if not set; the line overrides the file."""
    for lookup in (partial(value_of, words), config_options(words).get):
        per_rank, total = lookup("--batch-size"), lookup("--global-batch-size")
        if per_rank is not None or total is not None:
            return per_rank, total
    return None, None


def default_batch(words: Sequence[str]) -> int | None:
    """Return the default batch per rank of one of hvdtrain's programs; None for other programs.

    Raises:
        UsageError: the program does not have an option of the command.
    """
    after = [*words[words.index("-m") + 1 :], ""] if "-m" in words else [""]
    package, _, name = after[0].rpartition(".")
    if package != "hvdtrain":
        return None
    if name == "train":
        return RECIPE.batch_size
    if importlib.util.find_spec(f"hvdtrain.workloads.{name}") is None:
        return None
    workload = importlib.import_module(f"hvdtrain.workloads.{name}.task").WORKLOAD
    options = parse(name, after[1:-1], description="", epilog="", kind=workload.options)
    return int(workload.recipe(options).batch_size)


def global_batch(words: Sequence[str], ranks: int) -> int:
    """Return the samples per update of the command on ``ranks`` ranks.

    Raises:
        UsageError: the command has neither a batch size nor a known default, or an invalid option.
    """
    per_rank, total = batch_sizes(words)
    passes = effective_value(words, "--accumulate-steps") or "1"
    size = total or per_rank or str(default_batch(words) or "")
    if not size:
        raise UsageError(
            "missing batch size in the command, e.g. `-- python train.py --batch-size 32`: every "
            "run gets the same global batch"
        )
    for text in (size, passes):
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(
                f"batch size or --accumulate-steps {text}: must be a whole number of at least 1"
            )
    return int(size) if total else int(size) * ranks * int(passes)


def check_measurable(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Reject a command whose runs would not be independent, undisturbed measurements.

    Raises:
        UsageError: with the name of the option.
    """
    if not words:
        raise UsageError(NO_COMMAND)
    if words[0].isdecimal():
        raise UsageError(f"{words[0]!r} is not a command: separate numbers by commas, as in 1,2,4")
    file_options = config_options(words)
    for option, reason in REFUSED.items():
        if value_of(words, option) is not None or option in file_options:
            source = value_of(words, "--config") if option in file_options else "the command"
            raise UsageError(f"{option} in {source}: {reason}: omit it")
    if environ.get("HOROVOD_TIMELINE", DYNAMIC) != DYNAMIC:
        raise UsageError("HOROVOD_TIMELINE is set: recording slows a run down; unset it")
