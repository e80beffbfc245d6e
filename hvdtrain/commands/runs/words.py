"""The command that is measured: its options, on the line and in the file that --config names."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.system.settings import read_settings

# What would make the runs something else than independent measurements.
REFUSED = {
    "--summary": "the study gives each run its own",
    "--metrics": "the study gives each run its own",
    "--checkpoint-dir": "each run would go on from where the one before it ended",
    "--timeline": "recording it slows a run down",
}
NOT_GIVEN = "not given"
DYNAMIC = "DYNAMIC"  # as HOROVOD_TIMELINE: no timeline unless the program starts one


def value_of(words: Sequence[str], option: str) -> str | None:
    """Return the value of ``option``, spelled with dashes or underscores; None where not given."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == option:
            return value if equals else next(iter(words[index + 1 : index + 2]), "")
    return None


def without(words: Sequence[str], option: str) -> list[str]:
    """Return ``words`` without ``option`` and its value."""
    kept, rest = [], iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name.replace("_", "-") != option:
            kept.append(word)
        elif not equals:
            next(rest, None)
    return kept


def difference(old: Sequence[str], new: Sequence[str]) -> str:
    """Return what two commands differ in: ``--num-steps was 40, now 30``."""
    before, now = _by_option(old), _by_option(new)
    if before.get("") != now.get(""):
        return f"{shlex.join(old)}, now {shlex.join(new)}"
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return (
        ", ".join(
            f"{name} was {before.get(name, NOT_GIVEN)}, now {now.get(name, NOT_GIVEN)}"
            for name in changed
        )
        or f"{shlex.join(old)}, now {shlex.join(new)}"
    )


def _by_option(words: Sequence[str]) -> dict[str, str]:
    """Return the value of each option, by its name, and by "" what comes before the first."""
    values: dict[str, str] = {"": ""}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            name, word = name.replace("_", "-"), value
            values[name] = value if equals else ""
        else:
            values[name] = f"{values[name]} {word}".strip()
    return {name: value or "given" for name, value in values.items()}


def from_file(words: Sequence[str]) -> dict[str, str]:
    """Return the options in the file that --config names, as the trainers read it, by ``--name``.

    Empty where there is none, or the program means something else by --config.
    """
    path = value_of(words, "--config")
    try:
        settings = read_settings(Path(path), "") if path else []
    except UsageError:  # the program itself will say what is wrong
        return {}
    return {
        f"--{one.name.replace('_', '-')}": str(one.value)
        for one in settings
        if one.value is not None and one.value is not False
    }


def given(words: Sequence[str], option: str) -> str | None:
    """Return the value of ``option`` on the line, else in the file; None where neither has it."""
    value = value_of(words, option)
    return from_file(words).get(option) if value is None else value


def batches(words: Sequence[str]) -> tuple[str | None, str | None]:
    """Return batch per rank and global batch, as far as line or file give them; the line wins."""
    for find in (partial(value_of, words), from_file(words).get):
        own, total = find("--batch-size"), find("--global-batch-size")
        if own is not None or total is not None:
            return own, total
    return None, None


def check_measurable(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Refuse a command whose runs would not be independent, undisturbed measurements.

    Raises:
        UsageError: naming the option.
    """
    if not words:
        raise UsageError("what should be measured? Give it after --, as in `-- python train.py`")
    file = from_file(words)
    for option, reason in REFUSED.items():
        if value_of(words, option) is not None or option in file:
            place = value_of(words, "--config") if option in file else "the command"
            raise UsageError(f"{option} in {place}: {reason}; leave it out")
    if environ.get("HOROVOD_TIMELINE", DYNAMIC) != DYNAMIC:
        raise UsageError("HOROVOD_TIMELINE is set: recording slows a run down; unset it")
