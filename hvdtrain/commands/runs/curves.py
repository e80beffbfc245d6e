"""The training curves of a run, from its ``--metrics`` file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.steps.summary import typed

Record = dict[str, Any]


@dataclass(frozen=True)
class TrainingCurves:
    """The records of a ``--metrics`` file: one per log interval, and one per epoch."""

    path: Path
    steps: list[Record]
    epochs: list[Record]


@dataclass(frozen=True)
class _Line:
    """The numbers in a line of a ``--metrics`` file."""

    step: float | None = None
    loss: float | None = None
    step_loss: float | None = None
    eval_loss: float | None = None
    eval_accuracy: float | None = None
    learning_rate: float | None = None
    images_per_second: float | None = None


def read_curves(path: Path, shown: Path | None = None) -> TrainingCurves | None:
    """Return the training curves in a file; None if no line is a training record.

    Args:
        path: the file.
        shown: its path in reports, if different.

    Raises:
        OSError, ValueError: it cannot be read, or only some lines are records. The last line may
            be incomplete.
    """
    kinds: dict[str, dict[int, Record]] = {"step": {}, "epoch": {}}
    lines, wrong = path.read_text().splitlines(), ""
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or record.get("kind") not in ("step", "epoch"):
                raise ValueError("not a training record")
            step = typed(_Line, record).step
            if step is None:
                raise ValueError("missing step")
            # A resumed run repeats steps: the last record of a step counts.
            kinds[record["kind"]][int(step)] = record
        except (ValueError, OverflowError, RecursionError) as error:
            if number < len(lines):
                wrong = wrong or f"line {number}: {error}"
    steps, epochs = ([records[step] for step in sorted(records)] for records in kinds.values())
    if wrong and (steps or epochs):
        raise ValueError(wrong)
    return TrainingCurves(shown or path, steps, epochs) if steps or epochs else None
