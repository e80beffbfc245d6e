"""The command that a ladder measures: what it must not say, and its batch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hvdtrain.errors import UsageError
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


def check_words(words: Sequence[str], scaling: str, environ: Mapping[str, str]) -> None:
    """Refuse a command that cannot be measured as it is.

    Raises:
        UsageError: naming the option.
    """
    if not words:
        raise UsageError("what should be measured? Give it after --, as in `-- python train.py`")
    for option, reason in REFUSED.items():
        if value_of(words, option) is not None:
            raise UsageError(f"{option} in the command: {reason}; leave it out")
    if environ.get("HOROVOD_TIMELINE", DYNAMIC) != DYNAMIC:
        raise UsageError("HOROVOD_TIMELINE is set: recording slows a run down; unset it")
    total, own = value_of(words, "--global-batch-size"), value_of(words, "--batch-size")
    if scaling == STRONG and total is None and own is None:
        raise UsageError(
            "--strong keeps the batch of all ranks: say how large, as in "
            "`-- python -m hvdtrain.mnist --global-batch-size 256`"
        )
    if scaling != STRONG and total is not None:
        raise UsageError(
            "--global-batch-size in the command keeps the batch of all ranks: say --strong, or "
            "give --batch-size, that of a rank"
        )


def with_batch(words: Sequence[str], scaling: str, smallest: int) -> list[str]:
    """``words`` with the batch as the scaling needs it.

    In strong scaling a ``--batch-size`` is taken as that of a rank at the smallest size.

    Raises:
        UsageError: it is no number.
    """
    own = value_of(words, "--batch-size")
    if scaling != STRONG or own is None or value_of(words, "--global-batch-size") is not None:
        return list(words)
    if not re.fullmatch(r"[1-9]\d*", own):
        raise UsageError(f"--batch-size {own}: give a whole number of 1 or more")
    total = int(own) * smallest
    return [*without(words, "--batch-size"), "--global-batch-size", str(total)]
