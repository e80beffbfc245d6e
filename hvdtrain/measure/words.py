"""The command that a ladder measures: what it must not say, and its batch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.files import read_yaml
from hvdtrain.measure.records import STRONG

# What would make the runs of a ladder something else than independent measurements.
REFUSED = {
    "--summary": "the ladder gives each run its own",
    "--metrics": "the ladder gives each run its own",
    "--checkpoint-dir": "each run would go on from where the one before it ended",
    "--timeline": "recording it slows a run down",
}
DYNAMIC = "DYNAMIC"  # as HOROVOD_TIMELINE: no timeline unless the program starts one


def value_of(words: Sequence[str], option: str) -> str | None:
    """The value that ``words`` give ``option``, spelled with dashes or underscores; None: none."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == option:
            return value if equals else next(iter(words[index + 1 : index + 2]), "")
    return None


def without(words: Sequence[str], option: str) -> list[str]:
    """``words`` less ``option`` and its value."""
    kept: list[str] = []
    skip = False
    for word in words:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name.replace("_", "-") == option:
            skip = not equals
        else:
            kept.append(word)
    return kept


def from_file(words: Sequence[str]) -> dict[str, str]:
    """The options in the file that --config names, as the trainers read it, by ``--name``.

    Nothing where there is none, or the program means something else by --config.
    """
    path = value_of(words, "--config")
    try:
        content = read_yaml(Path(path)) if path else None
    except (OSError, ValueError):  # the program itself will say what is wrong
        return {}
    return {
        f"--{str(name).replace('_', '-')}": str(value)
        for name, value in (content.items() if isinstance(content, dict) else ())
        if value is not None and value is not False
    }


def batches(words: Sequence[str]) -> tuple[str | None, str | None]:
    """The batch of a rank and that of all ranks, as far as line or file say; the line wins."""
    for find in (partial(value_of, words), from_file(words).get):
        own, total = find("--batch-size"), find("--global-batch-size")
        if own is not None or total is not None:
            return own, total
    return None, None


def check_words(words: Sequence[str], scaling: str, environ: Mapping[str, str]) -> None:
    """Refuse a command that cannot be measured as it is.

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
    own, total = batches(words)
    if scaling == STRONG and total is None and own is None:
        raise UsageError(
            "--strong keeps the batch of all ranks: say how large, as in "
            "`-- python -m hvdtrain.mnist --global-batch-size 256`"
        )
    if scaling != STRONG and total is not None:
        raise UsageError(
            "--global-batch-size in the command, or its file of options, keeps the batch of all "
            "ranks: say --strong, or give --batch-size, that of a rank"
        )


def with_batch(words: Sequence[str], scaling: str, smallest: int) -> list[str]:
    """``words`` with the batch as the scaling needs it.

    In strong scaling a ``--batch-size`` is taken as that of a rank at the smallest size.

    Raises:
        UsageError: it is no number.
    """
    own, given = batches(words)
    if scaling != STRONG or own is None or given is not None:
        return list(words)
    if not re.fullmatch(r"[1-9]\d*", own):
        raise UsageError(f"--batch-size {own}: give a whole number of 1 or more")
    total = int(own) * smallest
    return [*without(words, "--batch-size"), "--global-batch-size", str(total)]
