"""The course of a training, from its file of ``--metrics``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.steps.summary import typed

Record = dict[str, Any]


@dataclass(frozen=True)
class Course:
    """A file of ``--metrics``: one object per log interval, one per epoch."""

    path: Path
    steps: list[Record]
    epochs: list[Record]


@dataclass(frozen=True)
class _Line:
    """The numbers in a line of such a file."""

    step: float | None = None
    loss: float | None = None
    step_loss: float | None = None
    eval_loss: float | None = None
    eval_accuracy: float | None = None
    learning_rate: float | None = None
    images_per_second: float | None = None


def read_course(path: Path, shown: Path | None = None) -> Course | None:
    """Return the course in a file of lines; None where no line of it is a record of a training.

    Args:
        path: the file.
        shown: its path in what is reported, if another.

    Raises:
        OSError, ValueError: it cannot be read; or some lines are records, and another one is not.
            The last one may have been cut.
    """
    kinds: dict[str, dict[int, Record]] = {"step": {}, "epoch": {}}
    lines, wrong = path.read_text().splitlines(), ""
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or record.get("kind") not in ("step", "epoch"):
                raise ValueError("no record of a training")
            step = typed(_Line, record).step
            if step is None:
                raise ValueError("it has no step")
            # A run that was resumed repeats steps: what came later counts.
            kinds[record["kind"]][int(step)] = record
        except (ValueError, OverflowError, RecursionError) as error:
            if number < len(lines):
                wrong = wrong or f"line {number}: {error}"
    steps, epochs = ([some[step] for step in sorted(some)] for some in kinds.values())
    if wrong and (steps or epochs):
        raise ValueError(wrong)
    return Course(shown or path, steps, epochs) if steps or epochs else None
