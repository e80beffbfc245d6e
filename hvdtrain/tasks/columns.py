"""Columns of the file of ``--predict``: label and prediction of each sample."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import UsageError
from hvdtrain.system.output.text import page

Array = NDArray[Any]

SAMPLE = "sample"  # the first column: index in the evaluation set, from 0


@dataclass(frozen=True)
class Columns:
    """The columns of a task, in addition to the index of the sample.

    Attributes:
        names: names in the first line of the file.
        values: function of the labels and outputs of a batch that returns one array of shape (n,)
            per name. A sample's values must not depend on other samples of its batch.
    """

    names: tuple[str, ...]
    values: Callable[[Array, Array], Sequence[Any]]

    @property
    def header(self) -> str:
        """The first line of the file."""
        return _lines([(SAMPLE, *self.names)])

    def lines(self, first: int, labels: Array, outputs: Array) -> str:
        """Return a line of CSV per sample, numbered from ``first``.

        Integers and strings are written unchanged, floats with 9 digits, so that the file does not
        depend on the last bits, which depend on the batches.

        Raises:
            UsageError: ``values`` returns other than one value per name and sample.
        """
        columns = [np.asarray(values) for values in self.values(labels, outputs)]
        shapes = [column.shape for column in columns]
        if shapes != [(len(labels),)] * len(self.names):
            raise UsageError(
                f"--predict: {len(labels)} samples and the columns {', '.join(self.names)} take "
                f"{len(self.names)} arrays of the shape ({len(labels)},), the task returns "
                f"{', '.join(map(str, shapes)) or 'none'}"
            )
        numbers = range(first, first + len(labels))
        return _lines(list(zip(numbers, *map(_texts, columns), strict=True)))


def _texts(column: Array) -> list[str]:
    form = "#.9g" if column.dtype.kind == "f" else ""
    return [format(value, form) for value in column.tolist()]


def _lines(rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def classes(labels: Array, outputs: Array) -> tuple[Array, Array, Array]:
    """Return class, most probable class and its probability, from one score (logit) per class.

    The probability is that of the softmax, in float64.

    Raises:
        UsageError: labels or outputs are not those of a classifier.
    """
    if outputs.ndim != 2 or labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UsageError(
            f"--predict: labels of type {labels.dtype} and outputs of the shape "
            f"({', '.join(['n', *map(str, outputs.shape[1:])])}) are not classes and their scores: "
            f"the task must define its columns (columns=Columns(names, values), see {page('own')})"
        )
    likely = outputs.argmax(1)
    highest = outputs.max(1, keepdims=True)
    return labels, likely, 1 / np.exp(outputs - highest).sum(1)


CLASSES = Columns(("label", "prediction", "probability"), classes)
